"""A trained role's memory that leaves the device while the engine generates, and comes back before it is used.

What moves are whole storages: they shrink to nothing and grow again, so every view of them (parameters in a continuous
buffer, shards of an optimizer, boxes of Hugging Face tensors) stays what it was. Only CUDA devices have memory apart
from the host's; elsewhere everything stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

CHUNK_BYTES = 256 << 20
"""Pinned memory is taken in pieces of a power of two, which is what torch's allocator rounds sizes up to."""


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of storage number `storage` lie in host chunk `chunk` from `offset` on."""

    storage: int
    start: int
    stop: int
    chunk: int
    offset: int


def plan_pieces(sizes: Sequence[int], chunk_bytes: int = CHUNK_BYTES) -> list[Piece]:
    """Storages of `sizes` bytes one after another in chunks of `chunk_bytes`, in order, without gaps."""
    pieces = []
    position = 0
    for storage, size in enumerate(sizes):
        start = 0
        while start < size:
            chunk, offset = divmod(position, chunk_bytes)
            length = min(size - start, chunk_bytes - offset)
            pieces.append(Piece(storage, start, start + length, chunk, offset))
            start += length
            position += length
    return pieces


def storages(tensors: Iterable[torch.Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """The storages of those tensors that are on `device`, each once, empty ones left out."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device == device:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


class Offload:
    """Leaves and returns; between the two nobody may use what left.

    Copies run on a stream of their own. Leaving ends when the device's memory is free. Returning does not wait: the
    calling stream waits for what it needs first, and `finish` makes it wait for the rest.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host: list[torch.Tensor] = []
        self._pieces: list[Piece] = []
        self._kept: list[torch.UntypedStorage] = []
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self._num_first = 0
        self._rest: torch.cuda.Event | None = None
        self._away = False

    def check(self, what: str) -> None:
        """Error: `ValueError` while the memory is on the host; `what` needs it."""
        if self._away:
            raise ValueError(f"{what} needs weights that were moved to the host: call reload() before it")

    def leave(
        self, first: Iterable[torch.Tensor], later: Iterable[torch.Tensor], dropped: Iterable[torch.Tensor]
    ) -> None:
        """Copy `first` and `later` to pinned host memory and free them on the device; free `dropped`, whose values are
        not kept. Tensors may share storages, also across the three: the first mention counts."""
        if self._stream is None or self._away:
            return
        self.finish()
        self._kept = storages(first, self._device)
        self._num_first = len(self._kept)
        self._kept += _others(storages(later, self._device), self._kept)
        free = self._kept + _others(storages(dropped, self._device), self._kept)
        self._sizes = [(storage, storage.nbytes()) for storage in free]
        self._pieces = plan_pieces([storage.nbytes() for storage in self._kept])
        while len(self._host) <= max((piece.chunk for piece in self._pieces), default=-1):
            self._host.append(torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for piece in self._pieces:
                self._on_host(piece).copy_(self._on_device(piece), non_blocking=True)
        self._stream.synchronize()
        for storage in free:
            storage.resize_(0)
        torch.cuda.empty_cache()
        self._away = True

    def back(self) -> None:
        """Take the memory again and start to fill it; the current stream waits for `first`. What was dropped is there
        with undefined values."""
        if self._stream is None or not self._away:
            return
        for storage, num_bytes in self._sizes:
            storage.resize_(num_bytes)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._fill(piece for piece in self._pieces if piece.storage < self._num_first)
            current.wait_event(self._stream.record_event())
            self._fill(piece for piece in self._pieces if piece.storage >= self._num_first)
            self._rest = self._stream.record_event()
        self._away = False

    def finish(self) -> None:
        """Make the current stream wait for everything that returns."""
        if self._rest is not None:
            torch.cuda.current_stream(self._device).wait_event(self._rest)
            self._rest = None

    def _fill(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._on_device(piece).copy_(self._on_host(piece), non_blocking=True)

    def _on_device(self, piece: Piece) -> torch.Tensor:
        storage = self._kept[piece.storage]
        whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        part: torch.Tensor = whole[piece.start : piece.stop]
        return part

    def _on_host(self, piece: Piece) -> torch.Tensor:
        return self._host[piece.chunk][piece.offset : piece.offset + piece.stop - piece.start]


def _others(found: Sequence[torch.UntypedStorage], known: Sequence[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    pointers = {storage.data_ptr() for storage in known}
    return [storage for storage in found if storage.data_ptr() not in pointers]
