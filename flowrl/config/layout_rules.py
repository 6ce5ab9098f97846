"""Whether each role's parallel layout fits its pool and its model."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.config.layout import (
    Pool,
    divisors,
    expert_parallel_problem,
    legal_tensor_parallel,
    pipeline_problem,
    tensor_parallel_problem,
    vocabulary_problem,
    words,
)
from flowrl.config.model_shape import ModelShape
from flowrl.config.resolve import Shapes
from flowrl.config.schema import Config, RolloutConfig, TrainLayout
from flowrl.config.tree import show
from flowrl.config.units import pool_of

VLLM_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def layout_problems(config: Config, shapes: Shapes) -> Iterator[str]:
    """One problem per broken relation; trainer and rollout are told apart by their keys."""
    roles: list[tuple[str, TrainLayout, ModelShape]] = [("actor", config.actor.layout, shapes.policy)]
    if config.algorithm.needs_critic:
        roles.append(("critic", config.critic.layout, shapes.critic))
    if config.kl.needs_reference:
        roles.append(("reference", config.reference.layout, shapes.reference))
    for role, layout, shape in roles:
        yield from _trainer(role, layout, shape, pool_of(config, role))
    yield from _rollout(config.rollout, shapes.policy, pool_of(config, "rollout"), config.cluster.device)


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
    reason = pipeline_problem(shape.num_layers, layout.pp, layout.vpp, layout.first_stage_layers)
    if reason:
        yield f"{key}: {reason}"
    yield from _experts(key, layout, shape, pool)


def _experts(key: str, layout: TrainLayout, shape: ModelShape, pool: Pool) -> Iterator[str]:
    """The ranks of a pipeline stage, whatever they do for the rest of the model, are ep x etp x replicas of the experts."""
    many = shape.num_experts or 1
    for name, legal in (("ep", divisors(many)), ("etp", divisors(shape.expert_ffn_size or 1))):
        size = layout.ep if name == "ep" else layout.etp
        reason = expert_parallel_problem(shape, *((size, 1) if name == "ep" else (1, size)))
        if reason:
            yield f"{key}.{name}={size}: {reason}; legal: {words([n for n in legal if n <= pool.devices])}"
    parts = layout.ep * layout.etp
    stage = pool.devices // layout.pp
    if shape.num_experts and pool.devices % layout.pp == 0 and stage % parts:
        yield (
            f"{key}: ep*etp = {layout.ep}*{layout.etp} = {parts} does not divide the {stage} devices of a pipeline stage "
            f"({pool.key}={pool.devices} over pp={layout.pp}); legal products: {words(divisors(stage))}"
        )


def _rollout(config: RolloutConfig, shape: ModelShape, pool: Pool, device: str) -> Iterator[str]:
    layout = config.layout
    parts = layout.tp * layout.pp
    if pool.devices % parts:
        yield (
            f"rollout.layout: tp*pp = {layout.tp}*{layout.pp} = {parts} does not divide {pool.key}={pool.devices}; "
            f"legal products: {words(divisors(pool.devices))}"
        )
    reason = tensor_parallel_problem(shape, layout.tp) or vocabulary_problem(shape, layout.tp)
    if reason:
        legal = [tp for tp in legal_tensor_parallel(shape) if vocabulary_problem(shape, tp) is None]
        yield f"rollout.layout.tp={layout.tp}: {reason}; legal: {words(legal)}"
    if config.expert_parallel and not shape.num_experts:
        yield f"rollout.expert_parallel=true: {shape.architecture} has no experts; legal: false"
    elif shape.num_experts:
        reason = expert_parallel_problem(shape, *((layout.tp, 1) if config.expert_parallel else (1, layout.tp)))
        if reason:
            remedy = "; or rollout.expert_parallel=" + ("false" if config.expert_parallel else "true")
            yield f"rollout.layout.tp={layout.tp} with rollout.expert_parallel={show(config.expert_parallel)}: {reason}{remedy}"
    if layout.pp > shape.num_layers:
        yield f"rollout.layout.pp={layout.pp} exceeds the model's {shape.num_layers} layers; legal: 1 to {shape.num_layers}"
    if device == "cpu" and shape.head_dim not in VLLM_CPU_HEAD_DIMS:
        yield (
            f"model.path: head size {shape.head_dim} cannot be generated with on cluster.device=cpu; the engine's attention there "
            f"knows {words(VLLM_CPU_HEAD_DIMS)}"
        )
