"""Model folders with random weights, for measurements that need a shape and nothing more."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.families import HFTensor, hf_tensors
from flowrl.resharding.measure.folder import write_config
from flowrl.workers.hf_weights import FolderWriter
from flowrl.workers.model import DTYPES

DEVIATION = 0.02
BUCKET_ELEMENTS = 1 << 29


def write_random_model(target: Path, shape: ModelShape, *, dtype: str, seed: int, device: torch.device) -> Path:
    """Write a Hugging Face folder of the shape, complete or absent, and return it: weights normal with deviation 0.02,
    norms one, biases zero, and a tokenizer of one word per id, `t0`, `t1`, ... Drawn on the device.

    Error: `ValueError` for an architecture that has no config here.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    with tempfile.TemporaryDirectory() as scratch:
        write_config(Path(scratch), shape, dtype)
        _write_tokenizer(Path(scratch), shape.vocab_size)
        writer = FolderWriter(Path(scratch), target)
        for bucket in _buckets(hf_tensors(shape)):
            writer.add((tensor.name, _values(tensor, generator, DTYPES[dtype])) for tensor in bucket)
        writer.finish()
    return target


def _buckets(tensors: tuple[HFTensor, ...]) -> Iterator[list[HFTensor]]:
    bucket: list[HFTensor] = []
    elements = 0
    for tensor in tensors:
        bucket.append(tensor)
        elements += torch.Size(tensor.shape).numel()
        if elements >= BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
    if bucket:
        yield bucket


def _values(tensor: HFTensor, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    device = generator.device
    if tensor.name.endswith("norm.weight"):
        return torch.ones(tensor.shape, dtype=dtype, device=device)
    if tensor.name.endswith(".bias"):
        return torch.zeros(tensor.shape, dtype=dtype, device=device)
    drawn = torch.empty(tensor.shape, dtype=dtype, device=device)
    return drawn.normal_(std=DEVIATION, generator=generator)


def _write_tokenizer(folder: Path, num_ids: int) -> None:
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {f"t{n}": n for n in range(num_ids)}, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
