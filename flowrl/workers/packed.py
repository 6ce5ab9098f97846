"""Rows one behind the other without padding between them: what the layers, their attention above all, must know of it.

Legend: B rows, T tokens of all rows, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams  # type: ignore[import-untyped]

MAX_PADDING = 1.25
"""Rows that are padded to one length where attention has no form for packed rows: tokens with padding over those without."""


def plan_blocks(lengths: Sequence[int]) -> list[range]:
    """Rows, in the order given, cut into ranges that may be padded to their longest: within `MAX_PADDING`, all rows."""
    blocks: list[range] = []
    longest = tokens = first = 0
    for row, length in enumerate(lengths):
        wide = max(longest, length)
        if row > first and wide * (row + 1 - first) > MAX_PADDING * (tokens + length):
            blocks.append(range(first, row))
            longest = tokens = 0
            first, wide = row, length
        longest, tokens = wide, tokens + length
    return [*blocks, range(first, len(lengths))]


@dataclass(frozen=True)
class Block:
    """Some neighbouring rows, `tokens` of the T, padded to `width`. `places`: where in [rows * width] each token comes to
    lie; None where all rows have that width."""

    tokens: slice
    rows: int
    width: int
    places: torch.Tensor | None


class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """Where rows lie in one sequence of T tokens.

    Megatron-core hands it through its layers to the attention. To the layers it is one long row, the format "sbhd": with
    "thd", rotary embeddings would be cut by row in every layer, for which a GPU waits four times each.

    `starts` [B + 1] int32: first tokens, then T; `cosines` and `sines` [T, 1, d / 2]: rotary embeddings by the position
    in the row.
    """

    cosines: torch.Tensor
    sines: torch.Tensor

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        super().__init__(qkv_format="sbhd")
        self.longest = max(lengths)
        self._lengths = torch.tensor(list(lengths), dtype=torch.int64)
        self._starts = torch.cat([self._lengths.new_zeros(1), self._lengths.cumsum(0)])
        positions = torch.arange(int(self._starts[-1])) - torch.repeat_interleave(self._starts[:-1], self._lengths)
        self.starts = self._starts.to(device=device, dtype=torch.int32)
        self._positions = positions.to(device)

    @cached_property
    def blocks(self) -> list[Block]:
        """The rows in blocks, for attention that has no form for packed rows."""
        return [self._block(rows) for rows in plan_blocks(self._lengths.tolist())]

    def turn(self, frequencies: torch.Tensor, dtype: torch.dtype) -> None:
        """Set `cosines` and `sines` for rotary `frequencies` [d / 2]."""
        angles = (self._positions[:, None].float() * frequencies)[:, None]
        self.cosines, self.sines = angles.cos().to(dtype), angles.sin().to(dtype)

    def _block(self, rows: range) -> Block:
        own = self._lengths[rows.start : rows.stop]
        tokens = slice(int(self._starts[rows.start]), int(self._starts[rows.stop]))
        width = int(own.max())
        if width * len(rows) == tokens.stop - tokens.start:
            return Block(tokens, len(rows), width, None)
        firsts = torch.repeat_interleave(torch.arange(len(rows)) * width, own)
        return Block(tokens, len(rows), width, firsts.to(self._positions.device) + self._positions[tokens])
