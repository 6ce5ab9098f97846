"""Arithmetic of parallel layouts: what divides what. Integers only; rules, `auto` values and the plan share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.config.model_shape import ModelShape


@dataclass(frozen=True)
class Pool:
    """Devices that one role runs on, named by the key that sets their number."""

    key: str
    devices: int


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest_divisors(number: int, value: int) -> list[int]:
    """The divisors of `number` next to `value`, below and above where there are such."""
    below, above = ([d for d in divisors(number) if keep(d)] for keep in (value.__ge__, value.__le__))
    return sorted({*below[-1:], *above[:1]})


def nearest_multiples(value: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `value`, at least `unit` itself."""
    below = value // unit * unit
    return sorted({max(unit, below), below + unit})


def tensor_parallel_problem(shape: ModelShape, tp: int) -> str | None:
    """Why a model cannot be cut into `tp` parts, or None. Trainer and engine alike keep copies of a key/value head on
    several ranks where there are fewer heads than ranks."""
    cut = [(shape.heads, "attention heads")]
    cut.append(((shape.heads + 2 * shape.kv_heads) * shape.head_dim, "rows of queries, keys and values"))
    if not shape.num_experts:
        cut.append((shape.ffn_size, "feed-forward columns"))
    for count, what in cut:
        if count % tp:
            return f"the model's {count} {what} cannot be cut into {tp} parts"
    if shape.kv_heads % tp and tp % shape.kv_heads:
        return f"the model's {shape.kv_heads} key/value heads cannot be spread over {tp} parts"
    return None


ENGINE_VOCABULARY_UNIT = 64
"""vLLM pads the vocabulary to a multiple of this before it cuts it."""


def vocabulary_problem(shape: ModelShape, tp: int) -> str | None:
    """Why an engine cannot cut a model's vocabulary into `tp` parts, or None. (The trainer pads to what `tp` divides.)"""
    padded = -(-shape.vocab_size // ENGINE_VOCABULARY_UNIT) * ENGINE_VOCABULARY_UNIT
    return f"the vocabulary of {padded} rows (a multiple of 64) cannot be cut into {tp} parts" if padded % tp else None


def expert_parallel_problem(shape: ModelShape, ep: int, etp: int) -> str | None:
    """Why a model's experts cannot be shared by `ep` ranks that are cut into `etp` parts each, or None."""
    if not shape.num_experts:
        return f"{shape.architecture} has no experts" if ep > 1 or etp > 1 else None
    if shape.num_experts % ep:
        return f"the model's {shape.num_experts} experts cannot be shared by {ep} ranks"
    if shape.expert_ffn_size % etp:
        return f"an expert's {shape.expert_ffn_size} columns cannot be cut into {etp} parts"
    return None


def legal_tensor_parallel(shape: ModelShape) -> list[int]:
    """Every legal tensor-parallel size of the model."""
    return [tp for tp in divisors(shape.heads) if tensor_parallel_problem(shape, tp) is None]


def stage_layers(num_layers: int, pp: int, first: int | None) -> list[int] | None:
    """Layers of each pipeline stage of the trainer, or None where they do not come out whole and positive."""
    if first is None:
        return [num_layers // pp] * pp if num_layers % pp == 0 else None
    rest = num_layers - first
    if pp == 1:
        return [first] if rest == 0 else None
    if rest <= 0 or rest % (pp - 1):
        return None
    return [first] + [rest // (pp - 1)] * (pp - 1)


def legal_first_stages(num_layers: int, pp: int) -> list[int]:
    """The values of `first_stage_layers` that leave equal whole stages after the first."""
    return [first for first in range(1, num_layers + 1) if stage_layers(num_layers, pp, first)]


def words(numbers: Sequence[int]) -> str:
    """`1, 2 or 4`."""
    texts = [str(number) for number in numbers]
    return " or ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts) or "none"
