"""Roles that do harm at a given moment: an actor and a rollout that are otherwise those of flowrl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.workers.actor import ActorWorker
from flowrl.workers.rollout import RolloutWorker
from recipes.kill_matrix.order import PHASES, Order


def _spoil(role: ActorWorker | RolloutWorker, name: str) -> None:
    """Put the deed before the method of the phase, if the phase is one of this role."""
    order = Order.read()
    where, method = PHASES.get(order.phase, ("", ""))
    if where != name or role.rank != order.rank:
        return
    calls = 0
    done: Callable[..., Any] = getattr(role, method)

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == order.call:
            order.carry_out()
        return done(*args, **kwargs)

    setattr(role, method, spoiled)


class SpoiledActor(ActorWorker):
    """An actor that carries out the order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _spoil(self, "actor")


class SpoiledRollout(RolloutWorker):
    """A rollout that carries out the order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _spoil(self, "rollout")
