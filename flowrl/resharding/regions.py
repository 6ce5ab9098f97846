"""What a move must carry: which elements each rank needs, which it holds, and which rank sends what to whom.

Pure integers: no tensor, no process group. Boxes are those of `families`: one half-open interval per dim of a Hugging
Face tensor, never empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from flowrl.resharding.families import Box, box_size

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}

Boxes = Mapping[str, Sequence[Box]]
"""Name of a Hugging Face tensor -> boxes of it."""


def whole(shape: Sequence[int]) -> Box:
    """All elements of a tensor of this shape."""
    return tuple((0, size) for size in shape)


def num_elements(box: Box) -> int:
    return prod(box_size(box))


def intersect(a: Box, b: Box) -> Box | None:
    """The common elements, or None where there are none. Error: boxes of different numbers of dims."""
    common = tuple((max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def subtract(box: Box, other: Box) -> list[Box]:
    """`box` without the elements of `other`, as disjoint boxes."""
    common = intersect(box, other)
    if common is None:
        return [box]
    rest: list[Box] = []
    for dim, (start, stop) in enumerate(common):
        low, high = box[dim]
        head, tail = common[:dim], box[dim + 1 :]
        rest += [(*head, piece, *tail) for piece in ((low, start), (stop, high)) if piece[0] < piece[1]]
    return rest


def subtract_all(boxes: Iterable[Box], others: Iterable[Box]) -> list[Box]:
    """The elements of `boxes` that are in none of `others`."""
    rest = list(boxes)
    for other in others:
        rest = [piece for box in rest for piece in subtract(box, other)]
    return rest


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """The union of `boxes` as disjoint boxes: an element that occurs several times is kept once."""
    kept: list[Box] = []
    for box in boxes:
        kept += subtract_all([box], kept)
    return kept


def slices_in(box: Box, outer: Box) -> tuple[slice, ...]:
    """Index of the elements of `box` inside a tensor that holds exactly `outer`."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, outer, strict=True))


def cut_rows(box: Box, max_elements: int) -> list[Box]:
    """`box` in pieces along its first dim of at most `max_elements` elements each; a single row is never cut."""
    if not box:
        return [box]
    (low, high), *rest = box
    rows = max(1, max_elements * (high - low) // num_elements(box))
    return [((start, min(start + rows, high)), *rest) for start in range(low, high, rows)]


@dataclass(frozen=True)
class Route:
    """Elements `box` of Hugging Face tensor `tensor` go from rank `source` to rank `target`; equal: a local copy."""

    tensor: str
    box: Box
    source: int
    target: int


def bound_bytes(needed: Boxes, held: Boxes, element_bytes: int) -> int:
    """Bytes of {elements that a rank needs} minus {elements that it holds}; an element counts once."""
    return element_bytes * sum(
        num_elements(box)
        for tensor, boxes in needed.items()
        for box in subtract_all(disjoint(boxes), held.get(tensor, ()))
    )


def _take(rest: list[Box], boxes: Iterable[Box]) -> tuple[list[Box], list[Box]]:
    """What `boxes` hold of `rest` (disjoint boxes), and what is left."""
    taken: list[Box] = []
    for box in boxes:
        taken += [common for piece in rest if (common := intersect(piece, box)) is not None]
        rest = subtract_all(rest, [box])
    return taken, rest


def count_once(shapes: Mapping[str, Sequence[int]], held: Sequence[Boxes]) -> list[dict[str, list[Box]]]:
    """Per rank, boxes it holds such that every element of every tensor belongs to exactly one rank.

    Error: `ValueError` naming the first tensor that the ranks together do not hold.
    """
    counted: list[dict[str, list[Box]]] = [{} for _ in held]
    for tensor, shape in shapes.items():
        rest = [whole(shape)]
        for rank, boxes in enumerate(held):
            taken, rest = _take(rest, boxes.get(tensor, ()))
            if taken:
                counted[rank][tensor] = taken
        if rest:
            raise ValueError(f"no training rank holds {rest[0]} of {tensor} {list(shape)}")
    return counted


def plan_routes(needed: Sequence[Boxes], held: Sequence[Boxes]) -> list[Route]:
    """How every rank gets what it needs: from itself where it can, else from a rank that holds it.

    `needed[r]` and `held[r]` belong to rank r. Each element that a rank needs is in exactly one route to it. Sources
    are tried from the target upwards, cyclically, which spreads the load over replicas. Routes are ordered by tensor
    (in the order of `needed`), then target.

    Error: `ValueError` naming tensor and rank where nobody holds a needed element.
    """
    world = len(needed)
    routes: list[Route] = []
    for tensor in dict.fromkeys(tensor for boxes in needed for tensor in boxes):
        for target in range(world):
            rest = disjoint(needed[target].get(tensor, ()))
            for step in range(world):
                source = (target + step) % world
                taken, rest = _take(rest, held[source].get(tensor, ()))
                routes += [Route(tensor, box, source, target) for box in taken]
            if rest:
                raise ValueError(f"rank {target} needs {rest[0]} of {tensor}, which no training rank holds")
    return routes


def cut_buckets(routes: Sequence[Route], world: int, element_bytes: int, bucket_bytes: int) -> list[list[Route]]:
    """The routes, in order, in buckets in which no rank receives or sends more than `bucket_bytes`.

    A larger route is cut by rows; a single row is never cut. Local copies travel nowhere and count nothing.
    """
    buckets: list[list[Route]] = [[]]
    received, sent = [0] * world, [0] * world
    for route in routes:
        if route.source == route.target:
            buckets[-1].append(route)
            continue
        for box in cut_rows(route.box, max(1, bucket_bytes // element_bytes)):
            size = num_elements(box) * element_bytes
            fullest = max(received[route.target], sent[route.source])
            if fullest and fullest + size > bucket_bytes:
                buckets.append([])
                received, sent = [0] * world, [0] * world
            received[route.target] += size
            sent[route.source] += size
            buckets[-1].append(Route(route.tensor, box, route.source, route.target))
    return buckets
