"""The policy that is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from flowrl.algorithms.losses import ClippedPolicyLoss, PolicyLossFn, TokenOutputs
from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import KL, ActorConfig, LossKL
from flowrl.protocol import DataProto, Metric, Ragged
from flowrl.resharding.families import HFTensor
from flowrl.resharding.layouts import common_places, train_sizes
from flowrl.resharding.ranks import ParallelSizes, RankPlace
from flowrl.resharding.transfer import Transfer
from flowrl.single_controller import Link
from flowrl.single_controller.dispatch import broadcast, split_over
from flowrl.single_controller.worker import register
from flowrl.workers.moves import Side, carry_out, transfer_from_trainer
from flowrl.workers.reporting import step_metrics, token_metrics
from flowrl.workers.trained import BUCKET_BYTES, TrainedWorker
from flowrl.workers.weights import HeldRegion

REPORTED = {"clipped": "policy/clip_fraction", "entropy": "policy/entropy", "approx_kl": "kl/approx", "kl": "kl/loss"}
"""Names under which per-token quantities of a loss appear in the metrics; others keep theirs, under `policy/`."""


def default_loss(config: ActorConfig, kl: KL) -> PolicyLossFn:
    """Clipped policy loss with the configured entropy bonus, and the KL term where it belongs to the loss."""
    return ClippedPolicyLoss(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
        entropy_coefficient=config.entropy_coefficient,
        kl_coefficient=kl.coefficient if isinstance(kl, LossKL) else None,
        kl_estimator=kl.estimator if isinstance(kl, LossKL) else "k3",
    )


class ActorWorker(TrainedWorker):
    """Trains the policy. Mesh "train": one slice per replica of the model."""

    def __init__(
        self,
        model_path: str,
        shape: ModelShape,
        config: ActorConfig,
        *,
        kl: KL,
        temperature: float,
        num_tokenizer_ids: int,
        total_optimizer_steps: int,
        seed: int,
        beside: ParallelSizes | None = None,
    ) -> None:
        """Read the model. `num_tokenizer_ids`: ids from there on are never sampled and have no probability here.

        `beside`: sizes of the engines on the same ranks; their order of ranks becomes this role's.

        Errors: `ValueError` where layout, world and model do not fit, or the folder does not fit the shape.
        """
        from flowrl.workers.engine import Engine
        from flowrl.workers.heads import PolicyHead

        self._config = config
        self._shape = shape
        self._loss = default_loss(config, kl)
        self._sizes = train_sizes(config.layout)
        places = None if beside is None else common_places(shape, self.world_size, self._sizes, beside)
        head = PolicyHead(min(num_tokenizer_ids, shape.vocab_size), temperature)
        self._engine = Engine(
            model_path,
            shape,
            config,
            head,
            device=self.device,
            seed=seed,
            optim=config.optim,
            total_steps=total_optimizer_steps,
            places=places,
        )
        self._transfer: Transfer | None = None
        self._engines: Link | None = None

    @register(dispatch=split_over("train", balance="response_ids"))
    def log_probs(self, batch: DataProto) -> DataProto:
        """Columns `old_log_probs` and `entropy` over the response tokens, nats, at the sampling temperature."""
        outputs = self._engine.forward(batch)
        if outputs is None:
            return DataProto(row_ids=batch.row_ids)
        lengths = batch.lengths("response_ids")
        columns = {
            name: Ragged.from_lengths(values.contiguous(), lengths)
            for name, values in zip(("old_log_probs", "entropy"), outputs, strict=True)
        }
        return DataProto(columns, row_ids=batch.row_ids)

    @register(dispatch=split_over("train", balance="response_ids"))
    def update(self, batch: DataProto, loss: PolicyLossFn | None = None) -> DataProto:
        """One optimizer step on a mini-batch; rows come back with metrics only.

        Needs `advantages` and `old_log_probs` (and `reference_log_probs` where the KL term is in the loss), or what the
        given `loss` asks for. A gradient that is not finite leaves weights and moments as they are on all ranks and
        counts in `policy/skipped_steps`.
        Errors: `ValueError` naming a column that the loss needs and the batch lacks.
        """
        policy_loss = loss or self._loss

        def token_loss(
            outputs: torch.Tensor, columns: Mapping[str, torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            value, reported = policy_loss(TokenOutputs(log_probs=outputs[0], entropy=outputs[1]), columns)
            return value, {"entropy": outputs[1].detach(), **reported}

        result = self._engine.train(batch, token_loss, self._config.aggregation)
        metrics = step_metrics("policy", result, first_replica=self._engine.at.dp == 0)
        metrics |= token_metrics(
            {name: stats for name, stats in result.stats.items() if name != "ratio"},
            result.num_tokens,
            REPORTED,
            "policy",
        )
        if "ratio" in result.stats:
            metrics["policy/ratio_min"] = Metric.min(result.stats["ratio"].least)
            metrics["policy/ratio_max"] = Metric.max(result.stats["ratio"].largest)
        return DataProto(row_ids=batch.row_ids, metrics=metrics)

    @register(dispatch=broadcast)
    def send_weights(self, engines: Link) -> None:
        """The trainer's half of a move to engines on another pool; `RolloutWorker.receive_weights` starts it there.

        Errors: those of the other half, on both pools.
        """
        held = self.held_regions()
        if self._transfer is None or self._engines is not engines:
            self._close_transfer()
            tensors = tuple((tensor.name, tensor.shape) for tensor in self.hf_tensors())
            side = Side(self._sizes, self.places(), tensors, self._engine.dtype)
            self._transfer = transfer_from_trainer(engines, side, self._shape, held, self.device)
            self._engines = engines
        carry_out(self._transfer, held, prove=False)

    def close(self) -> None:
        self._close_transfer()
        super().close()

    def _close_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.world.close()

    def sizes(self) -> ParallelSizes:
        return self._sizes

    def places(self) -> tuple[RankPlace, ...]:
        """The place of every rank in training."""
        return self._engine.places

    def hf_tensors(self) -> tuple[HFTensor, ...]:
        """All tensors of the model, in the order of `gather_layers`."""
        return self._engine.hf_tensors

    def held_regions(self) -> list[HeldRegion]:
        """Boxes of Hugging Face tensors that this rank holds, as views of its parameters."""
        return self._engine.weights.held_regions()

    def gather_layers(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Whole tensors on every rank, in buckets of about `bucket_bytes`. Collective."""
        return self._engine.weights.gather(self.hf_tensors(), bucket_bytes)
