"""Several GPUs of one host, in one command: `python -m recipes.bench_multi_gpu out=FOLDER [gpus=2] [key=value ...]`.

Rates of the links first, then moves of weights against all baselines, then steps of GRPO with generation on the trainer's
devices and on its own. Every part is a process with a time limit of its own. A key with a dot goes to `main_ppo` as it is.
What can be said is in `KEYS` of `recipes.multi_gpu.words`; `--help` shows it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flowrl.config.machine import find_machine
from flowrl.resharding.measure import multi_gpu_tables as tables
from flowrl.resharding.measure.report import origin
from flowrl.resharding.words import make_folder, parse_words
from recipes.gpu_check import Outcome, Part, end_parts_on_signals, finish, run
from recipes.multi_gpu.cases import DENSE, EXPERTS, MOVES
from recipes.multi_gpu.predict import LINK_GB_S, MEMORY_BYTES, predicted
from recipes.multi_gpu.words import KEYS, Wanted, at_most, parse, planned_parts

WIDTH = 190


def run_parts(parts: Sequence[Part], wanted: Wanted) -> list[Outcome]:
    """One after another, as long as there is time."""
    end = time.monotonic() + wanted.limit_seconds
    outcomes = []
    for part in parts:
        left = end - time.monotonic()
        started = at_most(part, left)
        if started is None:
            late = f"not started: {left:.0f} s were left of limit={wanted.limit_seconds}; run it with parts={part.name}"
            outcomes.append(Outcome(part.name, None, 0.0, late))
        else:
            outcomes.append(run(started, wanted.out))
    return outcomes


def results(wanted: Wanted) -> dict[str, Any]:
    """The content of results.json: of all parts that have ended well in this folder, this command's or an earlier one's of
    the same commit. Rates are null where they were not measured."""
    here = origin(wanted.device)
    every = {file.parent.name: _read(file) for file in sorted(wanted.out.glob("*/results.json"))}
    found = {name: part for name, part in every.items() if part.get("commit") == here["commit"]}
    links: Mapping[str, Any] = found.get("links", {"links": [], "copy_gb_per_second": None})
    rate = tables.link_rate(links["links"])
    moves = []
    for name, part in found.items():
        if name.startswith("move_"):
            move = {"name": name, "rows": part["rows"], "skipped": part["skipped"]}
            moves.append({**move, "of_link": tables.share_of_link(move, rate)})
    kept = ("model", "settings", "rows", "memory")
    runs = [
        {"name": name, **{key: part[key] for key in kept}}
        for name, part in found.items() if name.startswith("steps_")
    ]  # fmt: skip
    return {
        **here,
        "backend": wanted.backend,
        "devices": wanted.devices,
        "links": links["links"],
        "copy_gb_per_second": links["copy_gb_per_second"],
        "link_gb_per_second": rate,
        "moves": moves,
        "steps": runs,
    }


def _read(file: Path) -> dict[str, Any]:
    """What this command or a part wrote; nothing where it is not such a file."""
    try:
        content = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _links(wanted: Wanted) -> dict[str, object]:
    return {
        "device": wanted.device,
        "backend": wanted.backend,
        "devices": wanted.devices,
        "models": {**wanted.models},
        "trained": {**wanted.trained},
        "layers": wanted.most_layers,
        "workload": {**wanted.workload},
    }


def _check_folder(wanted: Wanted) -> None:
    """Errors: `ValueError` where the folder holds figures of other links, whose rates would be mixed, or of other models."""
    now, parts = _links(wanted), [file.parent.name for file in sorted(wanted.out.glob("*/results.json"))]
    before = _read(wanted.out / "plan.json")
    other = [key for key in now if before.get(key) != now[key]]
    if parts and other:
        told = "; ".join(f"{key} {before.get(key)}, and this is {now[key]}" for key in other)
        raise ValueError(f"out={str(wanted.out)!r} holds parts ({', '.join(parts[:4])}) of {told}; give another folder")


def _show(console: Console, table: tables.Table) -> None:
    title, headings, lines = table
    shown = Table(*headings, title=title.replace("**", ""))
    for line in lines:
        shown.add_row(*line)
    console.print(shown)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def predict(arguments: Sequence[str]) -> None:
    """Write what is planned for every number of devices. Errors: `ValueError`, `OSError`."""
    given = parse_words(arguments, ("predict",), ("predict",))
    models = {DENSE: "llama-7b", EXPERTS: "qwen3-30b-a3b"}
    _write(Path(given["predict"]), predicted(tuple(MOVES), models, MEMORY_BYTES, LINK_GB_S))


def measure(wanted: Wanted) -> int:
    """The exit code: 0 where all parts ended well, else 1. Errors: `ValueError`, `OSError` before anything runs."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    make_folder(wanted.out)
    _check_folder(wanted)
    end_parts_on_signals()
    with tempfile.TemporaryDirectory() as scratch:
        plan, parts = planned_parts(wanted, Path(scratch), LINK_GB_S)
        _write(wanted.out / "plan.json", {**plan, **_links(wanted)})
        _show(console, tables.planned(plan))
        outcomes = run_parts(parts, wanted)
    content = results(wanted)
    _write(wanted.out / "results.json", content)
    for table in tables.measured(content):
        _show(console, table)
    return finish("Several GPUs", outcomes, wanted.out)


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0; 1 where a part failed or was not started; 2 for bad input."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(f"{__doc__}\n" + "".join(f"{key:<16}{text}\n" for key, text in KEYS.items()))
        return 0
    try:
        if any(argument.startswith("predict=") for argument in arguments):
            predict(arguments)
            return 0
        return measure(parse(arguments, find_machine()))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
