"""Whole runs of a mixture of experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Command, random_model
from tests.end_to_end.test_runs import EVERY_RUN, SMALL, WITH_CRITIC, WITH_REFERENCE, check


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE of random weights with the tokenizer of the built-in model."""
    sizes = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
    return random_model(tmp_path_factory.mktemp("mixture") / "model", "Qwen3Moe", intermediate_size=64, **sizes)


LAYOUTS = {
    "ep2_to_tp1": ("actor.layout.ep=2",),
    "tp2_ep2_to_whole_experts": ("actor.layout.tp=2", "actor.layout.ep=2", "rollout.layout.tp=2", "rollout.expert_parallel=true"),
    "ep2_to_tp2_elsewhere": ("placement=standalone_rollout", "cluster.rollout_devices=2", "actor.layout.ep=2", "rollout.layout.tp=2"),
    "tp2_etp2_to_tp2": ("actor.layout.tp=2", "actor.layout.etp=2", "rollout.layout.tp=2"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_three_steps_of_ppo_with_experts(flowrl: Command, mixture: Path, layout: str) -> None:
    """PAR-08: actor, critic and reference share the layout of the experts; each transfer is proven."""
    run = flowrl(*SMALL, f"model.path={mixture}", *LAYOUTS[layout], "trainer.export_every=3")
    check(run, EVERY_RUN | WITH_CRITIC | WITH_REFERENCE)
    exported = json.loads((run.folder / "export" / "step_3" / "config.json").read_text())
    assert exported["architectures"] == ["Qwen3MoeForCausalLM"]


@pytest.mark.slow
def test_four_processes_with_experts_in_two_stages(flowrl: Command, mixture: Path) -> None:
    run = flowrl(
        *SMALL, f"model.path={mixture}", "algorithm=grpo", "kl=none", "cluster.devices=4", "actor.layout.pp=2",
        "actor.layout.ep=2", "rollout.layout.tp=4", "rollout.expert_parallel=true",
    )  # fmt: skip
    check(run, EVERY_RUN, WITH_CRITIC | WITH_REFERENCE)
