"""PPO as in `main_ppo`, with roles that do harm: `FLOWRL_SABOTAGE=... python -m recipes.kill_matrix.driver [overrides]`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from flowrl import main_ppo
from flowrl.launch import launch
from recipes.kill_matrix.order import VARIABLE, Order

if TYPE_CHECKING:
    from flowrl.run import Run


def train(run: Run) -> None:
    """The loop of `main_ppo`."""
    from flowrl import roles
    from recipes.kill_matrix.sabotage import SpoiledActor, SpoiledRollout

    vars(roles).update(ActorWorker=SpoiledActor, RolloutWorker=SpoiledRollout)
    main_ppo.train(run)


def name_the_driver() -> None:
    """Ray's processes, and so the workers, inherit it."""
    os.environ[VARIABLE] = replace(Order.read(), driver=os.getpid()).text()


if __name__ == "__main__":
    name_the_driver()
    launch(train)
