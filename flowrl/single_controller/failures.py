"""WorkerError: the one error by which a failed process ends a run, and what can be known about its cause."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_READ_LINES = 200
_READ_BYTES = 1 << 17
_SHOWN_LINES = 12
_CRASHES = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
# gloo's words, the store's, and those that NCCL's watchdog leaves in the log of a process that it ends.
COLLECTIVE_TIMEOUT = re.compile(
    r"Timed out waiting \d+ms|wait timeout after \d+ms|Timeout waiting for key|Watchdog caught collective operation timeout"
)
LOST_PEER = re.compile(
    r"gloo/transport.*(?:Connection (?:reset|closed) by peer|Broken pipe)"
    r"|SocketImpl.*(?:Connection reset by peer|Broken pipe)|Connection was likely closed"
    r"|ncclRemoteError|NCCL error: remote process exited|NCCL communicator was aborted"
)


@dataclass(frozen=True)
class ProcessInfo:
    """Facts about one process of a pool, for messages."""

    rank: int
    node: str
    pid: int
    log: str | None


class WorkerError(RuntimeError):
    """A rank died or raised. The message ends with one line that names role, rank, node, pid, phase, step and cause."""

    def __init__(
        self,
        *,
        role: str,
        pool: str,
        process: ProcessInfo,
        method: str,
        phase: str | None,
        step: int | None,
        cause: str,
        detail: str = "",
    ) -> None:
        self.role, self.pool, self.rank = role, pool, process.rank
        self.node, self.pid, self.log = process.node, process.pid, process.log
        self.method, self.phase, self.step, self.cause = method, phase, step, cause
        where = phase or method
        step_text = "" if step is None else f" (step {step})"
        lines = [f"{role} rank {process.rank} of pool {pool} failed in {where}{step_text}: {cause}"]
        if detail:
            lines.append(detail.rstrip())
        tail = shown_tail(log_tail(process))
        if tail:
            lines += [f"last lines of {process.log}:", *(f"  | {line}" for line in tail)]
        lines.append(
            f"role {role}, rank {process.rank}, node {process.node}, pid {process.pid}, phase {where}{step_text}, "
            f"method {method}: {cause}; log {process.log or 'none (give the cluster a log_dir)'}"
        )
        super().__init__("\n".join(lines))


class ClusterError(RuntimeError):
    """Ray itself is gone, and the workers with it. The message ends with one line that names process, node, phase, step."""

    def __init__(self, problem: str, phase: str | None, step: int | None) -> None:
        self.problem, self.phase, self.step = problem, phase, step
        when = (f", phase {phase}" if phase else "") + ("" if step is None else f", step {step}")
        super().__init__(f"{problem}{when}")


def log_header(pid: int) -> str:
    """First line of a process in its log, which it may share with an earlier one of the same name."""
    return f"--- process {pid} starts"


def log_tail(process: ProcessInfo, lines: int = _READ_LINES) -> list[str]:
    """Last lines of a process's log; none when it cannot be read here (another node without a shared folder)."""
    if process.log is None:
        return []
    try:
        with open(process.log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _READ_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    text = text.rpartition(log_header(process.pid) + "\n")[2]
    return [line[:400] for line in text.splitlines() if line.strip()][-lines:]


def shown_tail(tail: list[str]) -> list[str]:
    """The lines worth showing: from the start of a crash report where there is one, else the last."""
    crash = next((i for i, line in enumerate(tail) if "Fatal Python error" in line), None)
    return tail[-_SHOWN_LINES:] if crash is None else tail[crash : crash + _SHOWN_LINES]


def death_cause(ray_message: str, tail: list[str], new_oom_kills: int, memory: str = "") -> str:
    """One line on why a process ended, from Ray's message, the end of its log and the kernel's count of kills.

    memory: figures of the process and its node, given where it may have been killed for memory.

    Ray does not tell the signal. A crash leaves faulthandler's line in the log; a memory kill is told by Ray's monitor
    or counted by the kernel; a connection that ends without either is what SIGKILL looks like.
    """
    if re.search(r"memory usage threshold|low on memory|memory pressure", ray_message, re.IGNORECASE):
        figures = [line.strip() for line in ray_message.splitlines() if re.search("memory", line, re.IGNORECASE)]
        return f"killed by Ray's memory monitor: {' '.join(figures)[:600]}"
    if re.search(
        r"node has (died|crashed)|node died|NodeDied|node was terminated|node failure", ray_message, re.IGNORECASE
    ):
        lines = [line.strip() for line in ray_message.splitlines() if line.strip()]
        return f"its node is gone (Ray's raylet there was killed, or the node was cut off): {' '.join(lines)[:400]}"
    for line in reversed(tail):
        if "Fatal Python error" in line:
            signal = next((name for words, name in _CRASHES.items() if words in line), None)
            return f"process crashed: {signal + ', ' if signal else ''}{line.strip()}"
    if new_oom_kills > 0:
        return (
            f"killed by the kernel's out-of-memory killer (SIGKILL; {new_oom_kills} such kill(s) here since the start"
            f"{memory and '; ' + memory})"
        )
    if re.search(r"exit code -?\d+|exit_code", ray_message) and "connection error" not in ray_message:
        found = re.search(r"(?:exit code|exit_code)[^\d-]*(-?\d+)", ray_message)
        return f"process exited{' with code ' + found.group(1) if found else ''}"
    if "INTENDED_USER_EXIT" in ray_message:
        return "process left by itself (sys.exit or exit_actor in worker code)"
    if "connection error" in ray_message or "End of file" in ray_message:
        return (
            "process died without a trace in its log: killed by SIGKILL (or it called os._exit)"
            f"{memory and '; ' + memory}"
        )
    lines = [line.strip() for line in ray_message.splitlines() if line.strip()]
    return f"process died: {' '.join(lines)[:400]}"


def readable(trace: str) -> str:
    """Ray's traceback without colours and without lines of carets."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", trace)
    return "\n".join(line for line in plain.splitlines() if line.strip(" ^~"))
