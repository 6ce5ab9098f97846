"""Rates of the links between devices, as a part: `python -m recipes.multi_gpu.links out=FOLDER world=2 device=cuda backend=nccl`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.command import run_command
from flowrl.resharding.measure.links import RUN, LinkJob
from flowrl.resharding.measure.processes import RankFailed, run_ranks
from flowrl.resharding.measure.report import origin
from flowrl.resharding.words import parse_words, rank_number
from flowrl.workers.environment import process_environment

KEYS = ("out", "world", "device", "backend")
SIZES = {
    "cuda": tuple(1 << power for power in (20, 24, 26, 28, 30)),
    "cpu": tuple(1 << power for power in (16, 20, 24)),
}
"""Bytes that a rank receives in one collective. On a GPU more than 2^28 of a bucket's 640 MiB travel in each direction."""
THROUGH_HOST = 1 << 26
"""The most where ranks share a GPU: over gloo 2^30 take seconds."""
REPEAT = {"cuda": 10, "cpu": 5}


def measure(world: int, device: str, backend: str) -> dict[str, Any]:
    """The content of results.json. Error: `RankFailed`."""
    os.environ.update(process_environment(device, world))
    sizes = [size for size in SIZES[device] if backend == "nccl" or size <= THROUGH_HOST]
    job = LinkJob(device, tuple(sizes), REPEAT[device])
    return {**origin(device), **run_ranks(world, backend, (), RUN, job)[0]}


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0; 1 where a rank failed; 2 for bad input."""
    try:
        given = parse_words(arguments, KEYS, KEYS)
        out, world = Path(given["out"]), rank_number(given, "world")
        out.mkdir(parents=True, exist_ok=True)
        content = measure(world, given["device"], given["backend"])
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n{__doc__}\n")
        return 2
    except RankFailed as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    (out / "results.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    best = max(content["links"], key=lambda row: row["gb_per_second"])
    sys.stdout.write(f"at most {best['gb_per_second']:.1f} GB/s ({best['kind']}, {best['bytes']} bytes)\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
