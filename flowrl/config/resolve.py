"""`auto` becomes a value: a pure function of what was given, the models' shapes and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.config.layout import expert_parallel_problem, pipeline_problem, tensor_parallel_problem
from flowrl.config.machine import Machine
from flowrl.config.model_shape import ModelShape
from flowrl.config.paths import user_path
from flowrl.config.schema import AUTO
from flowrl.config.units import APART

BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30
MIN_OBJECT_STORE_BYTES = 80_000_000
MAX_OBJECT_STORE_BYTES = 2 * GIB
KV_BLOCK_TOKENS = {"cpu": 128, "cuda": 16}
"""vLLM's usual block sizes: a sequence takes whole blocks of the KV cache."""
UNKNOWN_GPU_BYTES = 16 * GIB
BUILTIN_DATA = "builtin:arithmetic"
BUILTIN_GRADER = "flowrl.builtin.arithmetic:score"
INHERITED = {
    "critic": ("dtype", "tokens_per_microbatch", "minibatch_prompts", "epochs", "aggregation"),
    "reference": ("dtype", "tokens_per_microbatch"),
}


@dataclass(frozen=True)
class Shapes:
    """The model of each role. Critic and reference may come from folders of their own."""

    policy: ModelShape
    critic: ModelShape
    reference: ModelShape


def resolve(values: Mapping[str, Any], shapes: Shapes, machine: Machine, timestamp: str) -> dict[str, Any]:
    """`values` (every key of the tree, checked) without `auto`.

    Only `reward.function` may stay `auto`: with other data than the built-in there is nothing to choose, and the rules
    say so.
    """
    out = dict(values)

    def default(key: str, value: Any) -> None:
        if out[key] == AUTO:
            out[key] = value

    default("cluster.device", "cuda" if machine.gpus else "cpu")
    cpu = out["cluster.device"] == "cpu"
    free = machine.gpus * 2 // 3 if out["placement"] in APART else machine.gpus
    default("cluster.devices", 2 if cpu else max(1, free))
    for role in APART.values():
        default(f"cluster.{role}_devices", max(1, out["cluster.devices"] // 2))
    quarter = machine.shared_memory_bytes // 4
    default("cluster.object_store_bytes", min(MAX_OBJECT_STORE_BYTES, max(MIN_OBJECT_STORE_BYTES, quarter)))
    _layouts(out, shapes)
    row = out["data.max_prompt_tokens"] + out["rollout.max_response_tokens"]
    default("actor.dtype", "float32" if cpu else "bfloat16")
    default("actor.tokens_per_microbatch", max(4096, row))
    for role, names in INHERITED.items():
        default(f"{role}.path", out["model.path"])
        for name in names:
            default(f"{role}.{name}", out[f"actor.{name}"])
    default("rollout.dtype", "float32" if cpu else "bfloat16")
    replicas = max(1, _pool_devices(out, "rollout") // (out["rollout.layout.tp"] * out["rollout.layout.pp"]))
    rows = out["data.prompts_per_step"] * out["rollout.samples_per_prompt"]
    default("rollout.max_batch_requests", min(512, -(-rows // replicas)))
    default("rollout.kv_cache_bytes", _kv_cache_bytes(out, shapes.policy, machine))
    default("reward.num_processes", max(1, min(8, machine.cpus)))
    default("reward.memory_bytes", max(GIB, machine.memory_bytes // (2 * out["reward.num_processes"])))
    if set(out["data.train_files"] + out["data.eval_files"]) == {BUILTIN_DATA}:
        default("reward.function", BUILTIN_GRADER)
    default("run.dir", f"runs/{timestamp}")
    default("run.name", user_path(out["run.dir"]).absolute().name)
    return out


def _layouts(out: dict[str, Any], shapes: Shapes) -> None:
    for name in ("tp", "pp"):
        if out[f"rollout.layout.{name}"] == AUTO:
            out[f"rollout.layout.{name}"] = 1
    devices = _pool_devices(out, "actor")
    given = _given(out, "actor")
    _store(out, "actor", _own_layout(given, shapes.policy, devices))
    actor = _given(out, "actor")
    for role, shape in (("critic", shapes.critic), ("reference", shapes.reference)):
        pool = _pool_devices(out, role)
        given = _given(out, role)
        inherited = {**actor, **given}
        if not _fits_pipeline(inherited, shape):
            # The actor's way of cutting its own layers does not say how to cut those of another model.
            inherited |= {"vpp": given.get("vpp", 1), "first_stage_layers": given.get("first_stage_layers")}
        _store(out, role, inherited if _fits(inherited, shape, pool) else _own_layout(given, shape, pool))


def _pool_devices(out: Mapping[str, Any], role: str) -> int:
    return int(out[f"cluster.{role}_devices" if APART.get(out["placement"]) == role else "cluster.devices"])


def _given(out: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The layout fields of a role that are not `auto`."""
    prefix = f"{role}.layout."
    return {key.removeprefix(prefix): value for key, value in out.items() if key.startswith(prefix) and value != AUTO}


def _store(out: dict[str, Any], role: str, layout: Mapping[str, Any]) -> None:
    out.update({f"{role}.layout.{name}": value for name, value in layout.items()})


def _own_layout(given: Mapping[str, Any], shape: ModelShape, devices: int) -> dict[str, Any]:
    """One device: all 1. Two: tp 2 where the model can be cut and nothing else takes the devices. More: tp 1."""
    layout: dict[str, Any] = {"pp": 1, "vpp": 1, "cp": 1, "ep": 1, "etp": 1, "first_stage_layers": None, **given}
    free = layout["pp"] * layout["cp"] * layout["ep"] * layout["etp"] == 1
    cuttable = tensor_parallel_problem(shape, 2) is None
    return {"tp": 2 if devices == 2 and free and cuttable else 1, **layout}


def _fits(layout: Mapping[str, Any], shape: ModelShape, devices: int) -> bool:
    return (
        devices % (layout["tp"] * layout["pp"] * layout["cp"]) == 0
        and tensor_parallel_problem(shape, layout["tp"]) is None
        and _fits_pipeline(layout, shape)
        and devices % (layout["pp"] * layout["ep"] * layout["etp"]) == 0
        and expert_parallel_problem(shape, layout["ep"], layout["etp"]) is None
    )


def _fits_pipeline(layout: Mapping[str, Any], shape: ModelShape) -> bool:
    return pipeline_problem(shape.num_layers, layout["pp"], layout["vpp"], layout["first_stage_layers"]) is None


def kv_bytes_per_token(shape: ModelShape, tp: int, pp: int, dtype: str) -> int:
    """Bytes of keys and values of one token on one rank of the engine."""
    return 2 * -(-shape.num_layers // pp) * max(1, shape.kv_heads // tp) * shape.head_dim * BYTES[dtype]


def kv_bytes_per_sequence(values: Mapping[str, Any], shape: ModelShape) -> int:
    """KV cache of one full sequence on one rank, in whole blocks."""
    tokens = int(values["data.max_prompt_tokens"]) + int(values["rollout.max_response_tokens"])
    block = KV_BLOCK_TOKENS[values["cluster.device"]]
    layout = (values["rollout.layout.tp"], values["rollout.layout.pp"], values["rollout.dtype"])
    return -(-tokens // block) * block * kv_bytes_per_token(shape, *layout)


def _kv_cache_bytes(out: Mapping[str, Any], shape: ModelShape, machine: Machine) -> int:
    sequence = kv_bytes_per_sequence(out, shape)
    # One sequence more than run at once: the engine keeps a block for itself.
    need = (int(out["rollout.max_batch_requests"]) + 1) * sequence
    if out["cluster.device"] == "cpu":
        limit = machine.memory_bytes // (4 * _pool_devices(out, "rollout"))
    else:
        parts = out["rollout.layout.tp"] * out["rollout.layout.pp"]
        weights = shape.num_parameters * BYTES[out["rollout.dtype"]] // parts
        whole = machine.gpu_memory_bytes or UNKNOWN_GPU_BYTES
        # 2 GiB of the engine's share is left to its activations.
        limit = int(out["rollout.gpu_memory_fraction"] * whole) - weights - 2 * GIB
    return max(2 * sequence, min(need, limit))
