"""The words of `recipes.bench_multi_gpu` and the parts that they ask for."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.config.machine import Machine
from flowrl.config.model_shape import shape_of
from flowrl.resharding.shapes import SHAPES, LatentShape, planned_shape
from flowrl.resharding.words import output_path, parse_words, whole_number
from recipes.gpu_check import Part
from recipes.multi_gpu.cases import DENSE, EXPERTS, MOVES, Steps, move_words, steps, trained_layers
from recipes.multi_gpu.predict import predicted
from recipes.multi_gpu.steps import WORKLOAD

KEYS = {
    "out": "folder for results.json, plan.json, summary.json and a folder and log of every part",
    "device": "cuda or cpu (cuda where torch sees two GPUs)",
    "backend": "nccl, or gloo: with it ranks share the GPUs that there are, for correctness alone, and nothing is trained on cuda (nccl there)",
    "gpus": "2, 4 or 8 devices (as many as there are; 2 on a cpu)",
    "dense": "model whose weights move: a named shape (llama-7b)",
    "experts": "the same, a mixture of experts (qwen3-30b-a3b)",
    "trained": "model of the training runs: a named shape, or what model.path takes (that of dense)",
    "trained_experts": "the same, a mixture of experts (that of experts)",
    "layers": "the most that are kept of any model (as many as fit)",
    "repeat": "timed moves of every engine (5)",
    "limit": "seconds for everything; parts for which no time is left are not started (570)",
    "parts": "names of parts, or what names begin with (all): links,move,steps",
    **{key: f"of the training runs, as recipes.gpu_steps takes it ({key}=...)" for key in WORKLOAD},
    "predict": "write what is planned for 2, 4 and 8 GPUs to this file, and measure nothing",
}
LINK_SECONDS, MOVE_SECONDS, STEP_SECONDS = 60, 130, 245
"""Limits of parts."""
STOPPING_SECONDS = 65
"""Between the end that a training run is given and its part's: a run that is told to stop has 60 s for it."""
LEAST_SECONDS = {"links": 15, "move": 50, "steps": STOPPING_SECONDS + 110}
"""A part is not started with less."""


@dataclass(frozen=True)
class Wanted:
    """`models` and `trained` by family. `memory_bytes` is a rank's share of a device; `extra` goes to `main_ppo`.
    `shared`: ranks may share GPUs, and nothing is trained."""

    out: Path
    device: str
    backend: str
    devices: int
    models: Mapping[str, str]
    trained: Mapping[str, str]
    memory_bytes: int
    most_layers: int
    repeat: int
    limit_seconds: int
    parts: tuple[str, ...]
    workload: Mapping[str, str]
    extra: tuple[str, ...]
    shared: bool


def parse(arguments: Sequence[str], machine: Machine) -> Wanted:
    """The command line. Errors: `ValueError` with the numbers and what to do."""
    extra = tuple(word for word in arguments if "." in word.partition("=")[0])
    given = parse_words([word for word in arguments if word not in extra], KEYS, ("out",))
    device = given.get("device", "cuda" if machine.gpus >= min(MOVES) else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device} is not known; known: cpu, cuda")
    backend = given.get("backend", "nccl" if device == "cuda" else "gloo")
    if backend not in ("nccl", "gloo") or (backend == "nccl" and device == "cpu"):
        raise ValueError(f"backend={backend} with device={device} is not known; known: nccl (cuda), gloo")
    devices = _devices(given, device, backend, machine.gpus)
    models = {DENSE: given.get("dense", "llama-7b"), EXPERTS: given.get("experts", "qwen3-30b-a3b")}
    for name in models.values():
        if isinstance(planned_shape(name), LatentShape):
            raise ValueError(f"{name} cannot be built here; choose another named shape")
    for key in ("trained", "trained_experts"):
        _check_trained(key, given.get(key))
    out = output_path(given)
    assert out is not None
    return Wanted(
        out=out.absolute(),
        device=device,
        backend=backend,
        devices=devices,
        models=models,
        trained={
            DENSE: given.get("trained", models[DENSE]),
            EXPERTS: given.get("trained_experts", models[EXPERTS]),
        },
        memory_bytes=(
            machine.gpu_memory_bytes * min(machine.gpus, devices) if device == "cuda" else machine.memory_bytes
        )
        // devices,
        most_layers=whole_number(given, "layers", 1 << 20),
        repeat=whole_number(given, "repeat", 5),
        limit_seconds=whole_number(given, "limit", 570),
        parts=_parts(given),
        workload={key: str(whole_number(given, key, 1)) for key in WORKLOAD if key in given},
        extra=extra,
        shared=device == "cuda" and backend == "gloo",
    )


def _check_trained(key: str, model: str | None) -> None:
    """Error: `ValueError` for what is neither a named shape nor a model, which each run would find by itself."""
    if model is None:
        return
    if model in SHAPES:
        if isinstance(SHAPES[model], LatentShape):
            raise ValueError(f"{key}={model} cannot be built here; choose another named shape")
        return
    try:
        shape_of(model)
    except ValueError as error:
        raise ValueError(f"{key}={model} is no named shape ({', '.join(SHAPES)}), and as a model: {error}") from None


def _parts(given: Mapping[str, str]) -> tuple[str, ...]:
    """What names of parts may begin with. Error: `ValueError` for an empty one, which every name begins with."""
    parts = tuple(given["parts"].split(",")) if "parts" in given else None
    if parts is not None and not all(parts):
        raise ValueError(f"parts={given['parts']!r} has an empty name; leave parts out for all of them")
    return parts or ("",)


def _devices(given: Mapping[str, str], device: str, backend: str, gpus: int) -> int:
    """How many take part. Errors: `ValueError` where there are not as many and ranks may not share them."""
    there = gpus if device == "cuda" else min(MOVES)
    if device == "cuda" and not gpus:
        raise ValueError("device=cuda needs a GPU and there is none; rehearse with device=cpu")
    fitting = [number for number in MOVES if number <= there or backend == "gloo"]
    if not fitting:
        raise ValueError(
            f"device=cuda needs {min(MOVES)} GPUs and there are {there}; rehearse with device=cpu, or with backend=gloo, "
            f"over which ranks share a GPU"
        )
    usual = max([number for number in fitting if number <= there], default=min(MOVES))
    devices = whole_number(given, "gpus", usual)
    if devices not in MOVES or (device == "cuda" and devices not in fitting):
        raise ValueError(f"gpus={devices} must be one of {', '.join(map(str, MOVES))}, and there are {there}")
    return devices


def planned_parts(wanted: Wanted, scratch: Path, link_gb_s: float) -> tuple[dict[str, object], list[Part]]:
    """(what the planner says of the moves, the parts that are wanted in their order). Errors: `ValueError`.

    Moves of whole models without baselines come last, whatever time is left.
    """
    plan = predicted((wanted.devices,), wanted.models, wanted.memory_bytes, link_gb_s, wanted.most_layers)
    moves = [_move_part(wanted, row["name"], row["layers"]) for row in plan["rows"] if row["against"] == "all"]
    alone = [_move_part(wanted, row["name"], row["layers"]) for row in plan["rows"] if row["against"] != "all"]
    # A run is over NCCL and needs a GPU for each rank.
    runs = [] if wanted.shared else [_steps_part(wanted, run, scratch) for run in steps(wanted.devices)]
    every = [_links_part(wanted), *moves, *runs, *alone]
    chosen = [part for part in every if part.name.startswith(wanted.parts)]
    if not chosen:
        raise ValueError(f"parts={','.join(wanted.parts)}: there are {', '.join(part.name for part in every)}")
    return plan, chosen


def _part(module: str, words: Sequence[str], name: str, wanted: Wanted, seconds: float) -> Part:
    command = (sys.executable, "-m", module, *words, f"device={wanted.device}", f"out={wanted.out / name}")
    return Part(name, command, seconds, alone=True)


def _links_part(wanted: Wanted) -> Part:
    words = [f"world={wanted.devices}", f"backend={wanted.backend}"]
    return _part("recipes.multi_gpu.links", words, "links", wanted, LINK_SECONDS)


def _move_part(wanted: Wanted, name: str, layers: int) -> Part:
    move = next(move for move in MOVES[wanted.devices] if move.name == name)
    words = move_words(wanted.models[move.family], move, wanted.devices, layers)
    return _part(
        "flowrl.resharding.benchmark",
        [*words, f"repeat={wanted.repeat}", f"backend={wanted.backend}"],
        name,
        wanted,
        MOVE_SECONDS,
    )


def _steps_part(wanted: Wanted, run: Steps, scratch: Path) -> Part:
    model = wanted.trained[run.family]
    words = [f"scratch={scratch}", f"model={model}", f"limit={STEP_SECONDS - STOPPING_SECONDS}"]
    if model in SHAPES:
        layers = min(wanted.most_layers, trained_layers(SHAPES[model], run.cut, wanted.memory_bytes))
        words.append(f"layers={layers}")
    words += [f"{key}={value}" for key, value in wanted.workload.items()]
    return _part("recipes.multi_gpu.steps", [*words, *run.words, *wanted.extra], run.name, wanted, STEP_SECONDS)


def at_most(part: Part, seconds: float) -> Part | None:
    """The part with so many seconds at the most, a training run told of it; None where that is too little to start."""
    if seconds < LEAST_SECONDS[part.name.partition("_")[0]]:
        return None
    limit = min(part.limit_seconds, seconds)
    told = f"limit={int(limit - STOPPING_SECONDS)}"
    words = (told if word.startswith("limit=") else word for word in part.command)
    return replace(part, command=tuple(words), limit_seconds=limit)
