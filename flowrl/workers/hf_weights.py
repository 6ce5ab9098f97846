"""Hugging Face folders: reading boxes of tensors, and writing a folder that is complete or absent."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flowrl.config.model_shape import ModelShape
from flowrl.config.paths import user_path
from flowrl.resharding.families import EMBEDDING, HEAD, Box, HFTensor, hf_tensors

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
VALUE_HEAD_FILE = "value_head.safetensors"
VALUE_HEAD = "value_head.weight"
READ_TYPES = ("BF16", "F16", "F32")
"""Types of files that are weights as they are; float16 and bfloat16 are exact in float32."""
SHOWN = 5
ROWS_COMPARED = 4096
MARK = "flowrl_export.json"
"""A file that says who wrote a folder: one without it is not one that an export may replace."""


class HFFolder:
    """Tensors of a folder by name. Only headers are read until a box is asked for."""

    def __init__(self, folder: str | Path) -> None:
        """Errors: `ValueError` naming the folder where there are no safetensors or the index names an absent file."""
        self.path = user_path(folder)
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, Path] = {}
        for file in self._weight_files():
            try:
                self._files[file.name] = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} cannot be read as safetensors: {error}; copy it anew") from None
            for name in self._files[file.name].keys():  # noqa: SIM118 - not a mapping
                self._file_of[name] = file

    def _weight_files(self) -> list[Path]:
        index = self.path / INDEX
        if index.exists():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f"{index} is not an index of weights: {error!r}; copy it anew") from None
            absent = [name for name in names if not (self.path / name).exists()]
            if absent:
                raise ValueError(f"{index} names files that are not there: {', '.join(absent[:SHOWN])}")
            return [self.path / name for name in names]
        files = [file for file in sorted(self.path.glob("*.safetensors")) if file.name != VALUE_HEAD_FILE]
        if not files:
            raise ValueError(
                f"model folder {self.path} holds no .safetensors files; flowrl reads no other weight format"
            )
        return files

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name].name].get_slice(name)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from its header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor, read from one element."""
        dtype: torch.dtype = self.read(name, tuple((0, 1) for _ in self.shape(name))).dtype
        return dtype

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The box of the tensor in the file's type; nothing outside it is read."""
        part: torch.Tensor = self._slice(name)[tuple(slice(start, stop) for start, stop in box)]
        return part

    def check(self, shape: ModelShape, *, head: bool = True) -> None:
        """Compare the folder with what the model needs. `head` is False where no language-model head is read.

        Errors: `ValueError` with the first few names of missing, unexpected and wrongly shaped tensors, and of those of a
        quantised or integer type, and their count; and where `tie_word_embeddings` contradicts the files.
        """
        blocks = shape.num_layers * max(1, shape.num_experts)
        if blocks > len(self._file_of):  # told before that many names are made
            raise ValueError(
                f"config.json of {self.path} says num_hidden_layers={shape.num_layers}"
                f"{f' of {shape.num_experts} experts' if shape.num_experts else ''}, but its files hold "
                f"{len(self._file_of)} tensors in all"
            )
        expected = {tensor.name: tensor for tensor in hf_tensors(shape)}
        optional = {HEAD} if shape.tied or not head else set()
        there = {name for name in self._file_of if not name.endswith("rotary_emb.inv_freq")}
        missing = sorted(set(expected) - there - optional)
        problems = _listed("missing", missing)
        problems += _listed("unexpected", sorted(there - set(expected) - optional))
        wrong = [t for name, t in expected.items() if name in there and self.shape(name) != t.shape]
        problems += _listed("wrong shape", [f"{t.name} {self.shape(t.name)} instead of {t.shape}" for t in wrong])
        odd = [name for name in expected if name in there and self._slice(name).get_dtype() not in READ_TYPES]
        described = [f"{name} {self._slice(name).get_dtype()}" for name in odd]
        problems += _listed(f"of a type that is no plain weight (known: {', '.join(READ_TYPES)})", described)
        if missing == [HEAD]:
            problems.append("config.json says tie_word_embeddings=false; set it to true if the model is tied")
        if problems:
            raise ValueError(f"weights of {self.path} do not fit {shape.architecture}: {'; '.join(problems)}")
        if shape.tied and HEAD in there and head:
            self._check_tied()

    def _check_tied(self) -> None:
        rows, width = self.shape(EMBEDDING)
        equal = self.shape(HEAD) == (rows, width)
        for start in range(0, rows if equal else 0, ROWS_COMPARED):
            box = ((start, min(start + ROWS_COMPARED, rows)), (0, width))
            equal = equal and torch.equal(self.read(HEAD, box), self.read(EMBEDDING, box))
        if not equal:
            raise ValueError(
                f"config.json of {self.path} says tie_word_embeddings=true, but {HEAD} differs from {EMBEDDING}; set "
                f"tie_word_embeddings=false, or remove {HEAD} from the files"
            )

    def tensors(self, shape: ModelShape) -> tuple[HFTensor, ...]:
        """What an export of this folder holds: the model's tensors, and a tied head where the folder wrote it out."""
        tensors = hf_tensors(shape)
        if shape.tied and HEAD in self._file_of:
            tensors += (HFTensor(HEAD, (shape.vocab_size, shape.hidden_size)),)
        return tensors

    def value_head(self) -> torch.Tensor | None:
        """Weight [1, h] of a value head that an earlier critic wrote beside the trunk, if there is one."""
        file = self.path / VALUE_HEAD_FILE
        if not file.exists():
            return None
        with safe_open(file, framework="pt") as opened:
            weight: torch.Tensor = opened.get_tensor(VALUE_HEAD)
            return weight


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(names[:SHOWN])}{more}"]


class FolderWriter:
    """Writes a folder aside, bucket by bucket, and puts it in place at the end."""

    def __init__(self, source: Path, target: str | Path) -> None:
        """Everything of `source` but its weights is copied as it is."""
        self.target = user_path(target)
        self.aside = self.target.with_name(f".{self.target.name}.partial-{os.getpid()}")
        shutil.rmtree(self.aside, ignore_errors=True)
        self.aside.mkdir(parents=True)
        self._file_of: dict[str, int] = {}
        self._total_bytes = 0
        self._count = 0
        try:
            for file in copied_files(source):
                shutil.copyfile(file, self.aside / file.name)
        except BaseException:
            self.abandon()
            raise

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a bucket of tensors as one file."""
        bucket = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
        self._count += 1
        self._save(bucket, _part(self._count, 0))
        for name, tensor in bucket.items():
            self._file_of[name] = self._count
            self._total_bytes += tensor.numel() * tensor.element_size()

    def add_value_head(self, weight: torch.Tensor) -> None:
        """Write a critic's head beside its trunk; weight: [1, h]."""
        self._save({VALUE_HEAD: weight.detach().cpu().contiguous()}, VALUE_HEAD_FILE)

    def _save(self, tensors: dict[str, torch.Tensor], name: str) -> None:
        """Error: `OSError` where the disk refuses."""
        try:
            save_file(tensors, self.aside / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{self.aside / name}: {error}") from error

    def abandon(self) -> None:
        """Remove what is written; the folder that was in the place stays."""
        shutil.rmtree(self.aside, ignore_errors=True)

    def finish(self) -> None:
        """Name the files, write index and mark, and move the folder to its place, replacing an older one."""
        (self.aside / MARK).write_text(json.dumps({"written_by": "flowrl"}) + "\n")
        if self._count == 1:
            (self.aside / _part(1, 0)).rename(self.aside / "model.safetensors")
        else:
            for number in range(1, self._count + 1):
                (self.aside / _part(number, 0)).rename(self.aside / _part(number, self._count))
            index = {
                "metadata": {"total_size": self._total_bytes},
                "weight_map": {name: _part(number, self._count) for name, number in sorted(self._file_of.items())},
            }
            (self.aside / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        if self.target.exists():
            old = self.target.with_name(f".{self.target.name}.old-{os.getpid()}")
            self.target.rename(old)
            try:
                self.aside.rename(self.target)
            except OSError:
                old.rename(self.target)
                raise
            shutil.rmtree(old)
        else:
            self.aside.rename(self.target)


def copied_files(source: Path) -> list[Path]:
    """What an export takes over from a model folder as it is."""
    files = [file for file in sorted(source.iterdir()) if file.is_file() and file.name != MARK]
    return [file for file in files if not file.name.endswith(WEIGHT_SUFFIXES)]


def is_export(folder: Path, source: Path) -> bool:
    """Whether an earlier export of `source`, and nothing else, lies in the folder."""
    entries = list(folder.iterdir())
    weights = [entry.name for entry in entries if entry.name.endswith(".safetensors")]
    known = {INDEX, MARK, *weights, *(file.name for file in copied_files(source))}
    return (folder / MARK).is_file() and all(entry.name in known and entry.is_file() for entry in entries)


def _part(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_weights(
    writer: FolderWriter, source: HFFolder, buckets: Iterable[Iterable[tuple[str, torch.Tensor]]]
) -> None:
    """In the types that the original folder `source` has, so a model that did not learn is exported bit for bit (where the
    engine's type is as wide as the folder's)."""
    narrowed = set()
    for bucket in buckets:
        tensors = [(name, tensor, source.dtype(name)) for name, tensor in bucket]
        narrowed |= {dtype for _, tensor, dtype in tensors if dtype.itemsize < tensor.element_size()}
        writer.add((name, tensor.to(dtype)) for name, tensor, dtype in tensors)
    if narrowed:
        logger.info("exported as %s, the type of %s", ", ".join(map(str, narrowed)), source.path)
