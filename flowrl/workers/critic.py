"""The critic: values of states, trained on returns."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flowrl.algorithms.losses import column, value_loss
from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import CriticConfig
from flowrl.protocol import DataProto, Ragged
from flowrl.single_controller.dispatch import split_over
from flowrl.single_controller.worker import register
from flowrl.workers.reporting import step_metrics, token_metrics
from flowrl.workers.trained import TrainedWorker


class CriticWorker(TrainedWorker):
    """Trains values of the state before each response token. Mesh "train": one slice per replica of the model."""

    def __init__(
        self,
        model_path: str,
        shape: ModelShape,
        config: CriticConfig,
        *,
        total_optimizer_steps: int,
        seed: int,
    ) -> None:
        """Read the trunk, and the value head that an exported critic has beside it; a new head starts at zero.

        Errors: `ValueError` where layout, world and model do not fit, or the folder does not fit the shape.
        """
        from flowrl.workers.engine import Engine
        from flowrl.workers.heads import CriticHead

        self._config = config
        self._engine = Engine(
            model_path,
            shape,
            config,
            CriticHead(),
            device=self.device,
            seed=seed,
            optim=config.optim,
            total_steps=total_optimizer_steps,
        )

    @register(dispatch=split_over("train", balance="response_ids"))
    def values(self, batch: DataProto) -> DataProto:
        """Column `old_values`: the value of the state before each response token."""
        outputs = self._engine.forward(batch)
        if outputs is None:
            return DataProto(row_ids=batch.row_ids)
        column_of_values = Ragged.from_lengths(outputs[0].contiguous(), batch.lengths("response_ids"))
        return DataProto({"old_values": column_of_values}, row_ids=batch.row_ids)

    @register(dispatch=split_over("train", balance="response_ids"))
    def update(self, batch: DataProto) -> DataProto:
        """One optimizer step on a mini-batch with `old_values` and `returns`; rows come back with metrics only."""
        result = self._engine.train(batch, self._token_loss, self._config.aggregation)
        metrics = step_metrics("value", result, first_replica=self._engine.at.dp == 0)
        metrics |= token_metrics(result.stats, result.num_tokens, {"clipped": "value/clip_fraction"}, "value")
        return DataProto(row_ids=batch.row_ids, metrics=metrics)

    def _token_loss(
        self, outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        old_values = column(columns, "old_values", "critic.values")
        returns = column(columns, "returns", "the driver's advantage phase")
        loss, clipped = value_loss(outputs[0], old_values, returns, self._config.value_clip)
        return loss, {"clipped": clipped}
