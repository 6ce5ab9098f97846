"""Cutting the rows of a call into micro-batches: integers first, then packed tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from flowrl.protocol import DataProto, Ragged
from flowrl.workers.heads import Selection
from flowrl.workers.packed import PackedRows

logger = logging.getLogger(__name__)


def plan_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of each micro-batch, such that it has at most `max_tokens`.

    `lengths` are tokens of prompt and response. Rows of similar length come together, longest first, so the micro-batch
    whose attention costs most comes first. A row that alone exceeds the budget gets its own micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    plan: list[list[int]] = []
    tokens = 0
    for row in order:
        if plan and tokens + lengths[row] <= max_tokens:
            plan[-1].append(row)
        else:
            plan.append([row])
            tokens = 0
        tokens += lengths[row]
    return plan


def fill(plan: list[list[int]], count: int) -> list[list[int]]:
    """The plan with empty micro-batches appended until there are `count`, the number all replicas agreed on."""
    assert len(plan) <= count, f"{len(plan)} micro-batches planned, {count} agreed"
    return plan + [[] for _ in range(count - len(plan))]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a call one behind the other. S tokens in all, T of responses.

    `rows` [B] are row numbers of the call; `token_ids` [1, S] int64; `packed` says where rows begin; `lengths` [B]
    response tokens per row; `selection` names the T places that predict the response tokens, row by row.
    """

    rows: list[int]
    token_ids: torch.Tensor
    packed: PackedRows
    lengths: torch.Tensor
    selection: Selection

    @property
    def num_tokens(self) -> int:
        """Response tokens."""
        return len(self.selection.targets)


def make_microbatch(
    rows: list[int],
    prompts: Sequence[torch.Tensor],
    responses: Sequence[torch.Tensor],
    device: torch.device,
    multiple: int = 1,
) -> MicroBatch:
    """Pack the given rows, with padding at the end of the last one up to a `multiple`.

    No rows at all make one row of one token without response: work of weight zero, which a replica without rows does so
    that collectives meet.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    pairs = [(prompts[row], responses[row]) for row in rows] or [(torch.zeros(1, dtype=torch.int64), nothing)]
    token_ids = torch.cat([ids for pair in pairs for ids in pair])
    padding = -len(token_ids) % multiple
    whole = [len(prompt) + len(response) for prompt, response in pairs]
    lengths = torch.tensor([len(response) for _, response in pairs], dtype=torch.int64)
    # Before token j of all responses lie j of them, and the prompts up to that of its row.
    prompt_tokens = torch.tensor([len(prompt) for prompt, _ in pairs]).cumsum(0)
    own = torch.repeat_interleave(prompt_tokens, lengths) + torch.arange(int(lengths.sum()))
    selection = Selection(positions=(own - 1).to(device), targets=token_ids[own].to(device))
    whole[-1] += padding
    padded = torch.nn.functional.pad(token_ids, (0, padding))
    return MicroBatch(rows, padded[None].to(device), PackedRows(whole, device), lengths, selection)


def token_rows(
    batch: DataProto, max_tokens: int, num_ids: int
) -> tuple[list[int], list[torch.Tensor], list[torch.Tensor]]:
    """(tokens per row, prompts, responses) of a batch, with a warning for rows over the budget.

    Errors: `ValueError` for an empty prompt and for ids outside the vocabulary of `num_ids`, with the row's id.
    """
    prompts, responses = ragged(batch, "prompt_ids").rows(), ragged(batch, "response_ids").rows()
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if not len(prompt):
            raise ValueError(f"row {batch.row_ids[row]} has an empty prompt: its first token has no predecessor")
        largest = max(int(ids.max()) for ids in (prompt, response) if len(ids))
        if largest >= num_ids:
            raise ValueError(f"row {batch.row_ids[row]} holds token id {largest}; the model's vocabulary is {num_ids}")
    if lengths and max(lengths) > max_tokens:
        logger.warning(
            "a row of %d tokens exceeds tokens_per_microbatch=%d and runs alone; memory may not suffice",
            max(lengths), max_tokens,
        )  # fmt: skip
    return lengths, prompts, responses


def ragged(batch: DataProto, name: str) -> Ragged:
    """A ragged column. Errors: `ValueError` where it is dense."""
    column = batch[name]
    if not isinstance(column, Ragged):
        raise ValueError(f"column {name} must be ragged (a row per sample), it is dense {tuple(column.shape)}")
    return column


class TokenColumns(Mapping[str, torch.Tensor]):
    """The columns of some rows as a loss sees them: each [T], tokens in the order of the micro-batch's selection.

    Dense [N] columns are repeated over a row's tokens. A column is read when it is asked for, so what a loss does not
    use is not moved. Errors, on reading: `ValueError` naming row and lengths where a ragged column does not match the
    responses, and naming the shape where a dense column is not [N].
    """

    def __init__(self, batch: DataProto, rows: Sequence[int], device: torch.device) -> None:
        self._batch = batch
        self._rows = rows
        self._device = device

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._batch.names if name != "prompt_ids")

    def __contains__(self, name: object) -> bool:
        return name in list(iter(self))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self:
            raise KeyError(name)
        column, index = self._batch[name], torch.tensor(list(self._rows), dtype=torch.int64)
        lengths = self._batch.lengths("response_ids")[index]
        if isinstance(column, Ragged):
            own = column.lengths[index]
            wrong = (own != lengths).nonzero().flatten().tolist()
            if wrong:
                raise ValueError(
                    f"row {self._batch.row_ids[self._rows[wrong[0]]]}: column {name} has {int(own[wrong[0]])} values for "
                    f"{int(lengths[wrong[0]])} response tokens"
                )
            values = column.select(index).values
        elif column.dim() == 1:
            values = torch.repeat_interleave(column[index], lengths)
        else:
            raise ValueError(f"column {name} has shape {tuple(column.shape)}; a loss takes [N] or one value per token")
        return values.to(self._device)
