"""The tables of the pages in `docs/benchmarks`: `python -m flowrl.resharding.measure.page` writes them from their data.

A table stands between `<!-- NAME -->` and `<!-- end -->`. NAME is a file of `docs/benchmarks/data` that the planning
command wrote (`predicted-*.json`) or the benchmark of moves, or the first part of such names, for all files that have it:
`measured` (moves on a CPU host), `multi-gpu` (several devices of one host), and the kinds of `gpu_tables`. What
`recipes.bench_multi_gpu` plans is in files called `planned-*.json`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.resharding.measure import gpu_tables, multi_gpu_tables
from flowrl.resharding.measure.report import cells

DOCUMENT = Path("docs/benchmarks/resharding.md")
DOCUMENTS = (DOCUMENT, Path("docs/benchmarks/gpu.md"), Path("docs/benchmarks/multi_gpu.md"))
_PLACE = re.compile(r"(<!-- ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

PREDICTED = ("rollout", "received GB, mean", "max", "of bound", "mean GB by stage", "node import", "floor ms",
             "predicted ms", "full gather GB")  # fmt: skip
MEASURED = ("rollout", "engine", "received MB", "of bound", "extra MiB", "collectives", "median s", "p95 s", "spread s",
            "times flowrl's", "exact", "checksums")  # fmt: skip
_CELLS = (0, 1, 2, 5, 6, 8, 11, 12, 13)
"""Those of `report.cells` that stand before `times flowrl's`."""


def render(page: str, data: Path) -> str:
    """The page with every table made anew. Errors: `ValueError` naming a file that is not in the folder `data`."""
    return _PLACE.sub(lambda place: f"{place[1]}\n{_table(place[2], data)}\n\n{place[3]}", page)


def _table(name: str, data: Path) -> str:
    if name in ("measured", "multi-gpu") or name in gpu_tables.COLUMNS:
        shown = {"measured": measured, "multi-gpu": on_several_gpus}.get(name, partial(on_a_gpu, name))
        made = (_shown(file, shown) for file in sorted(data.glob(f"{name}-*.json")))
        return "\n\n".join(made) or "(No results are stored yet.)"
    if not (data / name).is_file():
        raise ValueError(f"there is no {data / name}; write it with python -m flowrl.resharding.plan ... out=FILE")
    if name.startswith("planned-"):
        return _shown(data / name, lambda content: _lines(*multi_gpu_tables.planned(content)))
    return _shown(data / name, predicted if name.startswith("predicted-") else measured)


def _shown(file: Path, show: Callable[[Mapping[str, Any]], str]) -> str:
    """Error: `ValueError` naming a file that is not what its command writes."""
    try:
        return show(json.loads(file.read_text()))
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, ZeroDivisionError) as error:
        raise ValueError(f"{file} is not what its command writes: {type(error).__name__}: {error}") from error


def predicted(content: Mapping[str, Any]) -> str:
    """What the planning command wrote, as a title and a table of one line per generation layout."""
    rows, speeds = content["rows"], content["hardware"]
    others = content["rollout_world"]
    where = (
        f"{rows[0]['world']} GPUs" if others is None else f"{rows[0]['world'] - others} GPUs, {others} others generate"
    )
    title = (
        f"**{rows[0]['model']}**, trained {rows[0]['train']} on {where}; {speeds['gpus_per_node']} GPUs a node, "
        f"{speeds['link_gb_s']:g} GB/s per GPU inside, {speeds['nic_gb_s']:g} GB/s per GPU between nodes:"
    )
    return _lines(title, PREDICTED, [_predicted_cells(row) for row in rows])


def _predicted_cells(row: Mapping[str, Any]) -> list[str]:
    stages = [f"{name} {figures['received_bytes_mean'] / 1e9:.2f}" for name, figures in row["stage_bytes"].items()]
    return [
        row["rollout"],
        f"{row['received_bytes_mean'] / 1e9:.2f}",
        f"{row['received_bytes_max'] / 1e9:.2f}",
        f"{row['ratio_to_bound']:.2f}",
        " + ".join(stages) or "none",
        f"{row['node_import_ratio']:.2f}",
        f"{row['floor_seconds'] * 1e3:.0f}",
        f"{row['predicted_seconds'] * 1e3:.0f}",
        f"{row['full_gather_bytes_mean'] / 1e9:.2f}",
    ]


def measured(content: Mapping[str, Any]) -> str:
    """What the benchmark wrote, as a title, a table of one line per layout and engine, and where it was measured."""
    rows = content["rows"]
    own = {row["rollout"]: row["seconds_median"] for row in rows if row["engine"] == "flowrl"}
    lines = []
    for row, rounds in zip(rows, content["rounds"], strict=True):
        every = cells(row, rounds["seconds"])
        times = f"{row['seconds_median'] / own[row['rollout']]:.2f}"
        lines.append([*(every[place] for place in _CELLS), times, *every[15:]])
    title = f"**{rows[0]['model']}**, trained {rows[0]['train']} on {rows[0]['world']} ranks:"
    notes = [f"Not run: {part['engine']} to {part['rollout']}: {part['reason']}." for part in content["skipped"]]
    means = _geometric_means(rows, own)
    if len(own) > 1 and means:
        shown = ", ".join(f"{engine} {mean:.2f}" for engine, mean in means.items())
        notes.insert(0, f"Geometric means of times flowrl's over these layouts: {shown}.")
    return "\n\n".join([_lines(title, MEASURED, lines), *notes, _origin(content)])


def on_a_gpu(kind: str, content: Mapping[str, Any]) -> str:
    """What the other benchmarks wrote, as a title, a table or two and where it was measured."""
    kinds = (kind, *(found for found in (gpu_tables.SECOND.get(kind),) if found is not None and found in content))
    tables = [_lines(gpu_tables.title(k, content), gpu_tables.headings(k), gpu_tables.cells(k, content)) for k in kinds]
    return "\n\n".join([*tables, _origin(content)])


def on_several_gpus(content: Mapping[str, Any]) -> str:
    """What `recipes.bench_multi_gpu` wrote: links, moves and steps, what was not run, and where it was measured."""
    notes = [
        f"Not run: {part['engine']} in {move['name']}: {part['reason']}."
        for move in content["moves"]
        for part in move["skipped"]
    ]
    return "\n\n".join([*(_lines(*table) for table in multi_gpu_tables.measured(content)), *notes, _origin(content)])


def _origin(content: Mapping[str, Any]) -> str:
    told = [*content["hardware"].items(), *content["versions"].items()]
    where = ", ".join(f"{name} {value}" for name, value in told)
    return f"Measured on {where}; commit {content['commit'][:12]}, {content['date']}."


def _geometric_means(rows: Sequence[Mapping[str, Any]], own: Mapping[str, float]) -> dict[str, float]:
    """Of every baseline's seconds over flowrl's, by engine, where it ran on all layouts."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        if row["engine"] != "flowrl":
            ratios.setdefault(row["engine"], []).append(row["seconds_median"] / own[row["rollout"]])
    return {name: math.prod(found) ** (1 / len(found)) for name, found in ratios.items() if len(found) == len(own)}


def _lines(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = [columns, ["---"] * len(columns), *rows]
    return "\n".join([title, "", *("| " + " | ".join(line) + " |" for line in table)])


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0; 2 for bad input. Nothing is written then."""
    if arguments:
        asked = all(argument in ("-h", "--help") for argument in arguments)
        (sys.stdout if asked else sys.stderr).write(__doc__ if asked else f"error: no words are known here\n{__doc__}")
        return 0 if asked else 2
    try:
        made = {document: render(document.read_text(), document.parent / "data") for document in DOCUMENTS}
        for document, text in made.items():
            document.write_text(text)
    except OSError as error:
        sys.stderr.write(f"error: {error}; run it in the root of the repository\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
