"""What a move must carry: which elements each rank needs, which it holds, and which rank sends what to whom.

Pure integers: no tensor, no process group. Boxes are those of `families`: one half-open interval per dim of a Hugging
Face tensor, never empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def same_elements(boxes: Sequence[Box], others: Sequence[Box]) -> bool:
    """Whether both are the same set of elements, however it is cut."""
    return not subtract_all(boxes, others) and not subtract_all(others, boxes)


def bound_bytes(needed: Boxes, held: Boxes, element_bytes: int) -> int:
    """Bytes of {elements that a rank needs} minus {elements that it holds}; an element counts once."""
    return element_bytes * sum(
        num_elements(box)
        for tensor, boxes in needed.items()
        for box in subtract_all(disjoint(boxes), held.get(tensor, ()))
    )
