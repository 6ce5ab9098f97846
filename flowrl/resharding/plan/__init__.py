"""Plans of weight moves between any two layouts: pure integers, no tensor, no process group."""

from __future__ import annotations

from flowrl.resharding.plan.move import Bucket, MovePlan, Parcel, Piece, RankSchedule, Stage, StageGroup, plan_move
from flowrl.resharding.plan.orders import OrderChoice, OrderFigures, choose_order

__all__ = [
    "Bucket",
    "MovePlan",
    "OrderChoice",
    "OrderFigures",
    "Parcel",
    "Piece",
    "RankSchedule",
    "Stage",
    "StageGroup",
    "choose_order",
    "plan_move",
]
