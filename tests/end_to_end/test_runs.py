"""Whole runs, as a user starts them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.end_to_end.conftest import Command, Finished, random_model

EVERY_RUN = {
    "step", "reward/mean", "reward/std", "response_tokens/mean", "response_tokens/clip_fraction", "policy/loss",
    "policy/grad_norm", "policy/clip_fraction", "policy/entropy", "policy/skipped_steps", "kl/approx",
    "rollout/logprob_diff_mean", "seconds/generate", "seconds/reward", "seconds/advantage", "seconds/update_actor",
    "seconds/reshard", "seconds/sleep", "seconds/wake", "seconds/total", "tokens_per_second",
    "reshard/received_bytes_max", "reshard/bound_bytes_max", "reshard/peak_extra_bytes_max", "reshard/fingerprint_ok",
    "reshard/num_collectives_max",
}  # fmt: skip
WITH_CRITIC = {"value/loss", "seconds/values", "seconds/update_critic"}
WITH_REFERENCE = {"kl/reference", "seconds/reference"}
SMALL = ("trainer.total_steps=3", "data.prompts_per_step=8", "actor.minibatch_prompts=4", "data.eval_prompts=8")


def check(run: Finished, expected: set[str], absent: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    assert run.code == 0, run.err[-3000:]
    assert run.left_behind == ()
    rows = run.metrics
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert "eval/reward/mean" in rows[0] and "eval/reward/mean" in rows[-1]
    for row in rows[1:]:
        assert expected <= row.keys(), expected - row.keys()
        assert not (absent & row.keys()), absent & row.keys()
        assert all(value is not None and math.isfinite(value) for value in row.values())
        assert row["reshard/fingerprint_ok"] == 1.0
        assert row["reshard/received_bytes_max"] == row["reshard/bound_bytes_max"]
        assert row["rollout/logprob_diff_mean"] < 1e-4


LAYOUTS = {
    "colocate": ("placement=colocate",),
    "split": ("placement=split",),
    "standalone_rollout": ("placement=standalone_rollout",),
    "train_pp2_rollout_tp2": ("actor.layout.tp=1", "actor.layout.pp=2", "rollout.layout.tp=2"),
    "train_tp1_rollout_tp2": ("actor.layout.tp=1", "rollout.layout.tp=2"),
}


@pytest.mark.parametrize(
    "layout",
    [
        name
        if name in ("split", "standalone_rollout", "train_pp2_rollout_tp2")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in LAYOUTS
    ],
)
def test_three_steps_of_ppo_report_every_metric_of_the_contract(flowrl: Command, layout: str) -> None:
    run = flowrl(*SMALL, *LAYOUTS[layout])
    check(run, EVERY_RUN | WITH_CRITIC | WITH_REFERENCE)
    samples = [json.loads(line) for line in (run.folder / "samples" / "step_3.jsonl").read_text().splitlines()]
    assert {"id", "prompt", "response", "reward", "finish_reason"} == samples[0].keys()
    assert (run.folder / "config.yaml").exists() and (run.folder / "reward.png").exists()
    assert any((run.folder / "logs").iterdir()) and any((run.folder / "tensorboard").iterdir())


@pytest.mark.slow
def test_rewards_do_not_depend_on_where_responses_are_generated(flowrl: Command) -> None:
    """SYN-01: with engines on devices of their own, in another layout, every step samples and learns the same."""
    apart = (
        "placement=standalone_rollout",
        "cluster.rollout_devices=2",
        "actor.layout.pp=2",
        "actor.layout.tp=1",
        "rollout.layout.tp=2",
    )
    runs = [flowrl(*SMALL, "placement=colocate", name="together"), flowrl(*SMALL, *apart, name="apart")]
    for run in runs:
        check(run, EVERY_RUN | WITH_CRITIC | WITH_REFERENCE)
    together, separate = (
        [(row.get("reward/mean"), row.get("eval/reward/mean")) for row in run.metrics] for run in runs
    )
    assert together == separate


def test_a_run_of_four_processes_without_critic_exports_a_folder(flowrl: Command) -> None:
    run = flowrl(
        *SMALL, "algorithm=grpo", "kl=none", "cluster.devices=4", "actor.layout.tp=2", "actor.layout.pp=2",
        "rollout.layout.tp=4", "trainer.export_every=3",
    )  # fmt: skip
    check(run, EVERY_RUN, WITH_CRITIC | WITH_REFERENCE)
    exported = {path.name for path in (run.folder / "export" / "step_3").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= exported


@pytest.mark.slow
def test_an_interleaved_pipeline_runs_like_a_plain_one(flowrl: Command, tmp_path: Path) -> None:
    """Actor, critic and reference in two stages of two chunks: rewards, losses and gradients as with one chunk each."""
    model = random_model(tmp_path / "model", "Qwen3", intermediate_size=128)
    # A random model solves nothing: this reward differs with every character of a response.
    graded = tmp_path / "graded.py"
    graded.write_text("def score(prompt, response, row):\n    return sum(map(ord, response)) % 7 / 7\n")
    layout = ("actor.layout.pp=2", "rollout.layout.tp=2", "trainer.export_every=3", f"reward.function={graded}:score")
    runs = [
        flowrl(*SMALL, f"model.path={model}", *layout, f"actor.layout.vpp={vpp}", name=f"vpp{vpp}") for vpp in (1, 2)
    ]
    for run in runs:
        check(run, EVERY_RUN | WITH_CRITIC | WITH_REFERENCE)
    assert runs[0].metrics[1]["reward/std"] > 0
    for one, two in zip(runs[0].metrics, runs[1].metrics, strict=True):
        for name in {"reward/mean", "response_tokens/mean", "eval/reward/mean"} & one.keys():
            assert one[name] == two[name], name
        for name in {"policy/grad_norm", "value/loss", "policy/entropy", "kl/reference"} & one.keys():
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
    plain, interleaved = (load_file(run.folder / "export" / "step_3" / "model.safetensors") for run in runs)
    for name, weight in plain.items():
        assert (weight - interleaved[name]).norm() <= 1e-3 * weight.norm(), name


def last_rewards(run: Finished) -> tuple[float, float]:
    rows = run.metrics
    training = [row["reward/mean"] for row in rows[-5:]]
    return sum(training) / 5, rows[-1]["eval/reward/mean"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_ppo_learns_the_built_in_task(flowrl: Command, seed: int) -> None:
    run = flowrl(f"trainer.seed={seed}", timeout=600)
    check(run, EVERY_RUN | WITH_CRITIC | WITH_REFERENCE)
    training, held_out = last_rewards(run)
    assert 0.05 < run.metrics[0]["eval/reward/mean"] < 0.5
    assert training >= 0.9 and held_out >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "overrides", "bar"), [("flowrl.main_ppo", ("algorithm=grpo",), 0.9), ("recipes.remax", (), 0.8)]
)
def test_algorithms_without_a_critic_learn_it_too(
    flowrl: Command, module: str, overrides: tuple[str, ...], bar: float
) -> None:
    run = flowrl(*overrides, module=module, timeout=600)
    check(run, EVERY_RUN, WITH_CRITIC)
    assert last_rewards(run)[0] >= bar


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("dry_run=true", "cluster.devices=3", "actor.layout.tp=2"), ("cluster.devices=3", "2")),
        (("+trainer.total_stepz=3",), ("trainer.total_stepz", "trainer.total_steps")),
    ],
)
def test_a_wrong_configuration_is_one_message_and_exit_2(
    flowrl: Command, overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    run = flowrl(*overrides, timeout=60)
    assert run.code == 2
    assert all(word in run.err for word in words), run.err
    assert "Traceback" not in run.err and run.seconds < 30
    assert not (Path(run.folder) / "logs").exists()
