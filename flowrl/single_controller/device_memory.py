"""What a call did to its GPU's memory: read before and after, without waiting for the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes. `peak`: most that torch's allocator had handed out at once during the call; `allocated` and `reserved`: what
    it hands out, and has taken from the device, at the end; `free`: of the device at the end, whoever has the rest;
    `pinned`: host memory that the process has pinned. An engine that sleeps counts as allocated; `free` knows better."""

    peak: int
    allocated: int
    reserved: int
    free: int
    pinned: int

    @staticmethod
    def worst(found: Iterable[DeviceMemory]) -> DeviceMemory | None:
        """Largest of each over ranks or calls, and least of what is free; None of none."""
        each = list(found)
        if not each:
            return None
        return DeviceMemory(
            peak=max(one.peak for one in each),
            allocated=max(one.allocated for one in each),
            reserved=max(one.reserved for one in each),
            free=min(one.free for one in each),
            pinned=max(one.pinned for one in each),
        )


def begin(device: torch.device) -> None:
    """A call begins: its peak counts from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def read(device: torch.device) -> DeviceMemory | None:
    """At the end of a call; None on a CPU."""
    if device.type != "cuda":
        return None
    return DeviceMemory(
        peak=torch.cuda.max_memory_allocated(device),
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        free=torch.cuda.mem_get_info(device)[0],
        pinned=torch.cuda.host_memory_stats()["allocated_bytes.current"],
    )
