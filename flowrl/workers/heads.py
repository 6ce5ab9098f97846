"""What sits on the last pipeline stage: token log-probs of the policy, values of the critic.

Both take the place of Megatron-core's `output_layer` and look at chosen positions only, so logits of prompts and of
padding are never computed. Which positions is told before each forward pass by `select`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel  # type: ignore[import-untyped]
from megatron.core.process_groups_config import ProcessGroupCollection  # type: ignore[import-untyped]
from megatron.core.tensor_parallel.mappings import (  # type: ignore[import-untyped]
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from flowrl.workers.vocabulary import token_outputs


@dataclass(frozen=True)
class Selection:
    """T response tokens of a micro-batch: the place whose hidden state predicts each, and its id; each [T]."""

    positions: torch.Tensor
    targets: torch.Tensor


class _Head(torch.nn.Module):
    """`sequence_parallel`: hidden states come cut along the sequence over the ranks of `group`."""

    def __init__(self, groups: ProcessGroupCollection, sequence_parallel: bool) -> None:
        super().__init__()
        self.group = groups.tp
        self.sequence_parallel = sequence_parallel
        self.selection: Selection | None = None

    def whole(self, hidden: torch.Tensor, *, partial_gradients: bool) -> torch.Tensor:
        """hidden: [s or s / tp, 1, h] -> [s, 1, h]. With `partial_gradients` each rank's gradient is a part of a sum
        over the ranks; otherwise all have the same one."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
                hidden, tensor_parallel_output_grad=partial_gradients, group=self.group
            )
        if partial_gradients:
            return copy_to_tensor_model_parallel_region(hidden, group=self.group)  # type: ignore[no-any-return]
        return hidden

    def select(self, selection: Selection) -> None:
        """Choose the tokens of the next forward pass."""
        self.selection = selection

    def chosen(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Selection]:
        """hidden: [s, 1, h] -> [T, h] at the chosen positions."""
        selection = self.selection
        assert selection is not None, "select() comes before forward()"
        self.selection = None
        return hidden[selection.positions, 0], selection


class LogProbHead(_Head):
    """Log-prob and entropy of the chosen tokens at the sampling temperature.

    `weight` is Megatron-core's output weight ([V, h] of this rank), or None where it is the embedding's and comes with
    each call.
    """

    def __init__(
        self,
        weight: torch.nn.Parameter | None,
        groups: ProcessGroupCollection,
        num_valid: int,
        temperature: float,
        *,
        sequence_parallel: bool,
    ) -> None:
        super().__init__(groups, sequence_parallel)
        self.weight = weight
        self.num_valid = num_valid
        self.temperature = temperature

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden: [s or s / tp, 1, h] -> ([T, 2] float32: log-prob, entropy; None)."""
        weight = self.weight if weight is None else weight
        assert weight is not None, "the tied weight comes with the call"
        chosen, selection = self.chosen(self.whole(hidden, partial_gradients=True))
        outputs = token_outputs(
            chosen,
            weight,
            selection.targets,
            first_id=self.group.rank() * weight.shape[0],
            num_valid=self.num_valid,
            temperature=self.temperature,
            group=self.group,
        )
        return torch.stack(outputs, dim=1), None


class ValueHead(_Head):
    """Value of the state before each chosen token: one linear map without bias, the same on every tensor-parallel rank.

    It starts at zero, so a new critic says 0 everywhere, in every layout.
    """

    def __init__(self, like: torch.Tensor, groups: ProcessGroupCollection, *, sequence_parallel: bool) -> None:
        """`like`: an output weight [V, h], whose width, type and device the new one takes."""
        super().__init__(groups, sequence_parallel)
        self.weight = torch.nn.Parameter(like.new_zeros(1, like.shape[1]))

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden: [s or s / tp, 1, h] -> ([T, 1] float32, None)."""
        chosen, _ = self.chosen(self.whole(hidden, partial_gradients=False))
        return (chosen @ self.weight.t()).float(), None


@dataclass(frozen=True)
class PolicyHead:
    """Says that a model's last stage gives log-prob and entropy, with these settings."""

    num_valid: int
    temperature: float
    is_language_model = True

    def build(self, model: GPTModel, groups: ProcessGroupCollection) -> LogProbHead:
        """The head over the model's own output weight, or over the embedding's where there is none."""
        return LogProbHead(
            model.output_layer.weight,
            groups,
            self.num_valid,
            self.temperature,
            sequence_parallel=model.config.sequence_parallel,
        )


@dataclass(frozen=True)
class CriticHead:
    """Says that a model's last stage gives values."""

    is_language_model = False

    def build(self, model: GPTModel, groups: ProcessGroupCollection) -> ValueHead:
        """A new head at zero."""
        weight = model.output_layer.weight.detach()
        return ValueHead(weight, groups, sequence_parallel=model.config.sequence_parallel)
