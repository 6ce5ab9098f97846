"""The frozen policy that the KL term looks at."""

from __future__ import annotations

from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import ReferenceConfig
from flowrl.protocol import DataProto, Ragged
from flowrl.single_controller.dispatch import split_over
from flowrl.single_controller.worker import register
from flowrl.workers.trained import EngineWorker


class ReferenceWorker(EngineWorker):
    """Log-probs of a policy that does not change. Mesh "train": one slice per replica of the model."""

    def __init__(
        self,
        model_path: str,
        shape: ModelShape,
        config: ReferenceConfig,
        *,
        temperature: float,
        num_tokenizer_ids: int,
        seed: int,
    ) -> None:
        """Read the model; arguments and errors as those of the actor."""
        from flowrl.workers.engine import Engine
        from flowrl.workers.heads import PolicyHead

        head = PolicyHead(min(num_tokenizer_ids, shape.vocab_size), temperature)
        self._engine = Engine(model_path, shape, config, head, device=self.device, seed=seed)

    @register(dispatch=split_over("train", balance="response_ids"))
    def log_probs(self, batch: DataProto) -> DataProto:
        """Column `reference_log_probs` over the response tokens, nats, at the sampling temperature."""
        outputs = self._engine.forward(batch)
        if outputs is None:
            return DataProto(row_ids=batch.row_ids)
        column = Ragged.from_lengths(outputs[0].contiguous(), batch.lengths("response_ids"))
        return DataProto({"reference_log_probs": column}, row_ids=batch.row_ids)
