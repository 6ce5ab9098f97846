"""What a device can do: the ceilings that measured work is compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

COPY_BYTES = 1 << 30
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of the matrices whose product is timed."""
WARM_UPS, REPEATS = 3, 10


def own_device(kind: str) -> torch.device:
    """The device of this rank, made its current one; where ranks outnumber GPUs they share them in turn."""
    if kind != "cuda":
        return torch.device("cpu")
    found = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(found)
    return found


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Of `work` alone, after some that do not count; on a GPU by its own clock."""
    seconds: list[float] = []
    for number in range(WARM_UPS + repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            torch.cuda.synchronize(device)
            taken = start.elapsed_time(end) / 1e3
        else:
            begun = time.perf_counter()
            work()
            taken = time.perf_counter() - begun
        if number >= WARM_UPS:
            seconds.append(taken)
    return statistics.median(seconds)


def copy_gb_per_second(device: torch.device) -> float | None:
    """Bytes read plus bytes written per second by one large copy within a GPU's memory, median; None on a CPU."""
    if device.type != "cuda":
        return None
    # Random, because some chips move zeros faster.
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_seconds(lambda: target.copy_(source), device) / 1e9


def product_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of one large matrix product, 1e12, median."""
    size = PRODUCT_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / median_seconds(lambda: torch.mm(left, right, out=out), device) / 1e12
