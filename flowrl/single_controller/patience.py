"""How long calls have been running: when to say that one still does, and when to give up on it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.single_controller.call import Call

TELL_SECONDS = 60.0
START_SECONDS = 300.0
"""Processes import their libraries while they start, which takes minutes where disks are slow."""


class Patience:
    """Watches the calls that run now. The caller gives the time, in seconds of any steady clock.

    A call is told of when it lasts longer than `TELL_SECONDS` and twice as long as the longest earlier call of its
    method, and again every `TELL_SECONDS`: a run whose steps are long is not told so at each of them.
    """

    def __init__(self, limit_seconds: float | None) -> None:
        """limit_seconds: of one call; None is no limit."""
        self._limit = limit_seconds
        self._since: dict[Call, float] = {}
        self._tell_at: dict[Call, float] = {}
        self._longest: dict[tuple[str, str], float] = {}

    def look(self, running: Collection[Call], now: float) -> None:
        """Takes note of the calls that run now, and so of those that ended."""
        for call in [call for call in self._since if call not in running]:
            key, lasted = (call.role, call.method), now - self._since.pop(call)
            self._longest[key] = max(lasted, self._longest.get(key, 0.0))
            del self._tell_at[call]
        for call in running:
            if call not in self._since:
                self._since[call] = now
                usual = self._longest.get((call.role, call.method), 0.0)
                self._tell_at[call] = now + max(TELL_SECONDS, 2 * usual)

    def slow(self, now: float) -> list[tuple[Call, float]]:
        """Calls that are due to be told of, and the seconds they have run."""
        due = [call for call, at in self._tell_at.items() if now >= at]
        for call in due:
            self._tell_at[call] = now + TELL_SECONDS
        return [(call, now - self._since[call]) for call in due]

    def overdue(self, now: float) -> Call | None:
        """A call that ran longer than the limit; starts of processes may always last `START_SECONDS`."""
        if self._limit is None:
            return None
        limits = {call: max(self._limit, START_SECONDS) if call.starts else self._limit for call in self._since}
        return next((call for call, since in self._since.items() if now - since >= limits[call]), None)
