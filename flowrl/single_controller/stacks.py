"""Where the processes of a pool stand when one of them hangs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_CALLER = "single_controller/process.py"
_SHOWN_FRAMES = 3


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def library(self) -> bool:
        """Whether it belongs to an installed package or to Python."""
        return "site-packages" in self.file or self.file.startswith((sys.base_prefix, "<"))


@dataclass(frozen=True)
class Stack:
    """The frames of a method under way, outermost first; none when the process runs no method."""

    frames: tuple[Frame, ...]

    @property
    def waits_for_peers(self) -> bool:
        """Whether it stands inside a collective or a store of torch.distributed, or waits for one under way."""
        inside = any("torch/distributed/" in frame.file for frame in self.frames[-4:])
        return inside or any(".wait(" in frame.code for frame in self.frames[-1:])

    def innermost(self) -> list[Frame]:
        """The innermost frames of our own code and the innermost of all."""
        shown = [frame for frame in self.frames if not frame.library][-_SHOWN_FRAMES:]
        return shown if shown[-1:] == list(self.frames[-1:]) else [*shown, *self.frames[-1:]]


def stack_of(thread: int | None) -> Stack:
    """The method that a thread of this process runs now."""
    top = sys._current_frames().get(thread) if thread is not None else None
    if top is None:
        return Stack(())
    frames = [
        Frame(each.filename, each.lineno or 0, each.name, each.line or "") for each in traceback.extract_stack(top)
    ]
    called = max((i for i, frame in enumerate(frames) if frame.file.endswith(_CALLER)), default=len(frames))
    return Stack(tuple(frames[called + 1 :]))


def suspects(ranks: Iterable[int], stacks: Mapping[int, Stack]) -> list[int]:
    """Of the ranks that have not answered, those that the others wait for: the ones that stand in no collective.

    A rank without a stack did not answer when asked for it: it is stopped, or
    native code holds Python's lock.
    """
    return [rank for rank in ranks if rank not in stacks or not stacks[rank].waits_for_peers]


def standing(rank: int, stacks: Mapping[int, Stack]) -> str:
    """Where a rank stands, in one line."""
    if rank not in stacks:
        return "does not even tell its stack: stopped, or native code holds Python's lock"
    frames = stacks[rank].innermost()
    if not frames:
        return "runs no method"
    waits = "waits for its peers in " if stacks[rank].waits_for_peers else "stands in "
    return waits + ", ".join(str(frame) for frame in reversed(frames))
