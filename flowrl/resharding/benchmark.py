"""`python -m flowrl.resharding.benchmark`: weight moves measured over real processes, against other ways of moving."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from flowrl.command import run_command
from flowrl.config.machine import find_machine
from flowrl.config.model_shape import ModelShape
from flowrl.config.paths import user_path
from flowrl.resharding.measure import report
from flowrl.resharding.measure.folder import write_config
from flowrl.resharding.measure.job import PRELOAD, RUN, Job
from flowrl.resharding.measure.options import (
    FLOWRL,
    USAGE,
    BenchmarkOptions,
    check_memory,
    check_model,
    kept_shape,
    parse_options,
    refit_refusal,
)
from flowrl.resharding.measure.processes import RankFailed, run_ranks
from flowrl.resharding.measure.report import Measured
from flowrl.resharding.plan.options import Layout
from flowrl.resharding.shapes import SHAPES, planned_shape
from flowrl.resharding.words import make_folder
from flowrl.workers.environment import process_environment

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
WIDTH = 190
"""Columns of output that goes to no terminal."""

Skipped = list[dict[str, str]]


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0; 1 where a rank failed or a result was wrong; 2 for bad input, with one message on stderr."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(f"{USAGE}\nNamed shapes: {', '.join(SHAPES)}\n")
        return 0
    try:
        options = parse_options(arguments)
        shape = kept_shape(planned_shape(options.model), options)
        device = _device(options)
        _check(shape, options, device)
        if options.out is not None:
            make_folder(options.out)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    # The processes inherit these; they must be there before the first of them starts.
    os.environ.update(process_environment(device, options.world))
    # Megatron-core warns in every process of optional packages that flowrl does without.
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    measured: list[Measured] = []
    skipped: Skipped = []
    failed = ""
    try:
        for rows, left_out in measure(shape, options, device):
            measured += rows
            skipped += left_out
    except RankFailed as error:
        failed = str(error)
    if measured:
        _report(options, device, measured, skipped)
    if failed:
        sys.stderr.write(f"error: {failed}\n")
        return EXIT_FAILED
    return _verdict(measured)


def _report(options: BenchmarkOptions, device: str, measured: Sequence[Measured], skipped: Skipped) -> None:
    """Write and print what has been measured."""
    title = f"{options.label}, {options.dtype}, trained {options.train.text} on {options.world} ranks"
    if options.out is not None:
        report.write(options.out, title, report.results(measured, skipped, device), measured)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(report.console_table(title, measured))
    for one in skipped:
        console.print(f"not run: {one['engine']} to {one['rollout']}: {one['reason']}", highlight=False)
    for row, _ in measured:
        if row["engine"] == FLOWRL:
            console.print(report.sentence(row), highlight=False)


def _verdict(measured: Sequence[Measured]) -> int:
    wrong = [
        f"{row['engine']} to {row['rollout']}"
        for row, _ in measured
        if not row["bit_exact"] or row["fingerprint_ok"] is False
    ]
    if wrong:
        sys.stderr.write(f"error: not the trainer's weights, bit for bit: {', '.join(wrong)}\n")
        return EXIT_FAILED
    return 0


def _device(options: BenchmarkOptions) -> str:
    gpus = find_machine().gpus
    least = 1 if options.backend == "gloo" else options.world
    if options.device == "cuda" and gpus < least:
        needed = f"a GPU for each of world={options.world} ranks" if least > 1 else "a GPU"
        shared = "; with backend=gloo ranks share GPUs" if 0 < gpus < least else ""
        raise ValueError(f"device=cuda needs {needed} and there are {gpus}{shared}")
    if options.backend == "nccl" and gpus < least:
        raise ValueError(f"backend=nccl needs a GPU for each of world={options.world} ranks and there are {gpus}")
    return options.device or ("cuda" if gpus >= options.world else "cpu")


def _backend(options: BenchmarkOptions, device: str) -> str:
    return options.backend or ("nccl" if device == "cuda" else "gloo")


def _memory_bytes(options: BenchmarkOptions, device: str) -> int:
    machine = find_machine()
    return machine.gpu_memory_bytes * min(options.world, machine.gpus) if device == "cuda" else machine.memory_bytes


def _check(shape: ModelShape, options: BenchmarkOptions, device: str) -> None:
    check_model(shape, options)
    for rollout in options.rollouts:
        check_memory(shape, options, rollout, _memory_bytes(options, device))


def measure(shape: ModelShape, options: BenchmarkOptions, device: str) -> Iterator[tuple[list[Measured], Skipped]]:
    """Every engine on one layout after another, and what was left out; processes are fresh for each layout.

    Error: `RankFailed`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        coded = options.model in SHAPES
        folder = write_config(Path(scratch), shape, options.dtype) if coded else user_path(options.model)
        for rollout in options.rollouts:
            engines = [FLOWRL, *options.against]
            skipped: Skipped = []
            refusal = refit_refusal(shape, options, rollout, _memory_bytes(options, device))
            if device == "cuda" and _backend(options, device) == "gloo":
                refusal = "gloo sends no tensors of a GPU from one rank to another"
            if refusal is not None and "megatron_refit" in engines:
                engines.remove("megatron_refit")
                skipped.append({"engine": "megatron_refit", "rollout": rollout.text, "reason": refusal})
            job = _job(shape, options, rollout, device, str(folder), coded, tuple(engines))
            # Libraries that have looked at a GPU do not survive a fork.
            preload = () if device == "cuda" else PRELOAD
            yield run_ranks(options.world, _backend(options, device), preload, RUN, job)[0], skipped


def _job(
    shape: ModelShape,
    options: BenchmarkOptions,
    rollout: Layout,
    device: str,
    folder: str,
    coded: bool,
    engines: tuple[str, ...],
) -> Job:
    return Job(
        model=options.label,
        shape=shape,
        folder=folder,
        coded=coded,
        world=options.world,
        train=options.train.sizes,
        rollout=rollout.sizes,
        train_text=options.train.text,
        rollout_text=rollout.text,
        engines=engines,
        repeat=options.repeat,
        dtype=options.dtype,
        device=device,
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
