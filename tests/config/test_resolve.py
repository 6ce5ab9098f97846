from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.builtin.recipe import EOS_ID, VOCABULARY, TinyRecipe
from flowrl.config import compose as compose_module
from flowrl.config import machine
from flowrl.config.compose import compose
from flowrl.config.machine import Machine, find_machine
from flowrl.config.model_shape import shape_of
from flowrl.config.schema import TrainLayout

MakeModel = Callable[..., Path]


def layout(tp: int = 1, pp: int = 1, first_stage_layers: int | None = None) -> TrainLayout:
    return TrainLayout(tp=tp, pp=pp, vpp=1, first_stage_layers=first_stage_layers, cp=1, ep=1, etp=1)


@pytest.mark.parametrize(
    ("argv", "actor", "critic"),
    [
        ([], layout(tp=2), layout(tp=2)),
        (["cluster.devices=1"], layout(), layout()),
        (["cluster.devices=4"], layout(), layout()),
        (["cluster.devices=4", "actor.layout.tp=2", "actor.layout.pp=2"], layout(2, 2), layout(2, 2)),
        (["actor.layout.pp=2"], layout(pp=2), layout(pp=2)),
        (["actor.layout.tp=1"], layout(), layout()),
        (["critic.layout.pp=2"], layout(tp=2), layout(pp=2)),
        (["critic.layout.tp=1"], layout(tp=2), layout(tp=1)),
        (["placement=split"], layout(tp=2), layout()),
        (["placement=split", "cluster.devices=4", "actor.layout.tp=4"], layout(tp=4), layout(tp=2)),
        (
            ["placement=split", "cluster.devices=4", "cluster.critic_devices=3", "actor.layout.pp=2"],
            layout(pp=2),
            layout(),
        ),
        (["placement=standalone_rollout"], layout(tp=2), layout(tp=2)),
    ],
)
def test_automatic_layouts(argv: list[str], actor: TrainLayout, critic: TrainLayout) -> None:
    config = compose(argv)
    assert config.actor.layout == actor
    assert config.critic.layout == critic
    if config.placement == "colocate" and not any(text.startswith("critic") for text in argv):
        assert config.reference.layout == actor


def test_automatic_layouts_are_legal_for_the_model(make_model: MakeModel, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n')
    model = make_model(num_attention_heads=9, num_key_value_heads=3)
    config = compose(
        [f"model.path={model}", f"data.train_files={file}", f"data.eval_files={file}", "reward.function=m:f"]
    )
    assert config.actor.layout.tp == config.critic.layout.tp == 1


def test_critic_and_reference_inherit_from_the_actor() -> None:
    config = compose(
        ["actor.dtype=bfloat16", "actor.tokens_per_microbatch=77", "actor.epochs=3", "actor.aggregation=sum-norm"]
    )
    assert (config.critic.dtype, config.reference.dtype) == ("bfloat16", "bfloat16")
    assert config.critic.tokens_per_microbatch == config.reference.tokens_per_microbatch == 77
    assert (config.critic.epochs, config.critic.aggregation, config.critic.minibatch_prompts) == (3, "sum-norm", 32)
    assert compose(["actor.epochs=3", "critic.epochs=1"]).critic.epochs == 1


def test_a_full_row_fits_the_automatic_micro_batch(make_model: MakeModel, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n')
    model = make_model(max_position_embeddings=16384)
    argv = [f"model.path={model}", f"data.train_files={file}", f"data.eval_files={file}", "reward.function=m:f"]
    assert compose([*argv, "rollout.max_response_tokens=5000"]).actor.tokens_per_microbatch == 5016
    assert compose(argv).actor.tokens_per_microbatch == 4096


def test_names_and_places() -> None:
    config = compose(["run.dir=runs/mine"])
    assert (config.run.name, config.critic.path, config.reference.path) == ("mine", "builtin:tiny", "builtin:tiny")
    first, second = compose([]).run.dir, compose([]).run.dir
    assert first != second and first.startswith("runs/"), "RAY-02: two runs of one second have folders of their own"


def test_a_gpu_changes_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compose_module, "find_machine", lambda: Machine(16, 2**37, 2**36, gpus=2, gpu_memory_bytes=2**36)
    )
    config = compose([])
    assert (config.cluster.device, config.actor.dtype, config.critic.dtype, config.rollout.dtype) == (
        "cuda",
        *["bfloat16"] * 3,
    )
    assert config.cluster.object_store_bytes == 2 * 2**30
    assert config.rollout.kv_cache_bytes == 257 * 32 * 2 * 2 * 2 * 32 * 2


def test_the_shape_of_the_built_in_model_is_that_of_its_recipe() -> None:
    shape, recipe = shape_of("builtin:tiny"), TinyRecipe()
    names = ("hidden_size", "ffn_size", "num_layers", "heads", "kv_heads", "head_dim", "max_positions")
    assert {name: dataclasses.asdict(shape)[name] for name in names} == {
        name: dataclasses.asdict(recipe)[name] for name in names
    }
    assert (shape.vocab_size, shape.eos_token_ids) == (len(VOCABULARY), (EOS_ID,))


def test_this_machine_has_something() -> None:
    found = find_machine()
    assert found.cpus >= 1 and found.memory_bytes > 2**28


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 2), ("0", 1), ("", 0), ("-1", 0), ("0,1", 2), ("1,-1,0", 1), ("3,2,1,0", 2)]
)
def test_visible_gpus_are_counted_as_cuda_does(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int
) -> None:
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: "2.11.0+cu130")
    monkeypatch.setattr(
        machine.Path, "glob", lambda self, pattern: [Path(f"/dev/nvidia{name}") for name in ("0", "1", "ctl", "-uvm")]
    )
    monkeypatch.setattr(os, "environ", {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert machine._gpus() == expected


def test_a_cpu_build_of_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(machine.Path, "glob", lambda self, pattern: [Path("/dev/nvidia0")])
    assert machine._gpus() == 0
