"""Grades the responses of a step in parallel processes, with a time limit on every row."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from flowrl.config.schema import RewardConfig
from flowrl.config.tree import ConfigError
from flowrl.config.units import error_score
from flowrl.protocol import Metric
from flowrl.rewards.function import Graded
from flowrl.rewards.process import Answer, Call, Ready, Unusable
from flowrl.rewards.worker import Ended, RewardProcess

logger = logging.getLogger("flowrl")
PROMPT_SHOWN = 60


class RewardError(RuntimeError):
    """A reward function failed; the message names function, row, the start of its prompt, and what happened."""


@dataclass(frozen=True)
class RewardResult:
    """Scores [N] float32 in row order, metrics of the extras (`reward/<key>`), and how many rows got the error score.

    `first_error` is what happened to the first of those, or empty.
    """

    scores: npt.NDArray[np.float32]
    metrics: dict[str, Metric] = field(default_factory=dict)
    num_errors: int = 0
    first_error: str = ""


class RewardRunner:
    """A pool of processes around one reward function; a context manager.

    `check` finds the function and tries it on one row; call it before anything expensive starts. Output that the
    function prints goes to `log_path`, or to the driver's own output.
    """

    def __init__(self, config: RewardConfig, log_path: Path | None = None) -> None:
        self._config = config
        self._error_score = _error_score(config.on_error)
        self._processes: list[RewardProcess] = []
        self._batched: bool | None = None
        self._stack = ExitStack()
        self._log: IO[bytes] | None = None if log_path is None else self._stack.enter_context(log_path.open("ab"))
        # The kernel ends a reward process with the *thread* that started it, so one thread starts them all.
        self._starter = self._stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="reward-starter"))

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes and waits for their end. May be called again."""
        for process in self._processes:
            process.kill()
        self._processes.clear()
        self._stack.close()

    def check(self, row: Mapping[str, Any], prompt: str | None = None) -> None:
        """Finds the function, calls it once with `row` and an empty response, and starts the other processes.

        `prompt` is the text as rewards see it; without it, the row's own prompt. The grade is thrown away.
        Errors: `ConfigError` where the function cannot be found or called, or fails (unless errors are scored).
        """
        text = _prompt_text(row) if prompt is None else prompt
        try:
            self.score([text], [""], [dict(row)], [str(row.get("id", "first row"))])
        except RewardError as error:
            raise ConfigError(
                f"reward.function does not work on the first row with an empty response: {error}"
            ) from None
        self._fill()

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        row_ids: Sequence[str],
    ) -> RewardResult:
        """Grades N responses, in any order at once; the result is in row order.

        Errors: `RewardError` for the first row that fails, unless `reward.on_error` gives it a score; `ConfigError`
        where the function cannot be found.
        """
        counts = {len(prompts), len(responses), len(rows), len(row_ids)}
        if len(counts) > 1:
            raise ValueError(
                f"one prompt, response, row and id for each sample: got {len(prompts)}, {len(responses)}, {len(rows)}, {len(row_ids)}"
            )
        if not rows:
            return RewardResult(np.zeros(0, dtype=np.float32))
        if self._start():
            calls = [Call(list(prompts), list(responses), [dict(row) for row in rows])]
            members = [range(len(rows))]
        else:
            calls = [Call(*arguments) for arguments in zip(prompts, responses, map(dict, rows), strict=True)]
            members = [range(row, row + 1) for row in range(len(rows))]
        tally = _Tally(self._config.function, self._error_score, prompts, row_ids)
        try:
            self._run(calls, members, tally)
        finally:
            self._drop([process for process in self._processes if process.task is not None])
        self._fill()
        return tally.result()

    def _start(self) -> bool:
        """Waits until one process has found the function; says whether it is a `@batched` one."""
        while self._batched is None:
            if not self._processes:
                self._processes.append(self._new_process())
            self._look()
        return self._batched

    def _run(self, calls: list[Call], members: list[range], tally: _Tally) -> None:
        waiting, unanswered = deque(range(len(calls))), len(calls)
        while unanswered:
            self._fill(limit=unanswered)
            for process in [process for process in self._processes if process.idle][: len(waiting)]:
                # One that has died meanwhile takes nothing and is found below.
                if process.give(waiting[0], calls[waiting[0]], self._config.timeout_seconds):
                    waiting.popleft()
            for task, answer in self._look():
                tally.add(members[task], answer)
                unanswered -= 1

    def _look(self) -> list[tuple[int, Answer]]:
        """Waits for something to happen; the calls that came to an end, well or not."""
        soonest = min((process.deadline for process in self._processes if not process.idle), default=0.0)
        sources = [source for process in self._processes for source in (process.connection, process.exit_descriptor)]
        wait(sources, timeout=max(0.0, soonest - time.monotonic()))
        answers = []
        for process in list(self._processes):
            task, loaded = process.task, process.ready
            event = process.event()
            if isinstance(event, Ready):
                self._batched = event.batched
            elif isinstance(event, Unusable):
                raise ConfigError(f"reward.function={self._config.function}: {event.reason}")
            elif isinstance(event, Ended):
                self._drop([process])
                if not loaded:
                    raise ConfigError(f"reward.function={self._config.function}: the function's module {event.reason}")
                if task is None:
                    logger.warning(
                        "reward process %d %s while idle; another takes its place", process.pid, event.reason
                    )
                else:
                    answers.append((task, Answer(None, event.reason)))
            elif isinstance(event, Answer) and task is not None:
                answers.append((task, event))
        return answers

    def _fill(self, limit: int | None = None) -> None:
        """Starts processes up to the number that is of use: one for a `@batched` function."""
        wanted = 1 if self._batched else self._config.num_processes
        if limit is not None:
            wanted = min(wanted, limit)
        while len(self._processes) < wanted:
            self._processes.append(self._new_process())

    def _new_process(self) -> RewardProcess:
        return self._starter.submit(RewardProcess, self._config.function, self._config.memory_bytes, self._log).result()

    def _drop(self, processes: list[RewardProcess]) -> None:
        for process in processes:
            process.kill()
            self._processes.remove(process)


class _Tally:
    """Collects grades by row and decides what an error means."""

    def __init__(
        self, function: str, error_score: float | None, prompts: Sequence[str], row_ids: Sequence[str]
    ) -> None:
        self._function = function
        self._error_score = error_score
        self._prompts = prompts
        self._row_ids = row_ids
        self._grades: list[Graded] = [(0.0, {})] * len(row_ids)
        self._errors: dict[int, str] = {}

    def add(self, members: range, answer: Answer) -> None:
        """The answer for the rows `members`. Errors: `RewardError` unless errors are scored."""
        if answer.rows is None:
            self._fail(members, answer.failure)
            return
        for row, grade in zip(members, answer.rows, strict=True):
            if isinstance(grade, str):
                self._fail(range(row, row + 1), grade)
            else:
                self._grades[row] = grade

    def result(self) -> RewardResult:
        scores = np.array([score for score, _ in self._grades], dtype=np.float32)
        extras: dict[str, list[float]] = {}
        for _, more in self._grades:
            for key, value in more.items():
                extras.setdefault(key, []).append(value)
        metrics = {f"reward/{key}": Metric.mean(sum(values), len(values)) for key, values in extras.items()}
        if self._error_score is not None:
            metrics["reward/errors"] = Metric.sum(len(self._errors))
        first = self._errors[min(self._errors)] if self._errors else ""
        return RewardResult(scores, metrics, len(self._errors), first)

    def _fail(self, members: range, reason: str) -> None:
        first = members[0]
        prompt = self._prompts[first]
        shown = repr(prompt if len(prompt) <= PROMPT_SHOWN else prompt[:PROMPT_SHOWN] + "...")
        which = f"row {self._row_ids[first]!r} (prompt {shown})"
        if len(members) > 1:
            which = f"{len(members)} rows from {which}"
        message = f"reward function {self._function} on {which}: {reason}"
        if self._error_score is None:
            raise RewardError(message)
        for row in members:
            self._grades[row] = (self._error_score, {})
            self._errors[row] = message


def _error_score(on_error: str) -> float | None:
    """The score of a row that fails, or None where that ends the run."""
    try:
        return error_score(on_error)
    except ValueError as error:
        raise ConfigError(f"reward.on_error={on_error} is not legal; {error}") from None


def _prompt_text(row: Mapping[str, Any]) -> str:
    prompt = row.get("prompt", "")
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message["content"]) for message in prompt)
