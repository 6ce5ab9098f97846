"""What a GPU's memory can do: the ceiling that installing is compared with."""

from __future__ import annotations

import statistics

import torch

COPY_BYTES = 1 << 30
WARM_UPS, REPEATS = 3, 10


def copy_gb_per_second(device: torch.device) -> float | None:
    """Bytes read plus bytes written per second by one large copy within a GPU's memory, median; None on a CPU."""
    if device.type != "cuda":
        return None
    # Random, because some chips move zeros faster.
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds: list[float] = []
    for number in range(WARM_UPS + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize(device)
        if number >= WARM_UPS:
            seconds.append(start.elapsed_time(end) / 1e3)
    return 2 * COPY_BYTES / statistics.median(seconds) / 1e9
