"""What this machine offers, found cheaply and without importing torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Facts that `auto` values and rules depend on. Sizes are bytes; 0 GPU bytes: unknown."""

    cpus: int
    memory_bytes: int
    shared_memory_bytes: int
    gpus: int = 0
    gpu_memory_bytes: int = 0
    ray_address: str | None = None


def find_machine() -> Machine:
    """The machine this process runs on; limits of its control group count, not those of the host."""
    gpus = _gpus()
    return Machine(
        cpus=_cpus(),
        memory_bytes=_memory_bytes(),
        shared_memory_bytes=_shared_memory_bytes(),
        gpus=gpus,
        gpu_memory_bytes=_gpu_memory_bytes() if gpus else 0,
        ray_address=os.environ.get("RAY_ADDRESS") or None,
    )


def installed_version(package: str) -> str:
    """Of a package; `unknown` where it runs from a source tree that nobody installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _cpus() -> int:
    cpus = len(os.sched_getaffinity(0))
    quota = _words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        cpus = min(cpus, max(1, int(quota[0]) // int(quota[1])))
    return cpus


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _words(name)
        if limit and limit[0].isdigit():
            total = min(total, int(limit[0]))
    return total


def _words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def _shared_memory_bytes() -> int:
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0


def _gpus() -> int:
    """GPUs that torch will see: none with a CPU build of torch, else what CUDA_VISIBLE_DEVICES leaves."""
    try:
        if importlib.metadata.version("torch").endswith("+cpu"):
            return 0
    except importlib.metadata.PackageNotFoundError:
        return 0
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path("/dev").glob("nvidia*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores everything from the first -1 (or empty name) on.
    stops = [position for position, name in enumerate(names) if name in ("", "-1")]
    return min(present, stops[0] if stops else len(names))


def _gpu_memory_bytes() -> int:
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return 0
    sizes = [int(word) for word in answer if word.isdigit()]
    return min(sizes) * 2**20 if sizes else 0
