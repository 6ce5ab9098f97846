"""Everything that only a GPU can show, in one command: `python -m recipes.gpu_check out=FOLDER [parts=a,b] [together=4]`.

Each part is a command with a time limit of its own, so that one that fails or hangs does not keep the others from their
turn. Tests run side by side, measurements alone after them. The folder gets a log of every part, JUnit of the tests, what
the benchmarks write, and `summary.json`; the table comes last.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from flowrl.resharding.words import make_folder, whole_number

ROOT = Path(__file__).parent.parent
TESTS = {"attention": 180, "log_probs": 300, "updates": 240, "moves": 300, "state": 300, "runs": 580, "memory": 240,
         "prediction": 510, "sampling": 500}  # fmt: skip
"""Files of tests/gpu with their limits in seconds."""
ALONE = {"memory", "prediction", "runs"}
"""Tests that look at how much memory of the GPU is free; an engine that goes to sleep does, too."""
SHAPES = {"llama-1b": 120, "qwen2.5-0.5b": 120, "qwen2.5-1.5b": 120, "qwen2.5-7b": 180}
"""Models whose move from training to generation is measured on one GPU, with limits."""
SPEED_MODEL = "qwen2.5-1.5b"
WIDTH = 160
STOPPING_SECONDS = 10
"""Between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Part:
    """A command. `alone`: nothing else runs meanwhile, because it measures."""

    name: str
    command: tuple[str, ...]
    limit_seconds: float
    alone: bool = False


@dataclass(frozen=True)
class Outcome:
    name: str
    code: int | None
    seconds: float
    last_line: str


def parts(out: Path) -> list[Part]:
    """All parts, tests first."""
    python = sys.executable
    tests = [
        Part(
            f"test_{name}",
            (python, "-m", "pytest", f"tests/gpu/test_{name}.py", "-q", f"--junitxml={out / f'test_{name}.xml'}"),
            limit,
            alone=name in ALONE,
        )
        for name, limit in TESTS.items()
    ]
    moves = [
        Part(
            f"reshard_{model}",
            (
                python,
                "-m",
                "flowrl.resharding.benchmark",
                "world=1",
                f"model={model}",
                "train=tp1",
                "rollout=tp1",
                "device=cuda",
                "repeat=20",
                f"out={out / f'reshard_{model}'}",
            ),
            limit,
            alone=True,
        )  # fmt: skip
        for model, limit in SHAPES.items()
    ]
    return tests + moves + speeds(out)


def speeds(out: Path) -> list[Part]:
    """Training, generation and whole steps of one shape; a run of main_ppo ends itself before its part's limit."""
    benchmark, steps = "flowrl.workers.benchmark", "recipes.gpu_steps"
    found = [
        ("train", 300, benchmark, "train", f"model={SPEED_MODEL}"),
        ("generate", 420, benchmark, "generate", f"model={SPEED_MODEL}"),
        ("steps_grpo", 540, steps, f"model={SPEED_MODEL}", "runs=grpo", "limit=450"),
        ("steps_ppo", 590, steps, f"model={SPEED_MODEL}", "runs=ppo", "limit=500"),
    ]
    return [
        Part(name, (sys.executable, "-m", module, *words, f"out={out / name}"), limit, alone=True)
        for name, limit, module, *words in found
    ]


def wanted_parts(names: str | None, every: Sequence[Part]) -> list[Part]:
    """Those of the names, in their order; None: all. Error: `ValueError` for a name that no part has."""
    if names is None:
        return list(every)
    unknown = set(names.split(",")) - {part.name for part in every}
    if unknown:
        known = ", ".join(part.name for part in every)
        raise ValueError(f"parts={names}: there is no part {sorted(unknown)[0]!r}; there are {known}")
    return [part for part in every if part.name in names.split(",")]


class _Running:
    """Process groups of parts that run now, each in a session of its own, so no signal of ours reaches them by itself."""

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self.stopped = False

    def end(self, signum: int, frame: FrameType | None) -> None:
        """A handler of signals: tell them all to stop, start no more, and leave; who does not stop in time is ended."""
        self.stopped = True
        self._send(signal.SIGTERM)
        last = threading.Timer(STOPPING_SECONDS, self._send, (signal.SIGKILL,))
        last.daemon = True
        last.start()
        sys.stderr.write(f"stopped by {signal.Signals(signum).name}\n")
        sys.exit(128 + signum)

    def _send(self, signum: int) -> None:
        for group in tuple(self.groups):
            with suppress(ProcessLookupError):
                os.killpg(group, signum)


_running = _Running()


def end_parts_on_signals() -> None:
    """SIGINT and SIGTERM end this process with all its parts."""
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, _running.end)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Tell the group of a part that still runs to stop, and end what of it does not."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOPPING_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(part: Part, out: Path) -> Outcome:
    """Run one part to its end or its limit; its whole process group is ended with it."""
    if _running.stopped:
        return Outcome(part.name, None, 0.0, "not started")
    log = out / f"{part.name}.log"
    started = time.monotonic()
    with log.open("wb") as written:
        process = subprocess.Popen(
            part.command, cwd=ROOT, stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
        _running.groups.add(process.pid)
        try:
            code: int | None = process.wait(part.limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _stop(process)
            _running.groups.discard(process.pid)
    lines = log.read_text(errors="replace").strip().splitlines()
    return Outcome(part.name, code, time.monotonic() - started, lines[-1][:WIDTH] if lines else "")


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 where all parts ended well, else 1; 2 for bad input."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = given.keys() - {"out", "parts", "together"}
    if unknown or not given.get("out"):
        sys.stderr.write(f"{__doc__}\n")
        return 2
    out = Path(given["out"]).expanduser().absolute()
    try:
        together = whole_number(given, "together", 4)
        make_folder(out)
        chosen = wanted_parts(given.get("parts"), parts(out))
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    end_parts_on_signals()
    with ThreadPoolExecutor(together) as pool:
        outcomes = list(pool.map(lambda part: run(part, out), [part for part in chosen if not part.alone]))
    outcomes += [run(part, out) for part in chosen if part.alone]
    return finish("GPU check", outcomes, out)


def finish(title: str, outcomes: Sequence[Outcome], out: Path) -> int:
    """Write `summary.json` and show the table. The exit code: 0 where all parts ended well, else 1."""
    (out / "summary.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    table = Table(title=title)
    for heading in ("part", "result", "seconds", "last line"):
        table.add_column(heading)
    for outcome in outcomes:
        result = {0: "ok", None: "TIME"}.get(outcome.code, f"exit {outcome.code}")
        table.add_row(outcome.name, result, f"{outcome.seconds:.0f}", outcome.last_line)
    Console(width=WIDTH).print(table)
    return 0 if all(outcome.code == 0 for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
