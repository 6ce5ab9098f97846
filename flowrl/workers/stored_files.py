"""The files of one role in a checkpoint, read without a model: which tensors there are, and what they hold.

They are those of torch.distributed.checkpoint as Megatron-core writes them: `*.distcp` with boxes of tensors,
`.metadata`, a pickle that says where each box lies, `common.pt` with plain values, `metadata.json`.
"""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.serialization import _get_layout

BUCKET_BYTES = 1 << 28
METADATA = ".metadata"
COMMON = "common.pt"

WEIGHT, EXACT, FIRST, SECOND = "weight", "exact", "exp_avg", "exp_avg_sq"
"""What a checkpoint holds of each tensor of the model, as the first part of a key: the weight in the role's type, the
optimizer's exact copy of it where that type is a rounded one, and the two moments of Adam."""

ALLOWED: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        Metadata, MetadataIndex, ChunkStorageMetadata, TensorProperties, TensorStorageMetadata, StorageMeta, _StorageInfo,
        _MEM_FORMAT_ENCODING, SavePlan, WriteItem, WriteItemType, TensorWriteData, torch.Size, _get_layout,
    )
} | {("torch", str(dtype).removeprefix("torch.")): dtype for dtype in (torch.float32, torch.bfloat16, torch.uint8)}  # fmt: skip
"""What `.metadata` names as torch 2.11 to 2.13 write it: classes of numbers and names, types, and a look-up of layouts."""


class _Unpickler(pickle.Unpickler):
    """Makes objects of the allowed classes and of no other: a pickle may otherwise name any function to call."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of flowrl contains")


def unpickle(file: IO[bytes], where: str) -> Any:
    """Error: `ValueError` where the pickle is damaged, or names anything but the classes that belong in it."""
    try:
        return _Unpickler(file).load()
    except (
        pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError, KeyError, ValueError, OverflowError,
        RecursionError, MemoryError,
    ) as error:  # fmt: skip
        raise ValueError(f"{where} is not what flowrl writes: {error}") from None


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """torch wraps what went wrong on any rank into a `BaseException`, which passes every handler of errors by.

    Error: `ValueError` with the first rank's in its place.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise ValueError(f"{what}: {cause} (rank {rank})") from cause


def check_boxes(metadata: Metadata, folder: Path) -> None:
    """Whether the boxes of each tensor cover it once, and the files are long enough to hold them.

    It is asked before anything is allocated: memory that no box fills would be passed on as if it were weights.
    Error: `ValueError` naming the tensor or the file.
    """
    path = folder / METADATA
    used: dict[str, int] = {}
    for index, where in metadata.storage_data.items():
        if where.offset < 0 or where.length < 0 or where.transform_descriptors:
            raise ValueError(f"{path} is damaged: {index.fqn} lies at {where.offset}, {where.length} bytes long")
        used[where.relative_path] = used.get(where.relative_path, 0) + where.length
    for file, length in used.items():
        name = PurePosixPath(file)
        if name.is_absolute() or ".." in name.parts or not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path} is damaged: {file!r} leaves the folder")
        size = (folder / file).stat().st_size
        if length > size:
            raise ValueError(f"{folder / file} is too short: {size} bytes, of which boxes need {length}")
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            problem = cover_problem(tuple(entry.size), boxes)
            for offset, sizes in () if problem else boxes:
                where = metadata.storage_data[MetadataIndex(key, torch.Size(offset))]
                if math.prod(sizes) * entry.properties.dtype.itemsize > where.length:
                    problem = f"a box of {list(sizes)} has {where.length} bytes"
            if problem:
                raise ValueError(f"{path} is damaged: {key} {list(entry.size)}: {problem}")


def cover_problem(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """What keeps boxes (offsets, sizes) from covering a tensor once each element; empty where they do."""
    if any(size < 0 for size in shape):
        return "its size is negative"
    for offset, sizes in boxes:
        inside = len(offset) == len(sizes) == len(shape) and all(
            min(low, size) >= 0 and low + size <= whole for low, size, whole in zip(offset, sizes, shape, strict=True)
        )
        if not inside:
            return f"a box at {list(offset)} of {list(sizes)} is not inside"
    covered, whole = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if covered != whole:
        return f"its boxes cover {covered} of {whole} elements"
    # With the right number of elements, boxes that do not overlap cover all. Sorted, only neighbours along the first
    # dimension can overlap.
    ordered = sorted(box for box in boxes if math.prod(box[1]))
    for number, (offset, sizes) in enumerate(ordered):
        for other, others in ordered[number + 1 :]:
            if offset and other[0] >= offset[0] + sizes[0]:
                break
            if all(low < a + n and a < low + m for a, n, low, m in zip(offset, sizes, other, others, strict=True)):
                return f"boxes at {list(offset)} and {list(other)} overlap"
    return ""


class StoredReader(FileSystemReader):
    """torch's reader of `*.distcp`, which opens those with `weights_only`, with a guarded look at `.metadata`."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._folder = Path(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read once. Errors: `ValueError` of `unpickle`, and where the file is absent."""
        if self._metadata is None:
            path = self._folder / METADATA
            try:
                with path.open("rb") as file:
                    metadata = unpickle(file, str(path))
            except OSError as error:
                raise ValueError(f"{path} cannot be read: {error.strerror}") from None
            if not isinstance(metadata, Metadata):
                raise ValueError(f"{path} holds a {type(metadata).__name__}, not a table of tensors")
            try:
                check_boxes(metadata, self._folder)
            except (AttributeError, TypeError, KeyError, OSError) as error:
                raise ValueError(f"{path} is not what flowrl writes: {error!r}") from None
            if metadata.storage_meta is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            self._metadata = metadata
        return self._metadata

    @cached_property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of every tensor by key. Errors: those of `read_metadata`."""
        return {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in self.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def buckets(
        self, keys: Iterable[str], bucket_bytes: int = BUCKET_BYTES
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Whole tensors in the order of `keys`, put together from the boxes that the ranks wrote, at most about
        `bucket_bytes` at a time. Error: `ValueError` where one cannot be read."""
        bucket: dict[str, torch.Tensor] = {}
        size = 0
        for key in keys:
            shape, dtype = self.tensors[key]
            num_bytes = math.prod(shape) * dtype.itemsize
            # A key that is asked for twice gets memory of its own each time.
            if bucket and (size + num_bytes > bucket_bytes or key in bucket):
                yield self._filled(bucket)
                bucket, size = {}, 0
            bucket[key] = torch.empty(shape, dtype=dtype)
            size += num_bytes
        if bucket:
            yield self._filled(bucket)

    def _filled(self, bucket: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        with plain_errors(f"{self._folder} cannot be read"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # just what is asked for here
            load(bucket, storage_reader=self, no_dist=True)
        return list(bucket.items())


def read_common(folder: str | Path) -> dict[str, Any]:
    """The plain values of a role. Error: `ValueError` where they cannot be read without running code."""
    path = Path(folder) / COMMON
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("common"), dict):
        raise ValueError(f"{path} is not what flowrl writes: it has no table of values")
    common: dict[str, Any] = found["common"]
    return common


def logical_tensors(folder: str | Path, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors of a role's folder in the order of their keys, a bucket of them in memory at a time.

    Keys are `KIND.NAME` with one of the kinds above and the name in a Hugging Face folder (`value_head.weight` for the
    head of a critic), and `rng.*`. They are the same whatever layout and optimizer wrote them. `prefix`: of the keys
    that are wanted.
    Errors: `ValueError` as in `StoredReader`.
    """
    reader = StoredReader(folder)
    for bucket in reader.buckets(sorted(key for key in reader.tensors if key.startswith(prefix))):
        yield from bucket
