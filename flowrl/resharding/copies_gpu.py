"""Many copies within a GPU's memory in one launch. Each alone is too small to keep the memory busy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from flowrl.resharding.copy_boxes import ALIGNMENT, WORD_BYTES, Rows, tiles_of

VECTORS = 2048
"""Of 16 bytes, which a program copies at once. They go on from row to row, so narrow rows keep it as busy as wide ones."""
_FIELDS = 6


@triton.jit(do_not_specialize=["num_tiles"])  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    tiles, boxes, target_base, source_base, num_tiles, fields: tl.constexpr, at_once: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, 4)[None, :]
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        about = boxes + tl.load(tiles + 3 * tile) * fields
        first_row, first_vector = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2).to(tl.int32)
        target = tl.multiple_of((tl.load(about) + target_base).to(tl.pointer_type(tl.int32)), 16)
        source = tl.multiple_of((tl.load(about + 1) + source_base).to(tl.pointer_type(tl.int32)), 16)
        num_rows, width = tl.load(about + 2), tl.load(about + 3).to(tl.int32) // 4
        target_stride, source_stride = tl.multiple_of(tl.load(about + 4), 4), tl.multiple_of(tl.load(about + 5), 4)
        vectors = first_vector + tl.arange(0, at_once)
        down = vectors // width
        rows, words = first_row + down, (vectors - down * width) * 4
        there = (rows < num_rows)[:, None]
        values = tl.load(source + (rows * source_stride + words)[:, None] + lane, mask=there)
        tl.store(target + (rows * target_stride + words)[:, None] + lane, values, mask=there)


def sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The table on the device, in the order of the current stream. From memory that is not pinned the host would wait for all
    that the stream has to do first."""
    pinned = table.pin_memory() if device.type == "cuda" else table
    return pinned.to(device, non_blocking=True)


class Addresses:
    """A table [N, F] int64 on the GPU, some of whose columns are addresses: the given bytes from the beginning of tensors.

    It follows storages that move; many tensors are views of a few of them.
    """

    def __init__(
        self, table: torch.Tensor, tensors: Sequence[torch.Tensor], numbers: torch.Tensor, columns: slice
    ) -> None:
        """`numbers` [N, A]: the tensors that the A `columns` count from."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        places = {storage._cdata: storage for storage in storages}
        order = {key: number for number, key in enumerate(places)}
        starts = torch.tensor([tensor.storage_offset() * tensor.element_size() for tensor in tensors])
        self._relative, self._columns = table.clone(), columns
        self._relative[:, columns] += starts[numbers]
        self._numbers = torch.tensor([order[storage._cdata] for storage in storages])[numbers]
        self._storages, self._device = list(places.values()), tensors[0].device
        self._memory: list[int] = []
        self._table = table

    def now(self) -> torch.Tensor:
        memory = [storage.data_ptr() for storage in self._storages]
        if memory != self._memory:
            table = self._relative.clone()
            table[:, self._columns] += torch.tensor(memory)[self._numbers]
            self._table, self._memory = sent(table, self._device), memory
        return self._table


def programs_beside_collectives(device: torch.device) -> int:
    """As many as three fifths of the GPU's multiprocessors, on which they spread. Copies on all of them would take the memory's
    whole rate, and the collectives would run at half of theirs (docs/decisions/0007-forms-of-exchange.md)."""
    return max(1, int(torch.cuda.get_device_properties(device).multi_processor_count) * 3 // 5)


def _tiles(num_rows: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """[T, 3] int64: box, and the row and the place in it of a tile's first vector; rows of `width` [N] vectors."""
    box, first = tiles_of(num_rows * width, VECTORS).unbind(1)
    return torch.stack([box, first // width[box], first % width[box]], dim=1)


class CopyLaunch:
    """Copies in one launch; `boxes[i]` are those of copy i. Each side is a tensor for each copy, or None: the boxes count from
    the beginning of a buffer that `run` is given."""

    def __init__(
        self,
        targets: Sequence[torch.Tensor] | None,
        sources: Sequence[torch.Tensor] | None,
        boxes: Sequence[Sequence[Rows]],
    ) -> None:
        table = torch.tensor([box for there in boxes for box in there], dtype=torch.int64)
        copy = torch.tensor([number for number, there in enumerate(boxes) for _ in there])
        sides = [side for side in (targets, sources) if side is not None]
        tensors = [tensor for side in sides for tensor in side]
        numbers = torch.stack([copy + place * len(boxes) for place in range(len(sides))], dim=1)
        first = 0 if targets is not None else 1
        self._boxes = Addresses(table, tensors, numbers, slice(first, first + len(sides)))
        self._tiles = _tiles(table[:, 2], table[:, 3] * WORD_BYTES // ALIGNMENT).to(tensors[0].device)
        self._fills, self._empties = targets is None, sources is None

    def run(self, buffer: int = 0, *, beside_collectives: bool = False) -> None:
        """On the current stream; `buffer` is its address, where one side is a buffer."""
        programs = len(self._tiles)
        if beside_collectives:
            programs = min(programs, programs_beside_collectives(self._tiles.device))
        _copy[(programs,)](
            self._tiles, self._boxes.now(), buffer * self._fills, buffer * self._empties, len(self._tiles),
            fields=_FIELDS, at_once=VECTORS, num_warps=8,
        )  # fmt: skip
