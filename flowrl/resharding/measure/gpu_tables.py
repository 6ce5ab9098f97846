"""Tables of what one device does beside weight moves: training, generation, whole steps. By kind, from their JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Column = tuple[str, Callable[[Mapping[str, Any]], str]]
"""Heading, and the cell of a row."""


def _number(key: str, form: str = "{:.0f}", scale: float = 1.0) -> Callable[[Mapping[str, Any]], str]:
    def cell(row: Mapping[str, Any]) -> str:
        value = row.get(key)
        return "-" if value is None else form.format(value * scale)

    return cell


def _text(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: str(row.get(key, "-"))


def _curve(row: Mapping[str, Any]) -> str:
    """Held-out rewards by step: early ones close together, later ones twice as far apart each time, and the last."""
    evaluations: Sequence[Sequence[float]] = row["evaluations"]
    shown = {len(evaluations) - 1, *(2**power for power in range((len(evaluations) - 1).bit_length()))}
    return ", ".join(f"{evaluations[n][0]:.0f}: {evaluations[n][1]:.3f}" for n in sorted(shown))


PERCENT = "{:.1f} %"
COLUMNS: dict[str, tuple[Column, ...]] = {
    "train": (
        ("rows", _text("case")),
        ("number", _number("rows")),
        ("tokens", _number("tokens")),
        ("forward + backward s", _number("forward_backward_seconds", "{:.3f}")),
        ("tokens/s", _number("forward_backward_tokens_per_second")),
        ("TFLOP/s", _number("forward_backward_tflops", "{:.2f}")),
        ("MFU", _number("forward_backward_mfu", PERCENT, 100)),
        ("optimizer s", _number("optimizer_seconds", "{:.3f}")),
        ("update tokens/s", _number("update_tokens_per_second")),
        ("update MFU", _number("update_mfu", PERCENT, 100)),
        ("log-probs tokens/s", _number("log_probs_tokens_per_second")),
        ("MFU", _number("log_probs_mfu", PERCENT, 100)),
        ("peak GiB", _number("peak_bytes", "{:.1f}", 1 / 2**30)),
        ("idle GiB", _number("idle_bytes", "{:.1f}", 1 / 2**30)),
    ),
    "parts": (
        ("part of a micro-batch", _text("part")),
        ("ms", _number("microbatch_seconds", "{:.2f}", 1e3)),
        ("TFLOP/s", _number("tflops", "{:.2f}")),
        ("refused", _text("refused")),
    ),
    "generate": (
        ("engine", _text("engine")),
        ("requests", _number("requests")),
        ("prompt", _number("prompt_tokens")),
        ("response", _number("response_tokens")),
        ("s", _number("seconds", "{:.3f}")),
        ("tokens/s", _number("tokens_per_second")),
        ("of vLLM's", _number("of_plain", "{:.3f}")),
    ),
    "steps": (
        ("run", _text("run")),
        ("rows", _number("rows")),
        ("response tokens", _number("response_tokens", "{:.1f}")),
        ("step s", _number("step_seconds", "{:.2f}")),
        ("generation s", _number("generation_seconds", "{:.2f}")),
        ("training s", _number("training_seconds", "{:.2f}")),
        ("neither", _number("other_share", PERCENT, 100)),
        ("tokens/s", _number("tokens_per_second")),
        ("seconds by phase", _text("phases")),
    ),
    "memory": (
        ("run", _text("run")),
        ("phase", _text("phase")),
        ("peak GB, measured", _number("measured_bytes", "{:.2f}", 1e-9)),
        ("predicted", _number("predicted_bytes", "{:.2f}", 1e-9)),
        ("predicted / measured", _number("ratio", "{:.2f}")),
    ),
    "install": (
        ("model", _text("model")),
        ("GB written", _number("installed_bytes_max", "{:.2f}", 1e-9)),
        ("whole move, ms", _number("seconds_median", "{:.2f}", 1e3)),
        ("of it copies", _number("copies_seconds", "{:.2f}", 1e3)),
        ("copies, GB/s read and written", _number("copies_gb_per_second")),
        ("a large copy, GB/s", _number("copy_gb_per_second")),
        ("share", _number("copies_share", PERCENT, 100)),
        ("share, whole move", _number("move_share", PERCENT, 100)),
        ("checksums, ms", _number("fingerprint_seconds", "{:.2f}", 1e3)),
        ("bit for bit", _text("bit_exact")),
    ),
    "learning": (
        ("model", _text("model")),
        ("steps", _number("steps")),
        ("minutes", _number("minutes", "{:.1f}")),
        ("held-out reward before", _number("reward_before", "{:.3f}")),
        ("after", _number("reward_after", "{:.3f}")),
        ("held-out reward after step", _curve),
        ("reward of the first steps", _number("first_steps_reward", "{:.3f}")),
        ("of the last", _number("last_steps_reward", "{:.3f}")),
    ),
}
"""By kind; files are called KIND-*.json. `parts` come with `train`, `memory` with `steps`."""
SECOND = {"train": "parts", "steps": "memory"}
"""Kind of the second table of a file, where it has one."""


def headings(kind: str) -> list[str]:
    """Of the table's columns."""
    return [heading for heading, _ in COLUMNS[kind]]


def cells(kind: str, content: Mapping[str, Any]) -> list[list[str]]:
    """The lines of a table, from a file's content."""
    rows: Sequence[Mapping[str, Any]] = content[kind if kind in SECOND.values() else "rows"]
    if kind == "install":
        rows = [_installed(row) for row in rows]
    if kind == "generate":
        plain = next(row["tokens_per_second"] for row in rows if row["engine"] == "vllm")
        rows = [{**row, "of_plain": row["tokens_per_second"] / plain} for row in rows]
    return [[cell(row) for _, cell in COLUMNS[kind]] for row in rows]


def _installed(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a move on one device, its rates as shares of that of a large copy."""
    copies = row["stage_seconds"]["local"]
    rate, most = 2 * row["installed_bytes_max"] / copies / 1e9, row["copy_gb_per_second"]
    if most is None:  # on a CPU
        return {**row, "copies_seconds": copies, "copies_gb_per_second": rate}
    shares = {"copies_share": rate / most, "move_share": row["install_gb_per_second"] / most}
    return {**row, "copies_seconds": copies, "copies_gb_per_second": rate, **shares}


def title(kind: str, content: Mapping[str, Any]) -> str:
    """Model and settings, and the ceiling that MFU is a share of."""
    if kind == "install":
        return f"**{content['rows'][0]['model']}**, one rank to one rank:"
    settings = ", ".join(f"{name} {value}" for name, value in content["settings"].items())
    rate = content.get("product_tflops")
    ceiling = "" if rate is None or kind != "train" else f"; a matrix product alone: {rate:.2f} TFLOP/s"
    return f"**{content['model']}** ({kind}), {settings}{ceiling}:"
