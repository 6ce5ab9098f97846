"""Whether each role's parallel layout fits its pool and its model."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.config.layout import (
    Pool,
    divisors,
    legal_first_stages,
    legal_tensor_parallel,
    stage_layers,
    tensor_parallel_problem,
    words,
)
from flowrl.config.model_shape import ModelShape
from flowrl.config.resolve import Shapes
from flowrl.config.schema import Config, RolloutLayout, TrainLayout
from flowrl.config.units import pool_devices

VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def layout_problems(config: Config, shapes: Shapes) -> Iterator[str]:
    """One problem per broken relation; trainer and rollout are told apart by their keys."""
    main = Pool("cluster.devices", config.cluster.devices)
    roles: list[tuple[str, TrainLayout, ModelShape, Pool]] = [("actor", config.actor.layout, shapes.policy, main)]
    if config.algorithm.needs_critic:
        key = "cluster.critic_devices" if config.placement == "split" else "cluster.devices"
        roles.append(("critic", config.critic.layout, shapes.critic, Pool(key, pool_devices(config, "critic"))))
    if config.kl.needs_reference:
        roles.append(("reference", config.reference.layout, shapes.reference, main))
    for role, layout, shape, pool in roles:
        yield from _trainer(role, layout, shape, pool)
    yield from _rollout(config.rollout.layout, shapes.policy, main, config.cluster.device)


def _trainer(role: str, layout: TrainLayout, shape: ModelShape, pool: Pool) -> Iterator[str]:
    key = f"{role}.layout"
    parts = layout.tp * layout.pp * layout.cp
    if pool.devices % parts:
        yield (
            f"{key}: tp*pp*cp = {layout.tp}*{layout.pp}*{layout.cp} = {parts} does not divide {pool.key}={pool.devices}; "
            f"legal products: {words(divisors(pool.devices))}"
        )
    reason = tensor_parallel_problem(shape, layout.tp)
    if reason:
        yield f"{key}.tp={layout.tp}: {reason}; legal: {words(legal_tensor_parallel(shape))}"
    if stage_layers(shape.num_layers, layout.pp, layout.first_stage_layers) is None:
        yield _stage_problem(key, layout, shape)


def _stage_problem(key: str, layout: TrainLayout, shape: ModelShape) -> str:
    equal = words(divisors(shape.num_layers))
    first = legal_first_stages(shape.num_layers, layout.pp)
    if layout.first_stage_layers is None:
        remedy = f"; or {key}.first_stage_layers={words(first)}" if first else ""
        return f"{key}.pp={layout.pp} cannot cut the model's {shape.num_layers} layers into equal stages; legal: {equal}{remedy}"
    return (
        f"{key}.first_stage_layers={layout.first_stage_layers} with {key}.pp={layout.pp} does not leave equal stages of the model's "
        f"{shape.num_layers} layers; legal: {words(first)}" + (", or null" if shape.num_layers % layout.pp == 0 else "")
    )


def _rollout(layout: RolloutLayout, shape: ModelShape, pool: Pool, device: str) -> Iterator[str]:
    parts = layout.tp * layout.pp
    if pool.devices % parts:
        yield (
            f"rollout.layout: tp*pp = {layout.tp}*{layout.pp} = {parts} does not divide {pool.key}={pool.devices}; "
            f"legal products: {words(divisors(pool.devices))}"
        )
    reason = tensor_parallel_problem(shape, layout.tp)
    if reason:
        yield f"rollout.layout.tp={layout.tp}: {reason}; legal: {words(legal_tensor_parallel(shape))}"
    if layout.pp > shape.num_layers:
        yield f"rollout.layout.pp={layout.pp} exceeds the model's {shape.num_layers} layers; legal: 1 to {shape.num_layers}"
    if device == "cpu" and shape.head_dim not in VLLM_CPU_HEAD_DIMS:
        yield (
            f"model.path: head size {shape.head_dim} cannot be generated with on cluster.device=cpu; the engine's attention there "
            f"knows {words(VLLM_CPU_HEAD_DIMS)}"
        )
