"""Tables of several devices of one host: planned moves, rates of links, moves against those rates, steps by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.resharding.measure.gpu_tables import cells as step_cells
from flowrl.resharding.measure.gpu_tables import headings as step_headings

Table = tuple[str, Sequence[str], list[list[str]]]
"""Title, headings and lines."""
ON_THE_LINK = ("pp", "ep", "tp", "p2p", "node")
"""Stages of a move in which bytes travel: packing, and waiting for what has not arrived while others were copied."""
COPYING = ("local", "install")
PLANNED = ("devices", "model", "layers", "trained", "generated", "GB to the busiest", "GB by pair", "predicted ms")
LINKS = ("collective", "MiB received", "ms", "GB/s")
MOVES = ("model", "trained", "generated", "GB to the busiest", "of bound", "ms", "GB/s", "of the link", "waiting ms",
         "copying ms", "best baseline, times", "exact", "checksums")  # fmt: skip


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
    own = _own(move)
    others = {row["engine"]: row["seconds_median"] / own["seconds_median"] for row in rows if row is not own}
    best = min(others, key=others.__getitem__, default=None)
    verdict = {True: "yes", False: "NO", None: "-"}
    ratio, still = own["ratio_to_bound"], not own["bound_bytes_max"]
    share = share_of_link(move, rate)
    return [
        own["model"],
        own["train"],
        own["rollout"],
        f"{own['received_bytes_max'] / 1e9:.3f}",
        "no bound" if ratio is None else f"{ratio:.2f}",
        f"{own['seconds_median'] * 1e3:.2f}",
        f"{own['gb_per_second']:.2f}",
        "nothing moves" if still else "-" if share is None else f"{share:.0%}",
        *(f"{_seconds(own, stages) * 1e3:.2f}" for stages in (ON_THE_LINK, COPYING)),
        "-" if best is None else f"{others[best]:.2f} ({best})",
        verdict[all(row["bit_exact"] for row in rows)],
        verdict[own["fingerprint_ok"]],
    ]


def _own(move: Mapping[str, Any]) -> Mapping[str, Any]:
    """flowrl's row of a move."""
    found: Mapping[str, Any] = next(row for row in move["rows"] if row["engine"] == "flowrl")
    return found


def _seconds(row: Mapping[str, Any], stages: Sequence[str]) -> float:
    """Of the calling stream in these stages. Bytes travel beside it, so that both sums together are the move."""
    seconds: float = sum(row["stage_seconds"].get(stage, 0.0) for stage in stages)
    return seconds


def share_of_link(move: Mapping[str, Any], rate: float | None) -> float | None:
    """Rate of the bytes that must travel to the busiest device, over the whole move, as a share of a link's `rate`, GB/s.
    None where nothing has to, or where no link was measured."""
    own = _own(move)
    size, seconds = own["bound_bytes_max"], own["seconds_median"]
    return size / seconds / 1e9 / rate if size and seconds and rate else None


def steps(content: Mapping[str, Any]) -> Table:
    """Training runs, a line each; the run's name stands before its model."""
    lines = []
    for run in content["steps"]:
        [line] = step_cells("steps", run)
        lines.append([run["name"], run["model"], _layout(run["settings"]), *line[1:]])
    return "**Steps** of GRPO:", ("run", "model", "layout", *step_headings("steps")[1:]), lines


def memories(content: Mapping[str, Any]) -> Table:
    """Peaks of the training runs by phase, and what `dry_run` says."""
    lines = [[run["name"], *line[1:]] for run in content["steps"] for line in step_cells("memory", run)]
    return "**Memory** of these runs, of the device that holds most:", step_headings("memory"), lines


def _layout(settings: Mapping[str, str]) -> str:
    """What a run was told, in short: sizes of 1 are left out."""
    names = {"actor.layout.": "train ", "rollout.layout.": "rollout ", "cluster.": "", "placement": "placement"}
    found = []
    for key, value in settings.items():
        prefix = next((prefix for prefix in names if key.startswith(prefix)), None)
        if prefix is None or ("layout" in key and value == "1"):
            continue
        found.append(f"{names[prefix]}{key.removeprefix(prefix)}={value}")
    return ", ".join(found)


def measured(content: Mapping[str, Any]) -> list[Table]:
    """Every table that has lines."""
    return [table for table in (links(content), moves(content), steps(content), memories(content)) if table[2]]
