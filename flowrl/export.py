"""`python -m flowrl.export CHECKPOINT OUT`: a checkpoint's policy, or critic, as a Hugging Face folder.

One process without Ray or devices; it needs the memory of a few tensors at a time.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from yaml import YAMLError, safe_load  # type: ignore[import-untyped]

from flowrl.builtin.model import resolve_model
from flowrl.checkpoints.start import FOLDER
from flowrl.checkpoints.store import open_checkpoint
from flowrl.command import run_command
from flowrl.config.model_code import custom_code
from flowrl.config.model_shape import ModelShape, read_model_shape
from flowrl.config.paths import user_path
from flowrl.resharding.families import EMBEDDING, HEAD, HFTensor
from flowrl.workers.hf_weights import VALUE_HEAD, FolderWriter, HFFolder, is_export, write_weights
from flowrl.workers.stored_files import WEIGHT, StoredReader

USAGE = """usage: python -m flowrl.export CHECKPOINT OUT [role=critic] [model=FOLDER]

CHECKPOINT  a folder that a run wrote: RUN_DIR/checkpoints/step_N
OUT         the Hugging Face folder to write: absent, empty, or an earlier export of the model, which is replaced
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
    if not all(paths):
        raise ValueError(f"CHECKPOINT or OUT is empty\n{USAGE}")
    return Options(user_path(paths[0]), user_path(paths[1]), given.get("role", "actor"), given.get("model"))


def export(options: Options) -> None:
    """Write the folder. Errors: `ValueError` where the checkpoint is not complete, has no such role or does not fit the
    model folder, and where OUT cannot be written, which is found out first."""
    out = resolved(options.out)
    check_writable(out)
    check_apart(out, options.checkpoint)
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
    check_replaceable(out, source.path)
    shape = read_model_shape(source.path)
    source.check(shape, head=options.role == "actor")
    reader = StoredReader(stored)
    wanted = _wanted(options, source, shape, reader)
    try:
        _write(FolderWriter(source.path, out), source, shape, reader, wanted, options.role)
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error}") from None


def _write(
    writer: FolderWriter, source: HFFolder, shape: ModelShape, reader: StoredReader, wanted: list[HFTensor], role: str
) -> None:
    """The whole folder or nothing."""
    try:
        write_weights(writer, source, _named(reader, wanted, shape))
        if role == "critic":
            [[(_, head)]] = reader.buckets([f"{WEIGHT}.{VALUE_HEAD}"])
            writer.add_value_head(head)
        writer.finish()
    except BaseException:
        writer.abandon()
        raise


def resolved(out: Path) -> Path:
    """Without links: a link stays, and what it points to is written. Error: `ValueError` where that leads nowhere."""
    if str(out).startswith("~"):
        raise ValueError(f"{out} cannot be written: there is no such user")
    try:
        return out.resolve()
    except RuntimeError:
        raise ValueError(f"{out} cannot be written: its links lead in a circle") from None


def check_apart(out: Path, *kept: Path) -> None:
    """Error: `ValueError` where `out`, a resolved path, is, holds or lies in one of the folders that are to stay, or
    in the folder of checkpoints that one of them belongs to."""
    for each in kept:
        folder = Path(os.path.realpath(each))
        of_a_run = folder.parent.name == FOLDER and folder.name.startswith("step_")
        folder = folder.parent if of_a_run else folder
        if out.is_relative_to(folder) or folder.is_relative_to(out):
            raise ValueError(
                f"{out} is, holds or lies in {folder}, which an export must not change; name another folder"
            )


def check_replaceable(out: Path, model: Path) -> None:
    """Error: `ValueError` where writing `out` would take away anything but an earlier export of the model."""
    check_apart(out, model)
    if out.exists() and any(out.iterdir()) and not is_export(out, model):
        raise ValueError(
            f"{out} is there, and is neither empty nor an earlier export of {model} alone; name another folder, or remove it"
        )


def check_writable(out: Path) -> None:
    """Error: `ValueError` where a folder cannot be put at `out`."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is there and is no folder; name another one")
    if out == out.parent:
        raise ValueError(f"{out} cannot be written: it is the root of the file system; name another folder")
    if out.exists() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise ValueError(
            f"{out} is there, and is neither empty nor an earlier export; name another folder, or remove it"
        )
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
        folder = resolve_model(options.model or str(path), str(tree["model"]["cache_dir"]))
        trusted = tree["model"].get("trust_remote_code", False) is True
    except (YAMLError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"config.yaml of {options.checkpoint} has no path of a model: {error}") from None
    except ValueError as error:
        raise ValueError(f"{error}; or give model=FOLDER") from None
    found = [] if trusted else custom_code(folder)
    if found:
        raise ValueError(
            f"{folder} brings Python code of its own ({'; '.join(found)}), which the run did not trust "
            "(model.trust_remote_code) and an export would pass on; remove auto_map from these files"
        )
    return folder


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
    strange = sorted(
        key
        for key in there.keys() - {_key(tensor, shape) for tensor in (*wanted, *head)}
        if key.startswith(f"{WEIGHT}.")
    )
    if strange and not problems:
        more = f" and {len(strange) - 5} more" if len(strange) > 5 else ""
        raise ValueError(
            f"{options.checkpoint / options.role} holds {len(strange)} tensors that {source.path} has not: "
            f"{', '.join(key.removeprefix(f'{WEIGHT}.') for key in strange[:5])}{more}; the run had another model: give its "
            "folder as model=FOLDER"
        )
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
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    sys.stdout.write(f"{options.out}: {options.role} of {options.checkpoint.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
