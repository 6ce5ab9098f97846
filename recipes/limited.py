"""A command with a time limit that is told to stop before it is ended, whatever ends its caller."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent
STOPPING_SECONDS = 60
"""Between being told to stop and being ended."""
STOPPED = 128 + signal.SIGINT
"""The exit code of a command that was told to stop."""

_PR_SET_PDEATHSIG = 1


def _end_with_the_caller() -> None:
    """In the child, before its program: SIGINT when its parent dies, however that happens (Linux, as Ray's devices are)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


def run_limited(command: Sequence[str], limit_seconds: float, log: IO[bytes] | None = None) -> int:
    """The exit code of a command, run in the source tree. `log`: where its output goes, else to this process's own.

    It gets SIGINT at its limit, when this function is left by an exception, or when this process dies, and SIGKILL
    `STOPPING_SECONDS` later where there is still someone to send it; the code is `STOPPED` then too. It is in this process's group,
    so what ends that ends it.
    """
    to_log = {} if log is None else {"stdout": log, "stderr": subprocess.STDOUT}
    killed = False
    process = subprocess.Popen(command, cwd=ROOT, preexec_fn=_end_with_the_caller, **to_log)  # type: ignore[call-overload]
    try:
        process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOPPING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                killed = True
    code = process.wait()
    return STOPPED if killed else int(code)


def run_measured(
    command: Sequence[str], limit_seconds: float, run: Path, log: IO[bytes] | None = None
) -> list[dict[str, Any]]:
    """The metrics of a run of `main_ppo` in the folder `run`; none where it was told to stop before it had any.

    Error: `RuntimeError` with the exit code where it failed: what it measured until then, or another run there, is no result.
    """
    metrics = run / "metrics.jsonl"
    before = _version(metrics)
    code = run_limited(command, limit_seconds, log)
    if code not in (0, STOPPED):
        raise RuntimeError(f"it ended with code {code}")
    now = _version(metrics)
    return [] if now in (None, before) else [json.loads(line) for line in metrics.read_text().splitlines()]


def _version(file: Path) -> tuple[int, int] | None:
    """Another one whenever the file is."""
    return (file.stat().st_ino, file.stat().st_mtime_ns) if file.is_file() else None
