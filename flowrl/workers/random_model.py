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
NUM_BYTES, END = 256, "<|endoftext|>"


def write_random_model(target: Path, shape: ModelShape, *, dtype: str, seed: int, device: torch.device) -> Path:
    """Write a Hugging Face folder of the shape, complete or absent, and return it: weights normal with deviation 0.02,
    norms one, biases zero, and a tokenizer of one id per byte. Drawn on the device.

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
    """One id per byte, then an end of text, then words that no text has. Some architectures read any tokenizer file as pairs
    of bytes, so it is one, without pairs. A vocabulary too small for that gets none."""
    if num_ids <= NUM_BYTES:
        return
    # Bytes without a printable character of their own stand for the characters from 256 on.
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [chr(byte) for byte in own] + [chr(256 + number) for number in range(NUM_BYTES - len(own))]
    words = [*characters, END, *(f"<t{number}>" for number in range(NUM_BYTES + 1, num_ids))]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": NUM_BYTES, "content": END, **special}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "TokenizersBackend", "eos_token": END, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
