"""Tables of several devices of one host: planned moves, rates of links, moves against those rates, steps by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.resharding.measure.gpu_tables import cells as step_cells
from flowrl.resharding.measure.gpu_tables import headings as step_headings

Table = tuple[str, Sequence[str], list[list[str]]]
"""Title, headings and lines."""
ON_THE_LINK = ("pp", "ep", "tp", "p2p", "node")
"""Stages of a move in which bytes travel."""
PLANNED = ("devices", "model", "layers", "trained", "generated", "GB to the busiest", "GB by pair", "predicted ms")
LINKS = ("collective", "MiB received", "ms", "GB/s")
MOVES = ("model", "trained", "generated", "GB to the busiest", "of bound", "ms", "GB/s", "of the link", "travelling ms",
         "of the link", "best baseline, times", "exact", "checksums")  # fmt: skip


def planned(content: Mapping[str, Any]) -> Table:
    """What the planner says of every move. `content`: rows, `memory_bytes` of a device and `link_gb_s`."""
    title = (
        f"**Predicted, not measured**: devices of {content['memory_bytes'] / 1e9:.0f} GB, links of "
        f"{content['link_gb_s']:g} GB/s per device and direction:"
    )
    return title, PLANNED, [_planned_cells(row) for row in content["rows"]]


def _planned_cells(row: Mapping[str, Any]) -> list[str]:
    pairs = row["pair_bytes"]
    sizes = sorted({f"{size / 1e9:.2f}" for size in pairs.values()})
    shown = "none" if not pairs else f"{len(pairs)} pairs: {' to '.join(dict.fromkeys((sizes[0], sizes[-1])))}"
    return [
        str(row["devices"]),
        row["model"],
        f"{row['layers']} of {row['layers_of_model']}",
        row["train"],
        row["rollout"],
        f"{row['received_bytes_max'] / 1e9:.2f}",
        shown,
        f"{row['seconds'] * 1e3:.1f}",
    ]


def link_rate(links: Sequence[Mapping[str, Any]]) -> float | None:
    """The highest rate of any collective and size, GB/s: what a move is a share of. None where nothing was measured."""
    return max((row["gb_per_second"] for row in links), default=None)


def links(content: Mapping[str, Any]) -> Table:
    """Rates of the slowest device by collective and size."""
    copy = content["copy_gb_per_second"]
    within = "" if copy is None else f"; a copy within one reads and writes {copy:.0f} GB/s"
    lines = [
        [row["kind"], f"{row['bytes'] / 2**20:.2f}", f"{row['seconds'] * 1e3:.3f}", f"{row['gb_per_second']:.2f}"]
        for row in content["links"]
    ]
    return f"**Links** between {content['devices']} devices{within}:", LINKS, lines


def moves(content: Mapping[str, Any]) -> Table:
    """flowrl's moves: of the bytes that must travel, what share of the highest link rate of the same run they reach."""
    rate = link_rate(content["links"])
    lines = [_move_cells(move, rate) for move in content["moves"]]
    limit = "no link rate was measured" if rate is None else f"the link is {rate:.2f} GB/s"
    return f"**Moves**; {limit}:", MOVES, lines


def _move_cells(move: Mapping[str, Any], rate: float | None) -> list[str]:
    rows = move["rows"]
    own = next(row for row in rows if row["engine"] == "flowrl")
    others = {row["engine"]: row["seconds_median"] / own["seconds_median"] for row in rows if row is not own}
    best = min(others, key=others.__getitem__, default=None)
    verdict = {True: "yes", False: "NO", None: "-"}
    ratio = own["ratio_to_bound"]
    travelling = sum(own["stage_seconds"].get(stage, 0.0) for stage in ON_THE_LINK)
    return [
        own["model"],
        own["train"],
        own["rollout"],
        f"{own['received_bytes_max'] / 1e9:.3f}",
        "no bound" if ratio is None else f"{ratio:.2f}",
        f"{own['seconds_median'] * 1e3:.2f}",
        f"{own['gb_per_second']:.2f}",
        share(own["bound_bytes_max"], own["seconds_median"], rate),
        f"{travelling * 1e3:.2f}",
        share(own["bound_bytes_max"], travelling, rate),
        "-" if best is None else f"{others[best]:.2f} ({best})",
        verdict[all(row["bit_exact"] for row in rows)],
        verdict[own["fingerprint_ok"]],
    ]


def share(size: int, seconds: float, rate: float | None) -> str:
    """Bytes over seconds as a share of a rate in GB/s; `nothing moves` where there are none."""
    if not size:
        return "nothing moves"
    return "-" if rate is None or not seconds else f"{size / seconds / 1e9 / rate:.0%}"


def steps(content: Mapping[str, Any]) -> Table:
    """Training runs, a line each; the run's name stands before its model."""
    lines = []
    for run in content["steps"]:
        [line] = step_cells("steps", run)
        lines.append([run["name"], run["model"], " ".join(run["settings"].values()), *line[1:]])
    return "**Steps** of GRPO:", ("run", "model", "layout", *step_headings("steps")[1:]), lines


def measured(content: Mapping[str, Any]) -> list[Table]:
    """Every table that has lines."""
    return [table for table in (links(content), moves(content), steps(content)) if table[2]]
