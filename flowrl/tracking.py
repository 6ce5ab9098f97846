"""Where a run's numbers go: `metrics.jsonl`, samples, TensorBoard or W&B, a timeline, and a picture at the end."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from flowrl.checkpoints.files import Files, replace_text
from flowrl.config.schema import Config
from flowrl.config.tree import ConfigError
from flowrl.single_controller import Span

logger = logging.getLogger("flowrl")


class Logger(Protocol):
    """Takes the metrics of one step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files under `run.dir/tensorboard/`; what earlier files say of steps from `first_step` on is not shown."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run, continued where the service knows `run_id`; needs the extra `flowrl[wandb]`."""

    def __init__(self, folder: Path, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project="flowrl", name=name, id=run_id, resume="allow", dir=str(folder), config=dict(config)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def cut_back(folder: Path, step: int) -> list[dict[str, float]]:
    """Removes what a run has written of steps after `step`: lines of `metrics.jsonl`, samples, timelines. Returns the
    metrics of the steps that stay, null as not-a-number.

    A last line that a dying process has not finished goes too. The file is the old or the new one at any moment.
    Error: `ConfigError` where the file or what shall be removed is not what a run writes.
    """
    path, kept, history = folder / "metrics.jsonl", [], []
    for line in _lines(path):
        row = _row(line)
        if row is not None and row["step"] <= step:
            kept.append(line)
            history.append({name: math.nan if value is None else value for name, value in row.items()})
    replace_text(Files(), path, "".join(kept))
    for later in (*folder.glob("samples/step_*.jsonl"), *folder.glob("profile/step_*.json")):
        number = later.stem.removeprefix("step_")
        if number.isdecimal() and int(number) > step:
            try:
                later.unlink()
            except OSError as error:
                raise ConfigError(
                    f"{later} is of a later step and cannot be removed: {error.strerror}; remove it"
                ) from None
    present = {row["step"] for row in history}
    absent = next((number for number in range(1, step + 1) if number not in present), None)
    if absent is not None:
        logger.warning(
            "%s has no line of step %d, which is done: the run goes on without what is missing there", path, absent
        )
    return history


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    if not path.is_file():
        raise ConfigError(f"{path} is no regular file; remove it, and the run goes on without earlier metrics")
    try:
        return path.read_bytes().decode("utf-8").splitlines(keepends=True)
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path} is not UTF-8 text, as a run writes it; mend or remove it, and the run goes on without earlier metrics"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; mend that or give another run.dir") from None


def _row(line: str) -> dict[str, Any] | None:
    """The metrics of a whole line; None for a part of one."""
    if not line.endswith("\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class Tracker:
    """Writes everything that a run leaves behind, one call per step.

    `metrics.jsonl` holds one JSON object per step, `step` first; step 0 is the evaluation before training. What the
    folder holds of steps after `done`, the last step of the checkpoint that the run goes on from, is removed.
    """

    def __init__(self, folder: Path, config: Config, tree: Mapping[str, Any], *, run_id: str, done: int = 0) -> None:
        self.folder = folder
        self.history = cut_back(folder, done) if done else []
        self._jsonl = (folder / "metrics.jsonl").open("a" if done else "w")
        self._loggers: list[Logger] = []
        for name in config.trainer.loggers:
            if name == "tensorboard":
                self._loggers.append(TensorBoard(folder / "tensorboard", done + 1 if done else 0))
            else:
                self._loggers.append(WeightsAndBiases(folder, config.run.name, run_id, tree))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the step's metrics everywhere; a value that is not finite is written as null in the JSON."""
        self.history.append({"step": step, **metrics})
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._jsonl.write(json.dumps({"step": step, **row}) + "\n")
        self._jsonl.flush()
        # A checkpoint of this step counts on the line.
        os.fsync(self._jsonl.fileno())
        for logger in self._loggers:
            logger.log(step, metrics)

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes `samples/step_N.jsonl`: id, prompt, response, reward, finish reason of some rows."""
        path = self.folder / "samples" / f"step_{step}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def timeline(self, step: int, spans: Sequence[Span]) -> None:
        """Writes `profile/step_N.json`, a trace of the step's calls that chrome://tracing and Perfetto read."""
        path = self.folder / "profile" / f"step_{step}.json"
        path.parent.mkdir(exist_ok=True)
        events = [
            {"name": f"{span.role}.{span.method}", "cat": span.phase, "ph": "X", "pid": span.role, "tid": span.phase,
             "ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
            for span in spans
        ]  # fmt: skip
        path.write_text(json.dumps({"traceEvents": events}))

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of every step that has the metric."""
        return [(int(row["step"]), row[name]) for row in self.history if name in row]

    def picture(self) -> Path | None:
        """Draws training and held-out reward, and KL where there is one, to `reward.png`; None without a step."""
        if not self.series("reward/mean"):
            return None
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        figure, axis = plt.subplots(figsize=(7, 4))
        for name, style in (("reward/mean", "-"), ("eval/reward/mean", "o--")):
            points = self.series(name)
            if points:
                axis.plot(*zip(*points, strict=True), style, label=name)
        axis.set(xlabel="step", ylabel="reward", title=self.folder.name)
        points = self.series("kl/reference")
        if points:
            right = axis.twinx()
            right.plot(*zip(*points, strict=True), ":", color="tab:gray", label="kl/reference")
            right.set_ylabel("KL per token")
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right")
        figure.tight_layout()
        path = self.folder / "reward.png"
        figure.savefig(path, dpi=120)
        plt.close(figure)
        return path

    def close(self) -> None:
        self._jsonl.close()
        for logger in self._loggers:
            logger.close()
