"""Seconds of the parts of a move."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """Laps, one after another, by stage. On a GPU they are those of the current stream: nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any]] = [("", self._mark())]

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def lap(self, stage: str) -> None:
        """What was done since the last lap belongs to `stage`."""
        self._marks.append((stage, self._mark()))

    def read(self) -> dict[str, float]:
        """Seconds by stage, once the device has done all of it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: dict[str, float] = {}
        for (_, before), (stage, after) in pairwise(self._marks):
            lap = after - before if isinstance(after, float) else before.elapsed_time(after) / 1e3
            seconds[stage] = seconds.get(stage, 0.0) + lap
        return seconds
