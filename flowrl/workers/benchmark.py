"""`python -m flowrl.workers.benchmark train|generate`: what training and generation do on one device, in tokens per second."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowrl.command import run_command
from flowrl.config.machine import find_machine
from flowrl.config.model_shape import ModelShape
from flowrl.config.resolve import BYTES
from flowrl.resharding.measure.gpu_tables import SECOND, cells, headings
from flowrl.resharding.measure.processes import RankFailed, run_ranks
from flowrl.resharding.measure.report import origin
from flowrl.resharding.shapes import SHAPES, LatentShape, planned_shape
from flowrl.resharding.words import make_folder, output_path, parse_words, whole_number
from flowrl.workers.environment import process_environment

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
WIDTH = 190
MOST_TOKENS = 1 << 24
COMMON = {
    "model": "a named shape (random weights are written for it) or a Hugging Face folder",
    "repeat": "timed repetitions (train: 10, generate: 3)",
    "dtype": "bfloat16 or float32 (bfloat16 on cuda, float32 on cpu)",
    "device": "cpu or cuda (cuda where torch sees a GPU)",
    "seed": "of weights, rows and prompts (1)",
    "out": "folder for results.json (nothing is written without it)",
}
KEYS: dict[str, dict[str, str]] = {
    "train": COMMON
    | {
        "tokens": "of a row (2048)",
        "rows": "of a micro-batch (4)",
        "microbatches": "of an update (4)",
        "recompute": "true: activations are computed again in the backward pass (false)",
    },
    "generate": COMMON
    | {
        "requests": "at once (256)",
        "prompt": "tokens of a prompt (128)",
        "tokens": "of a response (512)",
        "graphs": "false: no CUDA graphs (true)",
        "memory": "percent of the GPU that each of two engines may use (40)",
    },
}
USAGE = "python -m flowrl.workers.benchmark train|generate model=NAME [key=value ...]\n" + "".join(
    f"\n{command}:\n" + "".join(f"  {key:<14}{text}\n" for key, text in keys.items()) for command, keys in KEYS.items()
)


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0; 1 where a process failed; 2 for bad input, with one message on stderr."""
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(f"{USAGE}\nNamed shapes: {', '.join(SHAPES)}\n")
        return 0 if arguments else EXIT_BAD_INPUT
    try:
        command, given, shape, device = _parse(arguments)
        out = output_path(given)
        if out is not None:
            make_folder(out)
        with tempfile.TemporaryDirectory() as scratch:
            content = measure(command, given, shape, device, Path(scratch))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    except (RankFailed, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    if out is not None:
        (out / "results.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for kind in (command, *(found for found in (SECOND.get(command),) if found in content)):
        table = Table(*headings(kind), title=f"{content['model']}, {content['settings']['dtype']}: {kind}")
        for line in cells(kind, content):
            table.add_row(*line)
        console.print(table)
    return 0


def _parse(arguments: Sequence[str]) -> tuple[str, dict[str, str], ModelShape, str]:
    command = arguments[0]
    if command not in KEYS:
        raise ValueError(f"{command!r} is not one of {', '.join(KEYS)}; --help explains every key")
    given = parse_words(arguments[1:], KEYS[command], ("model",))
    gpus = find_machine().gpus
    device = given.get("device", "cuda" if gpus else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not gpus):
        raise ValueError(f"device={device} is not known or not there; GPUs here: {gpus}")
    for key, legal in (
        ("dtype", ("float32", "bfloat16")),
        ("recompute", ("true", "false")),
        ("graphs", ("true", "false")),
    ):
        if given.get(key, legal[0]) not in legal:
            raise ValueError(f"{key}={given[key]} must be one of {', '.join(legal)}")
    shape = planned_shape(given["model"])
    if isinstance(shape, LatentShape):
        raise ValueError(f"model={given['model']} ({shape.architecture}) cannot be built here")
    return command, given, shape, device


def parse_settings(command: str, given: Mapping[str, str], shape: ModelShape, device: str) -> dict[str, Any]:
    """Fields of the command's job. Errors: `ValueError` for what is no whole number or exceeds the model's positions."""
    settings: dict[str, Any] = {
        "dtype": given.get("dtype", "bfloat16" if device == "cuda" else "float32"),
        "device": device,
        "repeat": whole_number(given, "repeat", 10 if command == "train" else 3),
        "seed": whole_number(given, "seed", 1),
    }
    if command == "train":
        settings |= {
            "tokens": whole_number(given, "tokens", 2048),
            "rows": whole_number(given, "rows", 4),
            "microbatches": whole_number(given, "microbatches", 4),
            "recompute": given.get("recompute") == "true",
        }
    else:
        settings |= {
            "requests": whole_number(given, "requests", 256),
            "prompt": whole_number(given, "prompt", 128),
            "tokens": whole_number(given, "tokens", 512),
            "cuda_graphs": given.get("graphs") != "false",
            "memory_fraction": whole_number(given, "memory", 40, most=48) / 100,
        }
    _check_memory(command, given["model"], shape, settings)
    at_once = settings["tokens"] * settings.get("rows", 1) * settings.get("microbatches", 1)
    if at_once > MOST_TOKENS:
        raise ValueError(
            f"rows x tokens x microbatches = {at_once} tokens in an update; at most {MOST_TOKENS} are measured"
        )
    longest = settings.get("prompt", 0) + settings["tokens"]
    if not 2 <= longest <= shape.max_positions:
        raise ValueError(f"a row of {longest} tokens: model={given['model']} has 2 to {shape.max_positions} positions")
    return settings


def _check_memory(command: str, model: str, shape: ModelShape, settings: Mapping[str, Any]) -> None:
    """Error: `ValueError` with the numbers where weights and states alone exceed what there is."""
    machine, size = find_machine(), BYTES[settings["dtype"]]
    there = machine.gpu_memory_bytes if settings["device"] == "cuda" else machine.memory_bytes
    # Gradients and two moments are float32, and so are exact weights where the others are not; two engines generate by turns.
    each = size + 4 + (8 if size == 4 else 12) if command == "train" else 2 * size
    needed = each * shape.num_parameters
    if needed > there:
        raise ValueError(
            f"model={model}: {shape.num_parameters / 1e9:.2f}e9 parameters x {each} bytes = {needed / 1e9:.1f} GB before any "
            f"activation, and there are {there / 1e9:.1f} GB; take a smaller model"
        )


def measure(command: str, given: Mapping[str, str], shape: ModelShape, device: str, scratch: Path) -> dict[str, Any]:
    """The content of results.json. Errors: `ValueError`, `RankFailed`, `EngineFailed`."""
    settings = parse_settings(command, given, shape, device)
    os.environ.update(process_environment(device, 1))
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    folder = given["model"]
    if folder in SHAPES:
        folder = str(scratch / folder)
        # In a process of its own: this one never touches the GPU.
        run_ranks(1, "gloo", (), "flowrl.workers.benchmark:write_folder", folder, shape, settings)
    if command == "train":
        backend = "nccl" if device == "cuda" else "gloo"
        found = run_ranks(1, backend, (), "flowrl.workers.benchmark:train", folder, shape, settings)[0]
    else:
        found = {"rows": generate(folder, shape, settings)}
    return {**origin(device), "model": Path(given["model"]).name, "settings": settings, **found}


def write_folder(folder: str, shape: ModelShape, settings: Mapping[str, Any]) -> None:
    """In a process: write random weights."""
    import torch

    from flowrl.workers.random_model import write_random_model

    device = torch.device(settings["device"])
    write_random_model(Path(folder), shape, dtype=settings["dtype"], seed=settings["seed"], device=device)


def train(folder: str, shape: ModelShape, settings: Mapping[str, Any]) -> dict[str, Any]:
    """In a process: measure training."""
    from flowrl.workers import cuda_on_cpu

    cuda_on_cpu.install()
    from flowrl.workers.measured_training import TrainingJob, run

    return run(TrainingJob(folder, shape, **settings))


def generate(folder: str, shape: ModelShape, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure generation, over processes of its own."""
    from flowrl.workers.measured_generation import GenerationJob, run

    return run(GenerationJob(folder, shape, **settings))


if __name__ == "__main__":
    sys.exit(run_command(main))
