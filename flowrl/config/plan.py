"""What a run will do, before it does it: placement, batch arithmetic, memory. Pure; `dry_run=true` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowrl.config.compose import to_yaml
from flowrl.config.machine import Machine
from flowrl.config.memory import PROCESS_BYTES, Memory, memory
from flowrl.config.resolve import Shapes
from flowrl.config.schema import ActorConfig, Config, CriticConfig, TrainLayout
from flowrl.config.units import (
    OptimizerSteps,
    all_devices,
    critic_warmup_steps,
    microbatch_unit,
    optimizer_steps,
    pool_name,
    pool_of,
    pools,
)


@dataclass(frozen=True)
class RolePlan:
    """Where a role runs. `replicas`: copies of the model, each of `tp * pp * cp` ranks."""

    role: str
    pool: str
    ranks: range
    layout: str
    replicas: int
    model: str


@dataclass(frozen=True)
class UpdatePlan:
    """How a trained role goes through the rows of a step.

    `rows_per_slice`: most rows of a mini-batch on one data-parallel slice. `microbatches`: fewest micro-batches of a
    mini-batch on such a slice if all rows are full; 1 if they fit the token budget.
    """

    role: str
    minibatches: int
    minibatch_rows: int
    epochs: int
    rows_per_slice: int
    microbatches: int
    budget_tokens: int


@dataclass(frozen=True)
class PoolPlan:
    """Processes that roles share. `bytes_per_rank`: what they hold at once in the phase that needs most."""

    name: str
    devices: int
    bytes_per_rank: int


@dataclass(frozen=True)
class RunPlan:
    """Everything `dry_run=true` shows, as data."""

    tree: str
    roles: tuple[RolePlan, ...]
    pools: tuple[PoolPlan, ...]
    prompts_per_step: int
    rows_per_step: int
    rows_per_replica: int
    updates: tuple[UpdatePlan, ...]
    optimizer_steps: OptimizerSteps
    total_steps: int
    critic_warmup_steps: int
    memory: tuple[Memory, ...]
    notes: tuple[str, ...]


def make_plan(config: Config, shapes: Shapes, machine: Machine) -> RunPlan:
    """The plan of a legal configuration."""
    rows = config.data.prompts_per_step * config.rollout.samples_per_prompt
    roles = tuple(_roles(config))
    updates = [_update("actor", config.actor, config)]
    if config.algorithm.needs_critic:
        updates.append(_update("critic", config.critic, config))
    estimate = tuple(memory(config, shapes))
    shared = tuple(_pools(config, estimate))
    return RunPlan(
        tree=to_yaml(config),
        roles=roles,
        pools=shared,
        prompts_per_step=config.data.prompts_per_step,
        rows_per_step=rows,
        rows_per_replica=-(-rows // roles[-1].replicas),
        updates=tuple(updates),
        optimizer_steps=optimizer_steps(config),
        total_steps=config.trainer.total_steps,
        critic_warmup_steps=critic_warmup_steps(config),
        memory=estimate,
        notes=tuple(_notes(config, shared, updates, machine)),
    )


def _roles(config: Config) -> Iterator[RolePlan]:
    yield _trainer_role("actor", config.actor.layout, config.model.path, config)
    if config.algorithm.needs_critic:
        yield _trainer_role("critic", config.critic.layout, config.critic.path, config)
    if config.kl.needs_reference:
        yield _trainer_role("reference", config.reference.layout, config.reference.path, config)
    layout, devices = config.rollout.layout, pool_of(config, "rollout").devices
    parts = layout.tp * layout.pp
    text = f"tp {layout.tp}, pp {layout.pp}" + (", expert parallel" if config.rollout.expert_parallel else "")
    yield RolePlan("rollout", pool_name(config, "rollout"), range(devices), text, devices // parts, config.model.path)


def _trainer_role(role: str, layout: TrainLayout, model: str, config: Config) -> RolePlan:
    devices = pool_of(config, role).devices
    replicas = devices // (layout.tp * layout.pp * layout.cp)
    return RolePlan(role, pool_name(config, role), range(devices), layout_words(layout), replicas, model)


def layout_words(layout: TrainLayout) -> str:
    """`tp 2, pp 1`, and the further sizes that are not 1."""
    sizes = (("vpp", layout.vpp), ("cp", layout.cp), ("ep", layout.ep), ("etp", layout.etp))
    return f"tp {layout.tp}, pp {layout.pp}" + "".join(f", {name} {size}" for name, size in sizes if size > 1)


def _pools(config: Config, estimate: Sequence[Memory]) -> Iterator[PoolPlan]:
    for name, pool in pools(config).items():
        yield PoolPlan(name, pool.devices, max(entry.total for entry in estimate if entry.pool == name))


def _update(role: str, section: ActorConfig | CriticConfig, config: Config) -> UpdatePlan:
    layout = section.layout
    replicas = pool_of(config, role).devices // (layout.tp * layout.pp * layout.cp)
    rows = section.minibatch_prompts * config.rollout.samples_per_prompt
    slice_rows = -(-rows // replicas)
    row_tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    rows_at_once = max(1, section.tokens_per_microbatch // row_tokens)
    unit = microbatch_unit(layout)
    return UpdatePlan(
        role=role,
        minibatches=config.data.prompts_per_step // section.minibatch_prompts,
        minibatch_rows=rows,
        epochs=section.epochs,
        rows_per_slice=slice_rows,
        microbatches=-(-slice_rows // (rows_at_once * unit)) * unit,
        budget_tokens=section.tokens_per_microbatch,
    )


def _notes(
    config: Config, shared: Sequence[PoolPlan], updates: Sequence[UpdatePlan], machine: Machine
) -> Iterator[str]:
    row = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    for update in updates:
        if update.budget_tokens < row:
            yield (
                f"{update.role}.tokens_per_microbatch={update.budget_tokens} is less than a full row of {row} tokens; such a row gets a "
                "micro-batch of its own"
            )
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        yield "rollout.top_p or top_k cuts the sampling distribution; the trainer's log-probs are of the full one, so ratios are biased"
    need = sum(pool.devices * pool.bytes_per_rank for pool in shared) + all_devices(config) * PROCESS_BYTES
    if config.cluster.device == "cpu" and need > machine.memory_bytes:
        yield f"about {size(need)} of memory will be needed, this machine has {size(machine.memory_bytes)}"
    if config.cluster.device == "cuda" and machine.gpu_memory_bytes:
        for pool in shared:
            if pool.bytes_per_rank > machine.gpu_memory_bytes:
                yield (
                    f"about {size(pool.bytes_per_rank)} per GPU of pool {pool.name} will be needed at once, a GPU has "
                    f"{size(machine.gpu_memory_bytes)}"
                )


def size(num_bytes: int) -> str:
    """Bytes for people: `1.5 GiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def render(plan: RunPlan) -> str:
    """The plan as plain text."""
    lines = ["Configuration", *_indent(plan.tree.splitlines()), "", "Placement", *_indent(_placement(plan))]
    lines += ["", "Batches", *_indent(_batches(plan)), "", "Memory per rank by phase", *_indent(_memory(plan))]
    if plan.notes:
        lines += ["", "Notes", *_indent(plan.notes)]
    return "\n".join([*lines, ""])


def _indent(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _placement(plan: RunPlan) -> list[str]:
    return [
        f"{r.role:<10} pool {r.pool:<7} ranks {r.ranks.start}-{r.ranks.stop - 1}  {r.layout}, {r.replicas} replica(s)  {r.model}"
        for r in plan.roles
    ]


def _batches(plan: RunPlan) -> list[str]:
    samples = plan.rows_per_step // plan.prompts_per_step
    steps = plan.optimizer_steps
    lines = [
        f"a step: {plan.prompts_per_step} prompts x {samples} samples = {plan.rows_per_step} rows; generation: at most "
        f"{plan.rows_per_replica} rows per replica",
    ]
    for u in plan.updates:
        lines.append(
            f"{u.role}: {u.minibatches} mini-batch(es) of {u.minibatch_rows} rows x {u.epochs} epoch(s) = "
            f"{u.minibatches * u.epochs} optimizer steps a step; a mini-batch: at most {u.rows_per_slice} rows on a data-parallel "
            f"rank, in {u.microbatches} micro-batch(es) of {u.budget_tokens} tokens if every row is full"
        )
    learning = plan.total_steps - plan.critic_warmup_steps
    lines.append(f"the run: {plan.total_steps} steps; actor {steps.actor_total} optimizer steps in {learning} steps")
    if steps.critic_total:
        lines[-1] += f"; critic {steps.critic_total} optimizer steps, the first {plan.critic_warmup_steps} steps alone"
    return lines


def _memory(plan: RunPlan) -> list[str]:
    return [
        f"{entry.phase:<14} {size(entry.total):>10}   pool {entry.pool}: "
        + ", ".join(f"{name} {size(part)}" for name, part in entry.parts.items())
        for entry in plan.memory
    ] + [
        f"pool {pool.name:<9} {size(pool.bytes_per_rank):>10}   at most, on each of {pool.devices} rank(s)"
        for pool in plan.pools
    ]
