"""The table and the JSON file of the command."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from flowrl.config.machine import installed_version
from flowrl.config.model_shape import ModelShape
from flowrl.resharding.plan.figures import Row
from flowrl.resharding.plan.options import Options

COLUMNS = (
    "rollout", "received GB\nmean", "\nmax", "bound GB\nmax", "ratio", "mean GB by stage", "node\nimport", "extra MiB\nmax",
    "collec-\ntives", "floor\nms", "predicted\nms", "full gather\nGB", "plan s",
)  # fmt: skip


def table(shape: ModelShape, options: Options, rows: Sequence[Row]) -> Table:
    """One line per generation layout."""
    size = shape.num_parameters * options.element_bytes
    shown_size = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
    ranks = f"{options.world} ranks"
    if options.rollout_world is not None:
        ranks += f" and {options.rollout_world} others that generate"
    shown = Table(
        title=f"{options.model}, {shown_size}, trained {options.train.text} on {ranks}, {options.gpus_per_node} a node",
        caption=f"bytes received per rank; predicted: busiest rank of every stage, {options.link_gb_s:g} GB/s in a node, "
        f"{options.nic_gb_s:g} GB/s between nodes, no latency",
    )
    for heading in COLUMNS:
        left = heading in ("rollout", "mean GB by stage")
        shown.add_column(heading, justify="left" if left else "right", no_wrap=heading == "rollout")
    for row in rows:
        shown.add_row(*_cells(row))
    return shown


def _cells(row: Row) -> list[str]:
    stages = [f"{name} {figures['received_bytes_mean'] / 1e9:.2f}" for name, figures in row.stage_bytes.items()]
    return [
        row.rollout,
        _gb(row.received_bytes_mean),
        _gb(row.received_bytes_max),
        _gb(row.bound_bytes_max),
        f"{row.ratio_to_bound:.2f}",
        " + ".join(stages) or "none",
        f"{row.node_import_ratio:.2f}",
        f"{row.peak_extra_bytes_max / 2**20:.0f}",
        str(row.num_collectives),
        f"{row.floor_seconds * 1e3:.1f}",
        f"{row.predicted_seconds * 1e3:.1f}",
        _gb(row.full_gather_bytes_mean),
        f"{row.plan_seconds:.2f}",
    ]


def _gb(size: float) -> str:
    """Two decimals, more for what is smaller than 0.1 GB, and plain 0."""
    return "0" if size == 0 else f"{size / 1e9:.2f}" if size >= 1e8 else f"{size / 1e9:.3g}"


def order_lines(rows: Sequence[Row]) -> list[str]:
    """For models with experts: bytes under the orders of ranks that suit one part best, and what was chosen."""
    lines = []
    for row in rows:
        if row.order and row.order["chosen"]["expert_bytes_mean"] + row.order["dense"]["expert_bytes_mean"]:
            words = [f"{name} order {_parts(figures)}" for name, figures in row.order.items()]
            lines.append(f"{row.rollout}: mean GB outside experts + of experts: {', '.join(words)}")
    return lines


def _parts(figures: dict[str, Any]) -> str:
    return f"{_gb(figures['dense_bytes_mean'])} + {_gb(figures['expert_bytes_mean'])}"


def results(options: Options, rows: Sequence[Row]) -> dict[str, Any]:
    """The content of the JSON file."""
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "hardware": {
            "link_gb_s": options.link_gb_s,
            "nic_gb_s": options.nic_gb_s,
            "gpus_per_node": options.gpus_per_node,
            "planned_on": platform.machine(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: installed_version(name) for name in ("flowrl", "numpy")},
        },
        "commit": git.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rollout_world": options.rollout_world,
        "element_bytes": options.element_bytes,
        "bucket_bytes": options.bucket_bytes,
        "rows": [asdict(row) for row in rows],
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Error: `ValueError` naming the file that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"out={path} cannot be written: {error.strerror}") from None
