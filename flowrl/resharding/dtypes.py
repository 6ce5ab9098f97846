"""Which dtypes a move accepts, and the one in which weights travel."""

from __future__ import annotations

from collections.abc import Iterable

import torch

LEGAL = (torch.bfloat16, torch.float32)
"""From narrow to wide."""


def side_dtype(side: str, dtypes: Iterable[tuple[str, torch.dtype]]) -> torch.dtype:
    """The one dtype of (tensor or parameter name, dtype) on a side, called `side` in errors.

    Errors: `ValueError` naming the first tensor of a dtype that no move knows, or of another dtype than the others: its
    values would be rounded to theirs without anybody having asked for it.
    """
    found: dict[torch.dtype, str] = {}
    for name, dtype in dtypes:
        found.setdefault(dtype, name)
    for dtype, name in found.items():
        if dtype not in LEGAL:
            raise ValueError(
                f"{side} {name} in {dtype}; weights move between {' and '.join(map(str, LEGAL))} only: give actor.dtype "
                f"and rollout.dtype one of these, and a model folder that is not quantised"
            )
    if len(found) > 1:
        shown = ", ".join(f"{name} in {dtype}" for dtype, name in found.items())
        raise ValueError(f"{side} tensors of several dtypes: {shown}; a move carries one dtype per side")
    return next(iter(found))


def wire_dtype(held: torch.dtype, kept: torch.dtype) -> torch.dtype:
    """The narrower of what the trainer holds and the engine keeps, so that weights are rounded before they travel.

    From float32 to bfloat16 a weight is rounded to the nearest, ties to even; from bfloat16 to float32 it is exact.
    """
    return min(held, kept, key=LEGAL.index)
