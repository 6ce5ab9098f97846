"""Waiting for collectives: what the wait itself reports, and what the collective does."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from flowrl.resharding.waiting import wait_for


class EndsAsTheGlanceDoes:
    """Gloo's work, at the moment at which a loaded machine finds it: over right after a wait gave up."""

    def __init__(self, error: str | None = None) -> None:
        self._error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return True


def test_a_collective_that_ends_just_after_a_glance_has_not_failed() -> None:
    """And one that failed then is told with its own error, not with that of the wait."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    wait_for(EndsAsTheGlanceDoes(), torch.device("cpu"), store)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait_for(EndsAsTheGlanceDoes("Connection closed by peer"), torch.device("cpu"), store)
