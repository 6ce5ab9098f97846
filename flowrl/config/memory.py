"""The bytes that one rank holds at once in each phase of a step. Arithmetic on shapes; nothing is measured.

Phases are those of the metrics `memory/<phase>/peak_bytes_max`, which count what torch's allocator has handed out, without
what sleeps or was moved to the host. A step after the first is meant: optimizers have made their moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flowrl.config.layout import stage_chunks
from flowrl.config.model_shape import ModelShape
from flowrl.config.resolve import BYTES, Shapes
from flowrl.config.schema import ActorConfig, Config, CriticConfig, EngineConfig, ReferenceConfig, TrainLayout
from flowrl.config.units import pool_name, pool_of, pools

LOGIT_CHUNK_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Logits that the trainer's head holds at once."""
LOGIT_COPIES = {"cpu": 3, "cuda": 1}
"""Of a chunk beside the logits: a GPU's one kernel writes their gradients, a CPU the steps between as well."""
HIDDEN_COPIES = 3
"""Hidden states alive at once without gradients: the residual, its norm, and the next layer's output."""
WIDTHS = {"cpu": 5, "cuda": 4}
"""Of a feed-forward part alive at once without gradients: both of its inputs, what is between, and their product."""
BATCHED_TOKENS = 8192
"""Tokens that an engine computes at once, at most, unless one sequence is longer."""
SAMPLED_COPIES = 3
"""Numbers in float32 for each request and id of the vocabulary while vLLM's runner for experts and pipelines samples, which is
a CPU's too: logits, log-probabilities, probabilities (the noise of a CPU is not counted). The one for dense models on a GPU reads
the logits as they are."""
COUNTED_BYTES = 4.125
"""For each request and id of the vocabulary, what the runner for dense models counts for penalties, asked for or not: how often
the response has it, and a bit whether the prompt does. It sleeps and wakes with the weights."""
BUCKET_BYTES = {"cpu": 32 << 20, "cuda": 640 << 20}
"""Most bytes of a bucket of a move of weights, what a rank packs and receives in it together, by device type. On a GPU more than
256 MiB then travel in each direction, from where on NCCL gives a pair all its channels (docs/decisions/0007-forms-of-exchange.md)."""
BUCKETS_ALIVE = 2
"""While one travels the one before is installed."""
WORKSPACE_BYTES = 128 * 2**20
"""What libraries of a GPU take for themselves, in each process."""
PROCESS_BYTES = 550 * 2**20
"""A worker process with all libraries imported, before it holds anything (measured on CPU)."""

TrainedConfig = ActorConfig | CriticConfig


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank of a pool that holds most, at the moment of a phase when that is most."""

    pool: str
    phase: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class _Role:
    """`held`: bytes by name that it has all the time while it is awake. `moves`: they go to the host, or sleep, while others
    work."""

    name: str
    held: Mapping[str, int]
    moves: bool


def engine_batch_tokens(sequence_tokens: int, requests: int) -> int:
    """Tokens that an engine computes at once, at most."""
    return max(sequence_tokens, min(BATCHED_TOKENS, requests * sequence_tokens))


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
    """One entry per pool and phase, in the order of a step; roles that the run does not have are left out."""
    found: list[Memory] = []
    for pool in pools(config):
        roles = {role.name: role for role in _roles(config, shapes) if pool_name(config, role.name) == pool}
        always = _expert_workspace(config, shapes.policy) if "rollout" in roles else {}
        found += [replace(entry, parts={**entry.parts, **always}) for entry in _phases(pool, roles, config, shapes)]
    order = ("generate", "log_probs", "reference", "values", "update_critic", "update_actor", "reshard")
    return sorted(found, key=lambda entry: order.index(entry.phase))


def _phases(pool: str, roles: Mapping[str, _Role], config: Config, shapes: Shapes) -> Iterator[Memory]:
    engine, actor = roles.get("rollout"), roles.get("actor")
    stay = _held(role for role in roles.values() if not role.moves)
    if engine is not None:
        yield Memory(pool, "generate", stay | dict(engine.held) | _generating(config, shapes.policy))
    yield from _passes(pool, roles, config, shapes)
    if actor is not None or engine is not None:
        moved = stay | _held([actor] if actor is not None else [])
        if engine is not None:
            # Its cache wakes after the weights have come.
            moved["rollout"] = engine.held["rollout"]
        yield Memory(pool, "reshard", moved | _workspace(config) | _buckets(config, shapes.policy))


def _buckets(config: Config, shape: ModelShape) -> dict[str, int]:
    """What travels at once in a move of weights, where ranks are several; no more than what an engine keeps."""
    if config.cluster.devices == 1 and config.placement != "standalone_rollout":
        return {}
    return {"buckets": min(BUCKETS_ALIVE * BUCKET_BYTES[config.cluster.device], _engine_weights(config, shape))}


def _held(roles: Iterable[_Role]) -> dict[str, int]:
    return {name: size for role in roles for name, size in role.held.items()}


def _passes(pool: str, roles: Mapping[str, _Role], config: Config, shapes: Shapes) -> Iterator[Memory]:
    """Phases of the trainer's roles: all of them are awake, and an engine that does not sleep."""
    common = _held(r for r in roles.values() if r.name != "rollout" or not r.moves) | _workspace(config)
    if "actor" in roles:
        yield Memory(pool, "log_probs", common | _pass(config.actor, shapes.policy, config, "actor", backward=False))
    if "reference" in roles:
        frozen = _pass(config.reference, shapes.reference, config, "reference", backward=False)
        yield Memory(pool, "reference", common | frozen)
    if "critic" in roles:
        yield Memory(pool, "values", common | _pass(config.critic, shapes.critic, config, "critic", backward=False))
        yield Memory(pool, "update_critic", common | _update(config.critic, shapes.critic, config, "critic"))
    if "actor" in roles:
        yield Memory(pool, "update_actor", common | _update(config.actor, shapes.policy, config, "actor"))


def _workspace(config: Config) -> dict[str, int]:
    return {"libraries": WORKSPACE_BYTES} if config.cluster.device == "cuda" else {}


def _roles(config: Config, shapes: Shapes) -> Iterator[_Role]:
    """Every role of the run with what it holds."""

    def moves(role: str, offload: bool) -> bool:
        shares = pool_name(config, role) == pool_name(config, "rollout")
        return offload and shares and config.cluster.device == "cuda"

    state = sum(trained_parts(config.actor, shapes.policy, config, "actor").values())
    yield _Role("actor", {"actor": state}, moves("actor", config.actor.offload))
    if config.algorithm.needs_critic:
        state = sum(trained_parts(config.critic, shapes.critic, config, "critic").values())
        yield _Role("critic", {"critic": state}, moves("critic", config.critic.offload))
    if config.kl.needs_reference:
        section = config.reference
        weights = _parameters(section, shapes.reference) * BYTES[section.dtype]
        yield _Role("reference", {"reference": weights}, moves("reference", section.offload))
    weights = _engine_weights(config, shapes.policy) + _counts(config, shapes.policy)
    parts = {"rollout": weights, "KV cache": config.rollout.kv_cache_bytes}
    yield _Role("rollout", parts, moves("actor", offload=True))


def _parameters(section: ActorConfig | CriticConfig | ReferenceConfig, shape: ModelShape) -> int:
    layout = section.layout
    return rank_parameters(shape, layout.tp, trained_layers(shape, layout), layout.ep * layout.etp)


def trained_parts(section: TrainedConfig, shape: ModelShape, config: Config, role: str) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer states of a trained role on one rank."""
    count = _parameters(section, shape)
    # Two moments in float32, and a float32 copy of weights that are not float32 themselves.
    optimizer = count * (8 if section.dtype == "float32" else 12)
    return {
        "weights": count * BYTES[section.dtype],
        "gradients": count * 4,
        "optimizer": optimizer // _replicas(section, config, role) if section.distributed_optimizer else optimizer,
    }


def _replicas(section: TrainedConfig, config: Config, role: str) -> int:
    layout = section.layout
    return max(1, pool_of(config, role).devices // (layout.tp * layout.pp * layout.cp))


def _engine_weights(config: Config, shape: ModelShape) -> int:
    section = config.rollout
    stages = [-(-shape.num_layers // section.layout.pp)] * section.layout.pp
    return rank_parameters(shape, section.layout.tp, stages, section.layout.tp) * BYTES[section.dtype]


def _dense_runner(config: Config, shape: ModelShape) -> bool:
    """Whether vLLM runs the model with its runner for dense models on a GPU: it has another for experts and pipelines."""
    return config.cluster.device == "cuda" and not shape.num_experts and config.rollout.layout.pp == 1


def _counts(config: Config, shape: ModelShape) -> int:
    most = config.rollout.max_batch_requests * shape.vocab_size * COUNTED_BYTES
    return int(most) if _dense_runner(config, shape) else 0


def _expert_workspace(config: Config, shape: ModelShape) -> dict[str, int]:
    """What vLLM's Triton kernels of experts work in: for each token of a batch and each expert that it visits, two rows that
    hold a hidden state or the expert's widths. It is made once and never sleeps."""
    if config.cluster.device != "cuda" or not shape.num_experts:
        return {}
    section = config.rollout
    tokens = engine_batch_tokens(
        config.data.max_prompt_tokens + section.max_response_tokens, section.max_batch_requests
    )
    width = shape.expert_ffn_size // (1 if section.expert_parallel else section.layout.tp)
    rows = max(width, shape.hidden_size) + max(2 * width, shape.hidden_size)
    return {"workspace of experts": tokens * shape.experts_per_token * rows * BYTES[section.dtype]}


def _generating(config: Config, shape: ModelShape) -> dict[str, int]:
    """What an engine makes for the moment: the activations of a layer, or what it samples from, whichever is more."""
    section, requests = config.rollout, config.rollout.max_batch_requests
    row = config.data.max_prompt_tokens + section.max_response_tokens
    tokens = engine_batch_tokens(row, requests)
    width = HIDDEN_COPIES * shape.hidden_size
    if not _expert_workspace(config, shape):
        width += 3 * shape.active_ffn_size // section.layout.tp
    sampled = BYTES[section.dtype] + (0 if _dense_runner(config, shape) else 4 * SAMPLED_COPIES)
    made = {
        "activations of the engine": tokens * width * BYTES[section.dtype],
        "sampling": requests * shape.vocab_size * sampled,
    }
    largest = max(made, key=made.__getitem__)
    return _workspace(config) | {largest: made[largest]}


def _pass(section: EngineConfig, shape: ModelShape, config: Config, role: str, *, backward: bool) -> dict[str, int]:
    """What a pass of a micro-batch makes for the moment. Without gradients that is a layer's, or the head's after all of
    them, whichever is more; with gradients what layers keep, and beside it the head's or one mixture's, whichever is more."""
    made = {"activations of a micro-batch": _activations(section, shape, config, role, backward=backward)}
    head = {} if role == "critic" else _at_the_head(section, shape, config, role, backward=backward)
    if backward:
        return made | max(head, _in_a_mixture(section, shape, config, role), key=_sum)
    return max(made, head, key=_sum)


def _sum(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _at_the_head(
    section: EngineConfig, shape: ModelShape, config: Config, role: str, *, backward: bool
) -> dict[str, int]:
    """What the head makes; without gradients with the hidden states, all that the layers have left."""
    logits = {"logits of a chunk": _logits(section, shape, config, role, backward=backward)}
    if backward:
        # Gradients of chunks are added up in float32.
        return logits | {"gradient of the head": -(-shape.vocab_size // section.layout.tp) * shape.hidden_size * 4}
    hidden = microbatch_tokens(section, config, role, backward=False) * HIDDEN_COPIES * shape.hidden_size
    return {"activations of a micro-batch": hidden * BYTES[section.dtype]} | logits


def _in_a_mixture(section: EngineConfig, shape: ModelShape, config: Config, role: str) -> dict[str, int]:
    """What a layer of experts makes beside what it keeps for its backward pass."""
    tokens = microbatch_tokens(section, config, role, backward=True)
    size = tokens * _dispatched(shape, section.layout) * BYTES[section.dtype]
    return {"tokens by expert": size} if shape.num_experts else {}


def _update(section: TrainedConfig, shape: ModelShape, config: Config, role: str) -> dict[str, int]:
    """What an update makes for the moment: in its passes, or in the optimizer's step, whichever is more."""
    passes, layout = _pass(section, shape, config, role, backward=True), section.layout
    experts = max(trained_layers(shape, layout)) * -(-shape.expert_parameters // (layout.ep * layout.etp))
    # Megatron-core has an optimizer for experts, which steps after the other.
    stepped = max(_parameters(section, shape) - experts, experts) * 4
    if section.distributed_optimizer:
        stepped //= _replicas(section, config, role)
    return passes if sum(passes.values()) >= stepped else {"roots of moments": stepped}


def microbatch_tokens(section: EngineConfig, config: Config, role: str, *, backward: bool) -> int:
    """Tokens of the largest micro-batch: the budget, or one full row where that is longer, but no more than the rows that a
    replica has at once: of a mini-batch in an update, else of a step."""
    row = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    layout = section.layout
    replicas = max(1, pool_of(config, role).devices // (layout.tp * layout.pp * layout.cp))
    prompts = config.data.prompts_per_step
    if backward and isinstance(section, ActorConfig | CriticConfig):
        prompts = section.minibatch_prompts
    rows = -(-prompts * config.rollout.samples_per_prompt // replicas)
    return max(row, min(section.tokens_per_microbatch, rows * row))


def _activations(section: EngineConfig, shape: ModelShape, config: Config, role: str, *, backward: bool) -> int:
    tokens, layout = microbatch_tokens(section, config, role, backward=backward), section.layout
    layers, whole = max(trained_layers(shape, layout)), _layer_elements(shape, layout)
    if not backward:
        elements = _forward_elements(shape, layout, WIDTHS[config.cluster.device])
    elif section.recompute:
        elements = layers * shape.hidden_size + whole
    else:
        elements = layers * whole * min(layout.pp, 2)
        if layout.vpp > 1:
            # Forward passes of chunks that the first stage runs before its first backward pass.
            elements = layers // layout.vpp * whole * (2 * (layout.pp - 1) + (layout.vpp - 1) * layout.pp + 1)
    return tokens * elements * BYTES[section.dtype]


def _layer_elements(shape: ModelShape, layout: TrainLayout) -> int:
    """What a layer keeps of a token for its backward pass."""
    # Residuals and norms, queries to attention output, the two widths of the feed-forward part.
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim // layout.tp
    if not shape.num_experts:
        return 6 * shape.hidden_size + attention + 3 * shape.ffn_size // layout.tp
    # Its experts' inputs and widths, and the router's and the dispatcher's copies of what comes and goes; cut along the
    # sequence beside tensor parallelism.
    copies = (11 + shape.experts_per_token * layout.etp) * shape.hidden_size // layout.tp
    return copies + attention + 3 * shape.active_ffn_size // layout.etp


def _forward_elements(shape: ModelShape, layout: TrainLayout, widths: int) -> int:
    """The most that a layer holds of a token at once without gradients: in its feed-forward part."""
    if not shape.num_experts:
        return HIDDEN_COPIES * shape.hidden_size + widths * shape.ffn_size // layout.tp
    copies = 4 * shape.hidden_size // layout.tp + _dispatched(shape, layout)
    return copies + widths * shape.active_ffn_size // (layout.etp * shape.num_experts)


def _dispatched(shape: ModelShape, layout: TrainLayout) -> int:
    """What a token's copies for its experts are at once: as they came, by expert, each expert's output alone and together;
    and as they were sent, where they travel."""
    copies = (4 + (layout.ep > 1)) * shape.experts_per_token
    return copies * layout.etp * shape.hidden_size // layout.tp


def _logits(section: EngineConfig, shape: ModelShape, config: Config, role: str, *, backward: bool) -> int:
    device = config.cluster.device
    whole = microbatch_tokens(section, config, role, backward=backward) * -(-shape.vocab_size // section.layout.tp)
    element = BYTES[section.dtype] if device == "cuda" else 4
    copies = 1 + LOGIT_COPIES[device] * (backward or device == "cpu")
    return copies * element * min(whole, LOGIT_CHUNK_ELEMENTS[device])
