"""Waiting for an exchange that may never end, because a rank that it does not even involve has given up."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

_KEY = "flowrl/move-failed"
_GLANCE = timedelta(seconds=1)


def wait_for(work: Any, device: torch.device, store: Any) -> None:
    """Wait for an asynchronous collective, as long as the group's timeout allows and no rank has called `give_up`.

    Gloo tells the death of a rank only to those that exchange with it at that moment; the others learn it from them,
    over the `store` of all ranks.
    NCCL has a watchdog for this, and its work ends on a stream, not here.

    Error: `RuntimeError` with the collective's own error, or what the rank said that gave up.
    """
    if device.type == "cuda":
        work.wait()
        return
    while True:
        try:
            work.wait(_GLANCE)
            return
        except RuntimeError:
            if work.is_completed():
                # It may have ended in order between the end of this wait and now, so this error may be the wait's.
                work.wait()
                return
        if store.check([_KEY]):
            raise RuntimeError(store.get(_KEY).decode())


def give_up(message: str, store: Any) -> None:
    """Tell all ranks that this one does not go on. A store that is gone with its rank needs no telling."""
    try:
        if not store.check([_KEY]):
            store.set(_KEY, message)
    except RuntimeError:
        return
