"""Arithmetic of parallel layouts: what divides what. Integers only; rules, `auto` values and the plan share it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from flowrl.config.model_shape import ModelShape


@dataclass(frozen=True)
class Pool:
    """Devices that one role runs on, named by the key that sets their number."""

    key: str
    devices: int


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(legal: Sequence[int], value: int) -> list[int]:
    """Of ascending numbers those next to `value`, below and above where there are such."""
    below, above = ([n for n in legal if keep(n)] for keep in (value.__ge__, value.__le__))
    return sorted({*below[-1:], *above[:1]})


def nearest_divisors(number: int, value: int) -> list[int]:
    """The divisors of `number` next to `value`, below and above where there are such."""
    return nearest(divisors(number), value)


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


def _share(num_layers: int, pp: int) -> int:
    """Layers of every pipeline stage but the last, which has what is left: as many or fewer."""
    return -(-num_layers // pp)


def _pipeline_fault(num_layers: int, pp: int, vpp: int, first: int | None) -> str | None:
    share, chunks = _share(num_layers, pp), pp * vpp
    if vpp > 1 and pp == 1:
        return f"vpp={vpp} interleaves the stages of a pipeline, and pp=1 has one stage"
    if vpp > 1 and first is not None:
        return f"first_stage_layers={first} with vpp={vpp}: the chunks of an interleaved pipeline are equal; give one of the two"
    if vpp > 1 and num_layers % chunks:
        return f"{num_layers} layers do not divide into pp={pp} x vpp={vpp} = {chunks} chunks"
    if first is None and (pp - 1) * share >= num_layers:
        return f"{num_layers} layers in stages of {share} leave nothing for the last of pp={pp}"
    rest = 0 if first is None else num_layers - first
    if first is not None and (rest != 0 if pp == 1 else rest <= 0 or rest % (pp - 1)):
        return f"{num_layers} layers cannot be cut into pp={pp} stages with {first} on the first and equal shares on the others"
    return None


def pipeline_problem(num_layers: int, pp: int, vpp: int, first: int | None) -> str | None:
    """Why the trainer cannot cut layers into `pp` stages of `vpp` chunks with `first` layers on the first stage (None:
    equal stages), with the nearest legal values; or None."""
    fault = _pipeline_fault(num_layers, pp, vpp, first)
    if fault is None:
        return None
    counts = range(1, num_layers + 1)
    if vpp > 1:
        legal = [size for size in counts if _pipeline_fault(num_layers, pp, size, None) is None]
        return f"{fault}; legal: vpp={words(legal or [1])}"
    remedies = []
    firsts = [size for size in counts if _pipeline_fault(num_layers, pp, 1, size) is None]
    if firsts and pp > 1:
        remedies.append(f"first_stage_layers={words(nearest(firsts, first or _share(num_layers, pp)))}")
    if _pipeline_fault(num_layers, pp, 1, None) is None:
        remedies.append("first_stage_layers=null")
    else:
        stages = [size for size in counts if _pipeline_fault(num_layers, size, 1, None) is None]
        remedies.append(f"pp={words(nearest(stages, pp))}" + ("" if first is None else " without first_stage_layers"))
    return f"{fault}; nearest: {', or '.join(remedies)}"


def stage_chunks(num_layers: int, pp: int, vpp: int = 1, first: int | None = None) -> list[list[range]]:
    """[pp][vpp] -> global numbers of the layers of a chunk of a pipeline stage of the trainer.

    Stages are equal; where layers do not divide, the last one has fewer; with `first` the others share the rest. Chunk
    v of stage s is virtual stage v * pp + s, and layers go through virtual stages in ascending order.

    Errors: `ValueError` with the arithmetic and the nearest legal values.
    """
    problem = pipeline_problem(num_layers, pp, vpp, first)
    if problem is not None:
        raise ValueError(problem)
    if first is not None and pp > 1:
        sizes = [first] + [(num_layers - first) // (pp - 1)] * (pp - 1)
    else:
        share = _share(num_layers, pp * vpp)
        sizes = [share] * (pp * vpp - 1) + [num_layers - share * (pp * vpp - 1)]
    stops = list(accumulate(sizes))
    chunks = [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    return [chunks[stage::pp] for stage in range(pp)]


def words(numbers: Sequence[int]) -> str:
    """`1, 2 or 4`."""
    texts = [str(number) for number in numbers]
    return " or ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts) or "none"
