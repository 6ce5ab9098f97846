"""What a person sees of a run: one live table on a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/mean", "{:.3f}"),
    ("held-out", "eval/reward/mean", "{:.3f}"),
    ("KL", "kl/reference", "{:.4f}"),
    ("length", "response_tokens/mean", "{:.1f}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("grad norm", "policy/grad_norm", "{:.3f}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("seconds", "seconds/total", "{:.2f}"),
)
ROWS_SHOWN = 12


def seconds_phrase(metrics: Mapping[str, float]) -> str:
    """The phases of a step by share, longest first: `generate 0.61, update_actor 0.40, ...`."""
    parts = {name.removeprefix("seconds/"): value for name, value in metrics.items() if name.startswith("seconds/")}
    total = parts.pop("total", 0.0)
    longest = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {value:.2f}" for name, value in longest if value >= 0.005 * max(total, 1e-9))


def reshard_phrase(metrics: Mapping[str, float]) -> str:
    """The weight transfer of a step in one phrase, or an empty string where there was none."""
    if "reshard/received_bytes_max" not in metrics:
        return ""
    received, bound = metrics["reshard/received_bytes_max"], metrics["reshard/bound_bytes_max"]
    proof = {1.0: ", fingerprint ok"}.get(metrics.get("reshard/fingerprint_ok", -1.0), "")
    seconds = metrics["reshard/move_seconds"]
    return f"reshard: received {received / 1e6:.2f} MB (bound {bound / 1e6:.2f} MB) in {seconds:.3f} s{proof}"


class StepConsole:
    """Progress of a run. `message` prints a line; `step` shows one step; `close` leaves the final table standing."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=False, highlight=False, soft_wrap=True)
        self._rows: deque[tuple[str, ...]] = deque(maxlen=ROWS_SHOWN)
        self._foot: list[Text] = []
        self._total_steps = total_steps
        self._started = time.monotonic()
        self._done = 0
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=self.console,
        )  # fmt: skip
        self._task = self._progress.add_task("step", total=total_steps)

    def message(self, text: str) -> None:
        """One line, above the live table where there is one."""
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """One line that begins with `warning:`."""
        self.message(f"warning: {text}")

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[float, str], None]]:
        """A bar for something that happens before training; shown from the first report on, a line per quarter elsewhere."""
        bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=self.console, transient=True
        )
        task = bar.add_task(title, total=1.0)
        quarters = -1

        def report(share: float, label: str) -> None:
            nonlocal quarters
            if self.console.is_terminal:
                bar.start()
                bar.update(task, completed=share, description=f"{title}: {label}")
            elif int(share * 4) > quarters:
                quarters = int(share * 4)
                self.message(f"{title}: {label}, {share:.0%}")

        try:
            yield report
        finally:
            if bar.live.is_started:
                bar.stop()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a finished step."""
        values = [form.format(metrics[name]) if name in metrics else "" for _, name, form in COLUMNS]
        self._foot = [Text(part) for part in (seconds_phrase(metrics), reshard_phrase(metrics)) if part]
        if not self.console.is_terminal:
            shown = [f"{title} {value}" for (title, _, _), value in zip(COLUMNS, values, strict=True) if value]
            left = (time.monotonic() - self._started) / (step - self._done) * (self._total_steps - step)
            self.message(
                f"step {step}/{self._total_steps}  "
                + "  ".join(shown)
                + f"  left {left:.0f} s  ({'; '.join(part.plain for part in self._foot)})"
            )
            return
        self._rows.append((str(step), *values))
        if self._live is None:
            self._live = Live(self._view(), console=self.console, refresh_per_second=4)
            self._live.start()
        self._progress.update(self._task, completed=step)
        self._live.update(self._view())

    def started(self, done: int) -> None:
        """Training begins now, `done` steps are done already: time left is counted from here."""
        self._started, self._done = time.monotonic(), done
        self._progress.reset(self._task, total=self._total_steps, completed=done)

    def _view(self) -> Group:
        table = Table(expand=False)
        table.add_column("step", justify="right")
        for title, _, _ in COLUMNS:
            table.add_column(title, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return Group(table, *self._foot, self._progress)

    def close(self) -> None:
        """Ends the live view; the last table stays on the screen. Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None
