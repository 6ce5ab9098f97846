"""`python -m flowrl.export CHECKPOINT OUT`: a checkpoint's policy, or critic, as a Hugging Face folder.

One process without Ray or devices; it needs the memory of a few tensors at a time.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

from flowrl.builtin.model import resolve_model
from flowrl.checkpoints.store import open_checkpoint
from flowrl.config.model_shape import ModelShape, read_model_shape
from flowrl.config.paths import user_path
from flowrl.resharding.families import EMBEDDING, HEAD, HFTensor
from flowrl.workers.hf_weights import VALUE_HEAD, FolderWriter, HFFolder, write_weights
from flowrl.workers.stored_files import WEIGHT, StoredReader

USAGE = """usage: python -m flowrl.export CHECKPOINT OUT [role=critic] [model=FOLDER]

CHECKPOINT  a folder that a run wrote: RUN_DIR/checkpoints/step_N
OUT         the Hugging Face folder to write; one that is there is replaced
role        what to export: actor (the default), or critic, whose value head goes into a file beside the trunk
model       the folder that the run's model came from, where it has moved: configuration and tokenizer are copied from it
"""
EXIT_BAD_INPUT = 2
ROLES = ("actor", "critic")


@dataclass(frozen=True)
class Options:
    """What the command line asks for; `model` is None for the folder that the run used."""

    checkpoint: Path
    out: Path
    role: str = "actor"
    model: str | None = None


def parse_options(arguments: Sequence[str]) -> Options:
    """Error: `ValueError` with the usage."""
    paths = [argument for argument in arguments if "=" not in argument]
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    unknown = sorted(set(given) - {"role", "model"})
    if len(paths) != 2 or unknown or given.get("role", "actor") not in ROLES:
        what = (
            f"unknown key {unknown[0]}" if unknown
            else f"role={given['role']} is not legal; legal: {' | '.join(ROLES)}" if len(paths) == 2
            else f"{len(paths)} folders instead of CHECKPOINT and OUT"
        )  # fmt: skip
        raise ValueError(f"{what}\n{USAGE}")
    return Options(user_path(paths[0]), user_path(paths[1]), given.get("role", "actor"), given.get("model"))


def export(options: Options) -> None:
    """Write the folder. Errors: `ValueError` where the checkpoint is not complete, has no such role or does not fit the
    model folder, and where OUT cannot be written, which is found out first."""
    check_writable(options.out)
    try:
        checkpoint = open_checkpoint(options.checkpoint)
    except ValueError as error:
        raise ValueError(
            f"{options.checkpoint} is no complete checkpoint: {'; '.join(str(error).splitlines())}"
        ) from None
    stored = checkpoint.folder / options.role
    if not stored.is_dir():
        raise ValueError(f"{checkpoint.folder} has no {options.role}; it has {', '.join(checkpoint.state.roles)}")
    source = HFFolder(model_folder(checkpoint.config, options))
    shape = read_model_shape(source.path)
    reader = StoredReader(stored)
    wanted = _wanted(options, source, shape, reader)
    writer = FolderWriter(source.path, options.out)
    try:
        write_weights(writer, source, _named(reader, wanted, shape))
        if options.role == "critic":
            [[(_, head)]] = reader.buckets([f"{WEIGHT}.{VALUE_HEAD}"])
            writer.add_value_head(head)
        writer.finish()
    except OSError as error:
        raise ValueError(f"{options.out} cannot be written: {error}") from None


def check_writable(out: Path) -> None:
    """Error: `ValueError` where a folder cannot be put at `out`."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is there and is no folder; name another one")
    probe = out.with_name(f".{out.name}.probe")
    try:
        probe.mkdir(parents=True, exist_ok=True)
        probe.rmdir()
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror}; name another folder") from None


def model_folder(config: str, options: Options) -> Path:
    """Where the role's weights came from, by the run's `config`. Error: `ValueError` where that is not there."""
    try:
        tree: Mapping[str, Any] = safe_load(config)
        path = tree["critic"]["path"] if options.role == "critic" else tree["model"]["path"]
        return resolve_model(options.model or str(path), str(tree["model"]["cache_dir"]))
    except (YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"config.yaml of {options.checkpoint} has no path of a model: {error}") from None
    except ValueError as error:
        raise ValueError(f"{error}; or give model=FOLDER") from None


def _wanted(options: Options, source: HFFolder, shape: ModelShape, reader: StoredReader) -> list[HFTensor]:
    """Tensors that the folder is to hold, in the order of the layers."""
    critic = options.role == "critic"
    wanted = [tensor for tensor in source.tensors(shape) if not (critic and tensor.name == HEAD)]
    there = reader.tensors
    head = [HFTensor(VALUE_HEAD, (1, shape.hidden_size))] if critic else []
    problems = [
        f"{tensor.name} {list(tensor.shape)}"
        for tensor in (*wanted, *head)
        if (key := _key(tensor, shape)) not in there or there[key][0] != tensor.shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"{options.checkpoint / options.role} lacks {len(problems)} tensors of {source.path}, or has them in another "
            f"shape: {', '.join(problems[:5])}{more}; the run had another model: give its folder as model=FOLDER"
        )
    return wanted


def _key(tensor: HFTensor, shape: ModelShape) -> str:
    """A tied head that the folder spelled out is the embedding under a second name."""
    return f"{WEIGHT}.{EMBEDDING if shape.tied and tensor.name == HEAD else tensor.name}"


def _named(
    reader: StoredReader, wanted: Sequence[HFTensor], shape: ModelShape
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The wanted tensors under their own names, in buckets."""
    names = iter(wanted)
    for bucket in reader.buckets(_key(tensor, shape) for tensor in wanted):
        yield [(next(names).name, tensor) for _, tensor in bucket]


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 2 with one message on stderr."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(USAGE)
        return 0
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        options = parse_options(arguments)
        export(options)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    sys.stdout.write(f"{options.out}: {options.role} of {options.checkpoint.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
