from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl.config.cli import run_main
from flowrl.config.compose import compose_all
from flowrl.config.machine import Machine
from flowrl.config.memory import memory, rank_parameters
from flowrl.config.model_shape import ModelShape, shape_of
from flowrl.config.plan import RunPlan, make_plan, render, size
from flowrl.config.schema import Config
from flowrl.resharding.measure.folder import write_config
from flowrl.resharding.shapes import planned_shape

MakeModel = Callable[..., Path]
DATA = Path(__file__).parents[2] / "docs" / "benchmarks" / "data"
"""What was measured, by file."""


def stored(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def plan(*argv: str) -> RunPlan:
    composed = compose_all(argv)
    return make_plan(composed.config, composed.shapes, composed.machine)


def test_the_plan_counts_what_the_run_will_do() -> None:
    """CFG-01: rows, mini-batches and optimizer steps with their units."""
    made = plan("data.prompts_per_step=12", "rollout.samples_per_prompt=3", "actor.minibatch_prompts=4", "actor.epochs=2",
                "critic.minibatch_prompts=6", "critic.epochs=1", "critic.warmup_steps=2", "trainer.total_steps=10")  # fmt: skip
    assert made.rows_per_step == 36
    assert [(u.role, u.minibatches, u.minibatch_rows, u.epochs) for u in made.updates] == [
        ("actor", 3, 12, 2),
        ("critic", 2, 18, 1),
    ]
    steps = made.optimizer_steps
    assert (steps.actor_per_step, steps.actor_total, steps.critic_per_step, steps.critic_total) == (6, 48, 2, 20)


@pytest.mark.parametrize(("devices", "samples", "rows_per_slice"), [(1, 2, 64), (3, 2, 22), (4, 2, 16)])
def test_rows_of_a_slice_are_the_largest_share(devices: int, samples: int, rows_per_slice: int) -> None:
    """BAT-01: rows need not divide by the data-parallel size."""
    made = plan(f"cluster.devices={devices}", f"rollout.samples_per_prompt={samples}", "actor.layout.tp=1")
    assert made.updates[0].rows_per_slice == rows_per_slice


def test_a_budget_below_a_row_is_legal_and_noted() -> None:
    """PAR-02: a row longer than the budget gets a micro-batch of its own."""
    made = plan("actor.tokens_per_microbatch=1", "actor.layout.tp=1")
    assert made.updates[0].microbatches == made.updates[0].rows_per_slice == 128
    assert any("micro-batch of its own" in note for note in made.notes)
    assert not plan().notes


def test_cut_sampling_is_noted() -> None:
    """ROL-02: a truncated distribution biases the ratios."""
    assert any("ratios are biased" in note for note in plan("rollout.top_k=2").notes)


@pytest.mark.parametrize(
    ("argv", "roles"),
    [
        ([], [("actor", "main"), ("critic", "main"), ("reference", "main"), ("rollout", "main")]),
        (["algorithm=grpo", "kl=none"], [("actor", "main"), ("rollout", "main")]),
        (["placement=split"], [("actor", "main"), ("critic", "critic"), ("reference", "main"), ("rollout", "main")]),
        (
            ["placement=standalone_rollout"],
            [("actor", "main"), ("critic", "main"), ("reference", "main"), ("rollout", "rollout")],
        ),
    ],
)
def test_only_roles_of_the_run_are_placed(argv: list[str], roles: list[tuple[str, str]]) -> None:
    made = plan(*argv)
    assert [(r.role, r.pool) for r in made.roles] == roles
    names = {role for role, _ in roles}
    assert {(name, m.pool) for m in made.memory for name in m.parts if name in names} == set(roles)
    assert not {"actor", "critic", "reference", "rollout"} - names & {name for m in made.memory for name in m.parts}


def test_generation_on_its_own_pool_is_planned_on_its_own_devices() -> None:
    """Half as many devices as the trainer's unless given; rows and memory are of that pool."""
    argv = ["placement=standalone_rollout", "cluster.devices=8", "actor.layout.tp=2"]
    made = plan(*argv)
    assert [(pool.name, pool.devices) for pool in made.pools] == [("main", 8), ("rollout", 4)]
    assert made.roles[-1].ranks == range(4) and made.rows_per_replica == 512 // 4
    for pool in made.pools:
        assert pool.bytes_per_rank == max(entry.total for entry in made.memory if entry.pool == pool.name)
    assert all(("rollout" in entry.parts) == (entry.pool == "rollout") for entry in made.memory)
    assert {entry.phase for entry in made.memory if entry.pool == "rollout"} == {"generate", "reshard"}
    text = render(plan(*argv, "cluster.rollout_devices=2", "rollout.layout.tp=2"))
    assert "rollout    pool rollout ranks 0-1  tp 2, pp 1, 1 replica(s)" in text
    assert "pool main " in text and "at most, on each of 8 rank(s)" in text and "on each of 2 rank(s)" in text


def test_memory_follows_the_layout() -> None:
    shape = shape_of("builtin:tiny")
    whole = rank_parameters(shape, 1, [2])
    assert whole == pytest.approx(shape.num_parameters, rel=0.01)
    assert rank_parameters(shape, 2, [2]) == -(-whole // 2)
    assert rank_parameters(shape, 1, [1, 1]) == pytest.approx(whole / 2, rel=0.01)
    plain, sharded = (
        phase(plan("actor.layout.tp=1", f"actor.distributed_optimizer={flag}"), "update_actor")
        for flag in ("false", "true")
    )
    assert plain["actor"] - sharded["actor"] == whole * 8 // 2


def phase(made: RunPlan, name: str) -> Mapping[str, int]:
    return next(entry for entry in made.memory if entry.phase == name).parts


H200 = Machine(cpus=16, memory_bytes=128 << 30, shared_memory_bytes=64 << 30, gpus=2, gpu_memory_bytes=150_754_820_096)


def on_a_gpu(*argv: str) -> RunPlan:
    composed = compose_all(argv, machine=H200)
    return make_plan(composed.config, composed.shapes, composed.machine)


def test_roles_of_a_gpu_take_turns() -> None:
    """Whoever does not work is on the host or asleep; without offloading the trainer stays, and nothing moves on a CPU."""
    held = {"actor", "critic", "reference", "rollout"}
    one = "cluster.devices=1"
    roles = {e.phase: held & e.parts.keys() for e in on_a_gpu(one).memory}
    assert roles["generate"] == {"rollout"} and roles["reshard"] == {"actor", "rollout"}
    for name in ("log_probs", "reference", "values", "update_critic", "update_actor"):
        assert roles[name] == {"actor", "critic", "reference"}
    stays = on_a_gpu(one, "actor.offload=false")
    assert held & phase(stays, "generate").keys() == {"actor", "rollout"}
    assert all(held <= e.parts.keys() for e in plan().memory if e.phase != "reshard")
    apart = on_a_gpu("placement=standalone_rollout", one)
    assert [held & e.parts.keys() for e in apart.memory if e.phase == "reshard"] == [held - {"rollout"}, {"rollout"}]


def test_a_budget_beyond_all_rows_takes_no_more_memory_than_they_do() -> None:
    """A mini-batch is 256 rows of 24 tokens; on eight ranks each has an eighth of them."""
    name = "activations of a micro-batch"
    most, beyond = (
        phase(plan("actor.layout.tp=1", "cluster.devices=1", f"actor.tokens_per_microbatch={budget}"), "update_actor")
        for budget in (256 * 24, 10**12)
    )
    assert most == beyond
    eighth = phase(plan("actor.layout.tp=1", "cluster.devices=8", "actor.tokens_per_microbatch=6144"), "update_actor")
    assert eighth[name] * 8 == most[name]


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_a_predicted_update_is_what_a_gpu_was_seen_to_take(tokens: int) -> None:
    """Actor of Qwen2.5-1.5B on an H200, rows of 2048 tokens."""
    argv = ("algorithm=grpo", "kl=none", "cluster.devices=1", f"actor.tokens_per_microbatch={tokens}",
            "data.prompts_per_step=512", "actor.minibatch_prompts=512")  # fmt: skip
    composed = compose_all(argv, machine=H200)
    shapes = replace(composed.shapes, policy=planned_shape("qwen2.5-1.5b"))
    found = next(e for e in memory(composed.config, shapes) if e.phase == "update_actor")
    measured = [row for file in DATA.glob("train-h200-*.json") for row in stored(file)["rows"] if row["case"] == "one length"
                and stored(file)["settings"]["rows"] * 2048 == tokens]  # fmt: skip
    assert [found.total == pytest.approx(row["peak_bytes"], rel=0.05) for row in measured] == [True]


def predicted(tmp_path: Path, shape: ModelShape, words: Sequence[str], gpus: int) -> dict[str, int]:
    """Bytes by phase of a run of so many GPUs, on the pool that takes most."""
    folder, file = write_config(tmp_path, shape, "bfloat16"), tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n')
    composed = compose_all(
        [*words, f"model.path={folder}", f"data.train_files=[{file}]", "data.eval_files=[]", "reward.function=m:f",
         "actor.tokens_per_microbatch=16384"],
        machine=replace(H200, gpus=gpus),
    )  # fmt: skip
    found: dict[str, int] = {}
    for entry in memory(composed.config, composed.shapes):
        found[entry.phase] = max(entry.total, found.get(entry.phase, 0))
    return found


def assert_near(found: Mapping[str, int], measured: Mapping[str, float]) -> None:
    """Every phase within 5 %: tests on a GPU allow 10 %."""
    assert measured and found.keys() == measured.keys()
    ratios = {phase: found[phase] / size for phase, size in measured.items()}
    assert {phase: ratio for phase, ratio in ratios.items() if not 0.95 <= ratio <= 1.05} == {}


def peaks(stored_peaks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {peak["phase"]: peak["measured_bytes"] for peak in stored_peaks}


@pytest.mark.parametrize(
    ("file", "words", "phases"),
    [("", ("algorithm=gae", "kl=reward"), 7), ("-grpo", ("algorithm=grpo", "kl=none"), 4)],
    ids=["ppo", "grpo"],
)
def test_predicted_phases_are_what_a_run_on_a_gpu_was_seen_to_take(
    tmp_path: Path, file: str, words: tuple[str, ...], phases: int
) -> None:
    """Qwen2.5-1.5B on an H200."""
    content, shape = stored(DATA / f"steps-h200-qwen2.5-1.5b{file}.json"), planned_shape("qwen2.5-1.5b")
    assert isinstance(shape, ModelShape)
    given = [f"{key}={value}" for key, value in content["settings"].items()
             if "." in key and key not in ("reward.function", "data.eval_files")]  # fmt: skip
    assert len(content["memory"]) == phases
    assert_near(predicted(tmp_path, shape, [*given, *words], 1), peaks(content["memory"]))


ON_TWO_GPUS = ("data.prompts_per_step=64", "rollout.samples_per_prompt=4", "data.max_prompt_tokens=128", "algorithm=grpo",
               "rollout.max_response_tokens=256", "kl=none", "rollout.cuda_graphs=false", "actor.offload=false")  # fmt: skip


def test_predicted_phases_are_what_runs_on_two_gpus_were_seen_to_take(tmp_path: Path) -> None:
    """Llama-7B of 18 layers, trained with tensor parallelism, and with generation on a GPU of its own."""
    shape = planned_shape("llama-7b")
    assert isinstance(shape, ModelShape)
    runs = {run["name"]: run for file in DATA.glob("multi-gpu-2-h200*.json") for run in stored(file)["steps"]}
    assert {"steps_tp", "steps_apart"} <= runs.keys()
    for run in (runs["steps_tp"], runs["steps_apart"]):
        given = [f"{key}={value}" for key, value in run["settings"].items()]
        found = predicted(tmp_path, replace(shape, num_layers=18), [*ON_TWO_GPUS, *given], 2)
        assert_near(found, peaks(run["memory"]))


@pytest.mark.parametrize(("model", "layout"), [("llama-7b", "pp=2"), ("qwen3-30b-a3b", "ep=2")])
def test_runs_of_two_layers_are_predicted_by_what_they_make_for_the_moment(
    tmp_path: Path, model: str, layout: str
) -> None:
    """A pipeline and experts in parallel, on two H200: of the pipeline what a forward pass makes is a fifth of all."""
    shape = planned_shape(model)
    assert isinstance(shape, ModelShape)
    words = [*ON_TWO_GPUS, "actor.minibatch_prompts=32", f"actor.layout.{layout}"]
    words += ["rollout.layout.tp=2", "cluster.devices=2"]
    content = stored(DATA / f"peaks-h200x2-{model}-of-2-layers.json")
    assert len(content["memory"]) == 4
    assert_near(predicted(tmp_path, replace(shape, num_layers=2), words, 2), peaks(content["memory"]))


def test_all_phases_of_a_small_model_with_a_wide_vocabulary_are_predicted(tmp_path: Path) -> None:
    """PPO of Qwen2.5-0.5B on an H200, 64 prompts x 4 samples of 128 and 256 tokens: what tests/gpu/test_prediction.py saw."""
    shape = planned_shape("qwen2.5-0.5b")
    assert isinstance(shape, ModelShape)
    words = ["data.prompts_per_step=64", "rollout.samples_per_prompt=4", "data.max_prompt_tokens=128", "cluster.devices=1",
             "rollout.max_response_tokens=256", "algorithm=gae", "kl=reward", "actor.minibatch_prompts=32"]  # fmt: skip
    content = stored(DATA / "peaks-h200-qwen2.5-0.5b.json")
    assert len(content["memory"]) == 7
    assert_near(predicted(tmp_path, shape, words, 1), peaks(content["memory"]))


def test_what_an_engine_makes_to_sample_is_of_its_runner() -> None:
    """vLLM has another runner for pipelines (and for experts), with probabilities in float32 and without counts."""
    argv = ["algorithm=grpo", "kl=none", "cluster.devices=2", "rollout.max_batch_requests=512"]
    found = []
    for pp in (1, 2):
        composed = compose_all([*argv, f"rollout.layout.pp={pp}"], machine=replace(H200, gpus=2))
        shape = planned_shape("qwen2.5-1.5b")
        assert isinstance(shape, ModelShape)
        shapes = replace(composed.shapes, policy=shape)
        found.append(next(e for e in memory(composed.config, shapes) if e.phase == "generate").parts)
    ids, weights = 512 * 151936, shape.num_parameters * 2
    assert found[0]["rollout"] == pytest.approx(weights + ids * 4 + ids / 8, rel=1e-5) and "sampling" not in found[0]
    assert found[1]["rollout"] < weights and found[1]["sampling"] == ids * (2 + 3 * 4)


@pytest.mark.parametrize("apart", [False, True])
def test_the_workspace_of_experts_is_there_in_every_phase_where_an_engine_is(tmp_path: Path, apart: bool) -> None:
    """Of 8192 tokens x 8 experts, two rows of 2048 in bfloat16: it does not sleep, and a trainer's own GPU has none."""
    shape = planned_shape("qwen3-30b-a3b")
    assert isinstance(shape, ModelShape)
    folder, file = write_config(tmp_path, replace(shape, num_layers=4), "bfloat16"), tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n')
    argv = ["algorithm=grpo", "kl=none", "cluster.devices=2", "actor.layout.ep=2", "rollout.layout.tp=2"]
    argv += [f"model.path={folder}", f"data.train_files=[{file}]", "data.eval_files=[]", "reward.function=m:f"]
    argv += ["data.prompts_per_step=64", "rollout.samples_per_prompt=4", "rollout.max_response_tokens=256"]
    argv += ["placement=standalone_rollout", "cluster.rollout_devices=2"] * apart
    composed = compose_all(argv, machine=replace(H200, gpus=4))
    found = memory(composed.config, composed.shapes)
    rows = {(entry.pool, entry.phase): entry.parts.get("workspace of experts", 0) for entry in found}
    trainers = {phase for (pool, phase), size in rows.items() if size == 0}
    assert set(rows.values()) - {0} == {8192 * 8 * (2048 + 2048) * 2}
    assert trainers == ({"log_probs", "update_actor", "reshard"} if apart else set())


def test_an_interleaved_pipeline_is_planned_and_estimated(make_model: MakeModel, tmp_path: Path) -> None:
    """The same weights; activations of five quarters of the layers; micro-batches in groups of two."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n')
    argv = [f"model.path={make_model(num_hidden_layers=8)}", f"data.train_files={file}", f"data.eval_files={file}"]
    argv += ["reward.function=m:f", "actor.layout.pp=2", "actor.minibatch_prompts=1", "rollout.samples_per_prompt=3"]
    argv.append("actor.tokens_per_microbatch=1")
    plain, interleaved = plan(*argv), plan(*argv, "actor.layout.vpp=2")
    assert [role.layout for role in interleaved.roles[:3]] == ["tp 1, pp 2, vpp 2"] * 3
    parts = [phase(made, "update_actor") for made in (plain, interleaved)]
    assert parts[0]["actor"] == parts[1]["actor"]
    name = "activations of a micro-batch"
    assert parts[1][name] * 4 == parts[0][name] * 5
    assert (plain.updates[0].microbatches, interleaved.updates[0].microbatches) == (3, 4)


def test_the_text_names_everything() -> None:
    text = render(plan())
    for part in (
        "prompts_per_step: 64",
        "actor      pool main",
        "ranks 0-1  tp 2, pp 1",
        "64 prompts x 8 samples = 512 rows",
        "80 optimizer steps",
        "KV cache",
    ):
        assert part in text
    assert [size(n) for n in (1, 1536, 2**31, 2**41)] == ["1 B", "1.5 KiB", "2.0 GiB", "2.0 TiB"]


def ends(argv: list[str], main: object = None) -> int:
    def nothing(config: Config) -> int | None:
        raise AssertionError("must not run")

    with pytest.raises(SystemExit) as caught:
        run_main(main or nothing, argv)  # type: ignore[arg-type]
    return int(caught.value.code or 0)


def test_dry_run_prints_the_plan_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(["dry_run=true"]) == 0
    assert "Placement" in capsys.readouterr().out


def test_errors_of_configuration_are_one_message_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(["+trainer.total_stepz=3"]) == 2
    assert capsys.readouterr() == (
        "",
        "configuration error: unknown key trainer.total_stepz; did you mean trainer.total_steps?\n",
    )
    assert ends(["dry_run=true", "trainer.total_steps=0", "data.prompts_per_step=x"]) == 2
    assert capsys.readouterr().err.startswith("2 configuration errors:\n  1. data.prompts_per_step='x'")


def test_the_exit_code_is_that_of_main() -> None:
    assert ends([], lambda config: None) == 0
    assert ends([], lambda config: 130) == 130
    with pytest.raises(RuntimeError):
        run_main(lambda config: (_ for _ in ()).throw(RuntimeError("a failure")), [])


def test_help_lists_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends(["--help"]) == 0
    text = capsys.readouterr().out
    assert "algorithm=gae|grpo" in text and "data.prompts_per_step=64" in text and "kl.horizon=10000" in text
