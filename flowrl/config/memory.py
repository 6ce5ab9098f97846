"""A rough estimate of the bytes that one rank holds, by role and phase. Arithmetic on shapes; nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowrl.config.layout import stage_chunks
from flowrl.config.model_shape import ModelShape
from flowrl.config.resolve import BYTES, Shapes
from flowrl.config.schema import ActorConfig, Config, CriticConfig, EngineConfig, ReferenceConfig, TrainLayout
from flowrl.config.units import pool_of

LOGIT_CHUNK_ELEMENTS = 1 << 26
"""Logits that exist at once, in float32: the trainer computes log-probs in chunks."""
PROCESS_BYTES = 550 * 2**20
"""A worker process with all libraries imported, before it holds anything (measured on CPU)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one role on the rank of its pool that holds most. `phase` is when they are all there at once."""

    role: str
    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def trained_layers(shape: ModelShape, layout: TrainLayout) -> list[int]:
    """Layers of each pipeline stage of a trainer."""
    stages = stage_chunks(shape.num_layers, layout.pp, layout.vpp, layout.first_stage_layers)
    return [sum(map(len, chunks)) for chunks in stages]


def rank_parameters(shape: ModelShape, tp: int, stages: Sequence[int], expert_parts: int = 1) -> int:
    """Parameters on the rank that holds most, of a model cut into `tp` parts and into `stages` of so many layers, with a
    part of `expert_parts` of each layer's experts."""
    one = replace(shape, num_layers=1, tied=True).num_parameters
    embedding = shape.vocab_size * shape.hidden_size
    layer = one - embedding - shape.hidden_size - shape.expert_parameters
    sizes = [layers * layer for layers in stages]
    sizes[0] += embedding
    if len(stages) > 1 or not shape.tied:
        sizes[-1] += embedding
    return -(-max(sizes) // tp) + max(stages) * -(-shape.expert_parameters // expert_parts)


def memory(config: Config, shapes: Shapes) -> list[Memory]:
    """One entry per role and phase, roles that the run does not have left out."""
    found = [_trained("actor", config.actor, shapes.policy, config)]
    if config.algorithm.needs_critic:
        found.append(_trained("critic", config.critic, shapes.critic, config))
    if config.kl.needs_reference:
        found.append(_frozen(config.reference, shapes.reference, config))
    found.append(_rollout(config, shapes.policy))
    return found


def _trained(role: str, section: ActorConfig | CriticConfig, shape: ModelShape, config: Config) -> Memory:
    layout = section.layout
    count = rank_parameters(shape, layout.tp, trained_layers(shape, layout), layout.ep * layout.etp)
    replicas = max(1, pool_of(config, role).devices // (layout.tp * layout.pp * layout.cp))
    # Two moments in float32, and a float32 copy of weights that are not float32 themselves.
    optimizer = count * (8 if section.dtype == "float32" else 12)
    parts = {
        "weights": count * BYTES[section.dtype],
        "gradients (float32)": count * 4,
        "optimizer": optimizer // replicas if section.distributed_optimizer else optimizer,
        "activations of a micro-batch": _activations(section, shape, config, backward=True),
    }
    if role == "actor":
        parts["logits of a chunk"] = _logits(section, shape, config)
    return Memory(role, "update", parts)


def _frozen(section: ReferenceConfig, shape: ModelShape, config: Config) -> Memory:
    layout = section.layout
    count = rank_parameters(shape, layout.tp, trained_layers(shape, layout), layout.ep * layout.etp)
    parts = {
        "weights": count * BYTES[section.dtype],
        "activations of a micro-batch": _activations(section, shape, config, backward=False),
        "logits of a chunk": _logits(section, shape, config),
    }
    return Memory("reference", "log-probs", parts)


def _rollout(config: Config, shape: ModelShape) -> Memory:
    section = config.rollout
    stages = [-(-shape.num_layers // section.layout.pp)] * section.layout.pp
    count = rank_parameters(shape, section.layout.tp, stages, section.layout.tp)
    parts = {"weights": count * BYTES[section.dtype], "KV cache": section.kv_cache_bytes}
    return Memory("rollout", "generate", parts)


def microbatch_tokens(section: EngineConfig, config: Config) -> int:
    """Tokens of the largest micro-batch: the budget, or one full row where that is longer."""
    return max(section.tokens_per_microbatch, config.data.max_prompt_tokens + config.rollout.max_response_tokens)


def _activations(section: EngineConfig, shape: ModelShape, config: Config, *, backward: bool) -> int:
    tokens, layout = microbatch_tokens(section, config), section.layout
    # Per token and layer: residuals and norms, queries to attention output, the two widths of the feed-forward part.
    whole = (
        6 * shape.hidden_size
        + (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim // layout.tp
        + 3 * shape.active_ffn_size // (layout.etp if shape.num_experts else layout.tp)
    )
    layers = max(trained_layers(shape, layout))
    if not backward:
        elements = whole
    elif section.recompute:
        elements = layers * shape.hidden_size + whole
    else:
        elements = layers * whole * min(layout.pp, 2)
        if layout.vpp > 1:
            # Forward passes of chunks that the first stage runs before its first backward pass.
            elements = layers // layout.vpp * whole * (2 * (layout.pp - 1) + (layout.vpp - 1) * layout.pp + 1)
    return tokens * elements * BYTES[section.dtype]


def _logits(section: EngineConfig, shape: ModelShape, config: Config) -> int:
    whole = microbatch_tokens(section, config) * -(-shape.vocab_size // section.layout.tp)
    # Twice: the logits and what is made of them in place of a copy.
    return 2 * 4 * min(whole, LOGIT_CHUNK_ELEMENTS)
