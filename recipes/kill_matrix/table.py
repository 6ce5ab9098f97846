"""The matrix as data and as a document."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from recipes.kill_matrix.run import Result

DATA, DOCUMENT = Path("data") / "kill-matrix.json", "failures.md"
HEAD = """# How runs end: the kill matrix

    python -m recipes.kill_matrix out=docs/benchmarks

ends a part of a run at a given moment, for every place and phase, and writes this page and `data/kill-matrix.json`. Every
cell is a run of its own of the built-in model: two processes, GRPO, harmed in step 2 from inside the method that makes up
the phase. *Seconds* run from the deed to the end of the driver's process; for a hang they include the limit, 60 s for a call
and 30 s for a collective. *Clean* is the time from there until no process, Ray session, shared memory, temporary file,
socket or lock of the run was left, *left* what was there a minute later. The contract: one error that names its cause, exit
code 1, within 15 s, a lost node within 30 s; a reward process that is idle is replaced and the run goes on; a driver that is
killed says nothing, and what it started goes too. What the last line has to name is checked. `docs/failures.md` says what a
user sees.

Cells that are not in the table have not been measured; those that are may come from several runs of the script, the date and
commit are the last one's.
"""


def read(out: Path) -> list[Result]:
    """Results of before; none where there are none."""
    path = out / DATA
    if not path.exists():
        return []
    return [Result(**{**row, "leftovers": tuple(row["leftovers"])}) for row in json.loads(path.read_text())["cells"]]


def write(out: Path, results: Sequence[Result]) -> None:
    """Both files."""
    facts = {
        "hardware": f"{_processor()}, {os.cpu_count()} CPUs",
        "versions": {name: version(name) for name in ("ray", "torch", "megatron-core")},
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    (out / DATA).parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) for result in results]
    (out / DATA).write_text(json.dumps({**facts, "cells": rows}, indent=1) + "\n")
    (out / DOCUMENT).write_text(document(facts, results))


def document(facts: dict[str, object], results: Sequence[Result]) -> str:
    """The page."""
    lines = [HEAD, f"Measured on {facts['hardware']}, {facts['date']}, commit {facts['commit']}.", ""]
    lines += ["| place | phase | deed | seconds | clean | exit | left | contract | last line |", "|" + "---|" * 9]
    for r in results:
        left, kept = ", ".join(r.leftovers) or "nothing", "kept" if r.kept else "**broken**"
        lines.append(
            f"| {r.place} | {r.phase} | {r.deed} | {r.seconds:g} | {r.clean_seconds:g} | {r.exit_code} | {left} | {kept} "
            f"| {shown(r.last_line)} |"
        )
    return "\n".join(lines) + "\n"


def shown(line: str) -> str:
    """The last line without what is of this machine alone, and not too long."""
    line = re.sub(r"node \d+\.\d+\.\d+\.\d+", "node N", re.sub(r"pid \d+", "pid P", line))
    line = re.sub(r"/\S*/(?=(flowrl|recipes|megatron|vllm|torch|ray)/)", "", line).replace("|", "\\|")
    return line if len(line) <= 420 else f"{line[:420]}..."


def _processor() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else "unknown processor"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
