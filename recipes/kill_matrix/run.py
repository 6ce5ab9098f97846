"""Runs one cell and sees how it ends and what it leaves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from recipes.kill_matrix.cells import CALLS, Cell
from recipes.kill_matrix.order import VARIABLE, Order

ROOT = Path(__file__).parents[2]
MARK = "FLOWRL_KILL_MATRIX"
GIVE_UP_SECONDS = 420.0
LEFTOVER_SECONDS = 60.0


@dataclass(frozen=True)
class Result:
    """What came of a cell. seconds: from the deed to the driver's end; clean_seconds: until nothing was left, after that.

    last_line: of stderr. leftovers: what was there a minute later. kept: whether the contract was.
    """

    place: str
    phase: str
    deed: str
    seconds: float
    clean_seconds: float
    exit_code: int
    last_line: str
    leftovers: tuple[str, ...]
    kept: bool

    @property
    def name(self) -> str:
        return f"{self.place}/{self.phase}/{self.deed}"


def run_cell(cell: Cell) -> Result:
    """Starts a run, lets it be harmed, waits for its end."""
    # Sockets lie below it, whose paths are limited.
    folder = Path(tempfile.mkdtemp(prefix="km-", dir="/tmp"))
    try:
        return _run(cell, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(cell: Cell, folder: Path) -> Result:
    mark, stamp = uuid.uuid4().hex, folder / "stamp"
    temporary, shared = folder / "tmp", set(os.listdir("/dev/shm"))
    temporary.mkdir()
    order = Order(cell.phase, CALLS.get(cell.phase, 1), cell.rank, cell.victim, cell.deed, str(stamp))
    environment = {
        **os.environ, MARK: mark, VARIABLE: order.text(), "TMPDIR": str(temporary), "RAY_ADDRESS": "",
        # A cache that torch means to keep.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        run = subprocess.Popen(
            [sys.executable, "-m", "recipes.kill_matrix.driver", f"run.dir={folder / 'run'}", *cell.command],
            stdout=out, stderr=err, cwd=ROOT, env=environment,
        )  # fmt: skip
        try:
            code = run.wait(GIVE_UP_SECONDS)
        except subprocess.TimeoutExpired:
            run.kill()
            code = run.wait()
    ended = time.time()
    left = _leftovers(mark, temporary, folder, shared)
    while left and time.time() < ended + LEFTOVER_SECONDS:
        time.sleep(0.1)
        left = _leftovers(mark, temporary, folder, shared)
    clean = time.time() - ended
    text = (folder / "err").read_text(errors="replace").replace(str(folder / "run"), "RUN_DIR").replace(f"{ROOT}/", "")
    seconds = ended - float(stamp.read_text()) if stamp.exists() else float("nan")
    soon = code == 0 or seconds <= cell.limit_seconds
    last = (text.strip().splitlines() or [""])[-1]
    said = code in cell.ends and all(words in last for words in cell.ends[code])
    kept = stamp.exists() and said and not left and soon
    return Result(
        cell.place, cell.phase, cell.deed, round(seconds, 1), round(clean, 1), code, last,
        tuple(left), kept,
    )  # fmt: skip


def _leftovers(mark: str, temporary: Path, folder: Path, shared: set[str]) -> list[str]:
    """Processes, files in shared memory and temporary folders (sockets lie there), and locks of the run."""
    processes = [f"process {pid} {_described(pid)}" for pid in _marked(mark)]
    memory = [f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - shared) if _names(name)]
    files = [f"temporary {path.name}" for path in temporary.iterdir()]
    return [*processes, *memory, *files, *(path.name for path in folder.glob(".*.lock"))]


def _described(pid: int) -> str:
    """Name and state of a process."""
    try:
        return " ".join(re.findall(r"^(?:Name|State):\s+(.+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    except OSError:
        return "(ended meanwhile)"


def _names(entry: str) -> bool:
    """Whether a file of shared memory is of a kind that a run makes."""
    return entry.startswith(("plasma", "ray", "torch", "psm_", "sem.", "vllm", "nccl"))


def _marked(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                marked = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if marked:
                found.append(int(folder.name))
    return found
