"""The data plane against padded slices by value: `python -m flowrl.single_controller.benchmark [key=value ...]`.

A batch with six token columns goes through three stages over some workers; a stage reads every element of its rows and
returns one column. Measured twice in one run: by reference (ragged columns stay where they were made), and by value
(the driver sends each worker its padded slice and concatenates what returns). Bytes are what Ray serialises at the
driver, counted outside the timed part.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import ray
import torch
from rich.console import Console
from rich.table import Table

from flowrl.command import run_command
from flowrl.protocol import DataProto, Ragged
from flowrl.single_controller.cluster import Cluster, usable_cpus
from flowrl.single_controller.dispatch import split_over
from flowrl.single_controller.group import WorkerGroup
from flowrl.single_controller.pool import ResourcePool
from flowrl.single_controller.ray_private import serialized_bytes
from flowrl.single_controller.worker import Worker, register

_STAGES = 3
_TARGET_SHARE = 0.01
_TARGET_SPEEDUP = 5.0


@dataclass(frozen=True)
class Options:
    """rows x tokens of the batch; min_fill: shortest row as a share of tokens; repeat: timed rounds; out: JSON file."""

    rows: int = 2048
    tokens: int = 1024
    min_fill: float = 1.0
    workers: int = 4
    repeat: int = 5
    seed: int = 0
    out: str = ""

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Options:
        """Errors: ValueError naming an unknown key or an unreadable value."""
        options = cls()
        for argument in argv:
            key, sign, text = argument.partition("=")
            if key not in asdict(options) or not sign:
                raise ValueError(f"{argument!r}: expected key=value with a key of {sorted(asdict(options))}")
            options = replace(options, **{key: type(asdict(options)[key])(text)})
        return options


@dataclass(frozen=True)
class Figures:
    """Seconds by stage (median of the rounds) and bytes at the driver of one round."""

    seconds: list[float]
    bytes_out: int
    bytes_in: int


class Stage(Worker):
    """One process's part of a stage, by reference."""

    @register(dispatch=split_over("world"))
    def make(self, batch: DataProto) -> DataProto:
        """Six columns, three of int64 and three of float32, of the row lengths in the column ``length``."""
        lengths = batch["length"]
        assert isinstance(lengths, torch.Tensor)
        ids = torch.arange(int(lengths.sum())) % 1000
        names = {f"ids{i}": ids + i for i in range(3)} | {f"floats{i}": (ids + i).float() for i in range(3)}
        columns = {name: Ragged.from_lengths(values, lengths) for name, values in names.items()}
        return DataProto(columns, row_ids=batch.row_ids)

    @register(dispatch=split_over("world"))
    def run(self, batch: DataProto, number: int) -> DataProto:
        columns = [cast(Ragged, column) for column in batch.read(*batch.names)]
        values = _stage([column.values for column in columns])
        return DataProto({f"stage{number}": Ragged(values, columns[0].offsets)}, row_ids=batch.row_ids)


class ValueStage:
    """The baseline's process: padded tensors in, one padded tensor out, as Ray carries them."""

    def run(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        return _stage(list(columns.values()))


def _stage(columns: list[torch.Tensor]) -> torch.Tensor:
    """Read every element of every column; the new column is the first one plus the largest mean of all."""
    largest = max(float(column.sum()) / max(1, column.numel()) for column in columns)
    return columns[0].float() + round(largest)


Round = tuple[list[float], int, int]
"""Seconds by stage, bytes out of and into the driver."""


def by_reference(group: Stage, batch: DataProto, workers: int) -> tuple[Round, DataProto]:
    """The batch's columns lie with the workers. Returns figures and the table after the last stage."""
    table, seconds, bytes_out, bytes_in = batch, [], 0, 0
    for number in range(_STAGES):
        start = time.perf_counter()
        result = group.run(table, number)
        after = table.union(result)
        seconds.append(time.perf_counter() - start)
        bytes_out += sum(serialized_bytes(part) for part in table.chunk(workers))
        bytes_in += sum(serialized_bytes(part) for part in result.chunk(workers))
        table = after
    return (seconds, bytes_out, bytes_in), table


def by_value(actors: list[Any], columns: dict[str, torch.Tensor]) -> tuple[Round, torch.Tensor]:
    """columns: name -> [rows, tokens]. Returns figures and the last stage's column."""
    table, seconds, bytes_out, bytes_in, whole = dict(columns), [], 0, 0, torch.empty(0)
    for number in range(_STAGES):
        start = time.perf_counter()
        # Cloned: a slice is a view, and pickling a view writes its whole storage.
        cuts = {name: [c.clone() for c in column.tensor_split(len(actors))] for name, column in table.items()}
        parts = [{name: cut[i] for name, cut in cuts.items()} for i in range(len(actors))]
        answers = ray.get([actor.run.remote(part) for actor, part in zip(actors, parts, strict=True)])
        whole = torch.cat(answers)
        seconds.append(time.perf_counter() - start)
        bytes_out += sum(serialized_bytes(part) for part in parts)
        bytes_in += sum(serialized_bytes(answer) for answer in answers)
        table[f"stage{number}"] = whole
    return (seconds, bytes_out, bytes_in), whole


def figures_of(rounds: list[Round]) -> Figures:
    """Medians of the rounds."""
    seconds = [statistics.median(times) for times in zip(*(r[0] for r in rounds), strict=True)]
    return Figures(seconds, rounds[-1][1], rounds[-1][2])


def measure_rounds(options: Options, lengths: torch.Tensor) -> tuple[Figures, Figures, bool, int]:
    """(by reference, by value, whether the results are equal, bytes of the padded batch)."""
    with Cluster(address="local", run_name="benchmark") as cluster:
        share = max(0.1, int(50 * cluster.num_cpus / options.workers) / 100)
        with ResourcePool(cluster, name="stages", devices=options.workers, cpus_per_device=share) as pool:
            group = WorkerGroup.spawn(pool, Stage)
            batch = group.make(DataProto({"length": lengths}))
            padded = {name: cast(Ragged, batch[name]).padded()[0] for name in batch.names}
            baseline: Any = ray.remote(ValueStage)
            actors = [baseline.options(num_cpus=0).remote() for _ in range(options.workers)]
            references, values = [], []
            # In turns, so that whatever else the machine does meets both; the first of each warms up.
            for _ in range(options.repeat + 1):
                reference, table = by_reference(group, batch, options.workers)
                value, whole = by_value(actors, padded)
                references.append(reference)
                values.append(value)
            equal = options.min_fill < 1 or torch.equal(cast(Ragged, table[f"stage{_STAGES - 1}"]).padded()[0], whole)
            for actor in actors:
                ray.kill(actor)
    num_bytes = sum(column.numel() * column.element_size() for column in padded.values())
    return figures_of(references[1:]), figures_of(values[1:]), equal, num_bytes


def measure(options: Options) -> dict[str, Any]:
    """All figures of one run, as they are written to JSON."""
    generator = torch.Generator().manual_seed(options.seed)
    shortest = max(1, int(options.tokens * options.min_fill))
    lengths = torch.randint(shortest, options.tokens + 1, (options.rows,), generator=generator)
    reference, value, equal, token_bytes = measure_rounds(options, lengths)
    return {
        "options": asdict(options),
        "batch_token_bytes": token_bytes,
        "by_reference": asdict(reference),
        "by_value": asdict(value),
        "driver_bytes_share_of_batch": (reference.bytes_out + reference.bytes_in) / token_bytes,
        "speedup": sum(value.seconds) / sum(reference.seconds),
        "results_equal": equal,
        **provenance(),
    }


def provenance() -> dict[str, Any]:
    """Commit, versions, hardware and date of a measurement."""
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return {
        "commit": git.stdout.strip() or "unknown",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("ray", "torch", "numpy")},
        },
        "hardware": {"cpu": cpu, "usable_cpus": usable_cpus()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def show(figures: dict[str, Any], console: Console) -> None:
    """The figures as a table."""
    options = figures["options"]
    table = Table(title=f"{options['rows']} rows x {options['tokens']} tokens, 6 columns, {options['workers']} workers")
    for heading in ("by", *(f"stage {i + 1} s" for i in range(_STAGES)), "all s", "out MB", "in MB"):
        table.add_column(heading, justify="left" if heading == "by" else "right")
    for name in ("by_reference", "by_value"):
        way = figures[name]
        cells = [*(f"{s:.4f}" for s in way["seconds"]), f"{sum(way['seconds']):.4f}"]
        table.add_row(name.removeprefix("by_"), *cells, f"{way['bytes_out'] / 1e6:.3f}", f"{way['bytes_in'] / 1e6:.3f}")
    console.print(table)
    share, speedup = figures["driver_bytes_share_of_batch"], figures["speedup"]
    console.print(
        f"driver bytes are {share:.3%} of the batch's {figures['batch_token_bytes'] / 1e6:.1f} MB "
        f"(target under {_TARGET_SHARE:.0%}); {speedup:.1f} times as fast (target {_TARGET_SPEEDUP:.0f}); "
        f"results {'equal' if figures['results_equal'] else 'DIFFER'}"
    )


def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 2 with one message for a wrong argument."""
    try:
        options = Options.parse(argv)
    except ValueError as error:
        sys.stderr.write(f"benchmark: {error}\n")
        return 2
    figures = measure(options)
    show(figures, Console())
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
