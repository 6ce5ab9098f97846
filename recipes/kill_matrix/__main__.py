"""Ends parts of runs at given moments and writes down what comes of it: `python -m recipes.kill_matrix [out=FOLDER] [cells=TEXT,...]`.

Each cell is a run of the built-in model of its own, in a temporary folder of its own. `cells` takes those whose name
(`place/phase/deed`) holds one of the texts; results of the others stay as they are in the folder. The folder gets
`data/kill-matrix.json` and `failures.md`. Exit code 1 where a cell broke the contract.
"""

from __future__ import annotations

import sys
from pathlib import Path

from recipes.kill_matrix.cells import cells
from recipes.kill_matrix.run import Result, run_cell
from recipes.kill_matrix.table import read, write

DEFAULT_OUT = Path("docs/benchmarks")


def main(words: list[str]) -> int:
    """Runs the cells one after the other; the exit code."""
    options = dict(word.split("=", 1) for word in words if "=" in word)
    unknown = [word for word in words if word.partition("=")[0] not in ("out", "cells")]
    wanted = options.get("cells", "").split(",")
    chosen = [cell for cell in cells() if any(text in cell.name for text in wanted)]
    if unknown or not chosen:
        names = "\n  ".join(cell.name for cell in cells())
        sys.stderr.write(f"unknown: {unknown}; cells=TEXT,... takes those that hold a text:\n  {names}\n")
        return 2
    out = Path(options.get("out", DEFAULT_OUT))
    results = {result.name: result for result in read(out)}
    broken = 0
    for cell in chosen:
        result = run_cell(cell)
        broken += not result.kept
        sys.stdout.write(f"{line(result)}\n")
        sys.stdout.flush()
        results[cell.name] = result
        write(out, [results[each.name] for each in cells() if each.name in results])
    return 1 if broken else 0


def line(result: Result) -> str:
    """For a person who watches."""
    verdict = "ok" if result.kept else "BROKEN"
    return f"{verdict:6} {result.seconds:6.1f} s  exit {result.exit_code:3d}  {result.name}: {result.last_line[:160]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
