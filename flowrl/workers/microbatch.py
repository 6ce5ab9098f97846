"""Cutting the rows of a call into micro-batches: integers first, then padded tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from flowrl.protocol import DataProto, Ragged
from flowrl.workers.heads import Selection

logger = logging.getLogger(__name__)


def plan_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows of each micro-batch, such that (rows x longest row) is at most `max_tokens`.

    `lengths` are tokens of prompt and response. Rows of similar length come together, longest first, so padding is
    small and the largest micro-batch comes first. A row that alone exceeds the budget gets its own micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    plan: list[list[int]] = []
    for row in order:
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= max_tokens:
            plan[-1].append(row)
        else:
            plan.append([row])
    return plan


def fill(plan: list[list[int]], count: int) -> list[list[int]]:
    """The plan with empty micro-batches appended until there are `count`, the number all replicas agreed on."""
    assert len(plan) <= count, f"{len(plan)} micro-batches planned, {count} agreed"
    return plan + [[] for _ in range(count - len(plan))]


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded rows of a call. B rows, S longest, T response tokens in all.

    `rows` [B] are row numbers of the call; `token_ids` [B, S] int64; `lengths` [B] response tokens per row;
    `selection` names the T positions that predict the response tokens, row by row.
    """

    rows: list[int]
    token_ids: torch.Tensor
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
    """Pad the given rows to the longest, and that to a `multiple`. No rows at all make one row of one token without response: work of weight zero, which a
    replica without rows does so that collectives meet."""
    pairs = [(prompts[row], responses[row]) for row in rows] or [(torch.zeros(1, dtype=torch.int64), torch.empty(0))]
    lengths = torch.tensor([len(response) for _, response in pairs], dtype=torch.int64)
    longest = max(len(prompt) + len(response) for prompt, response in pairs)
    width = -(-longest // multiple) * multiple
    token_ids = torch.zeros(len(pairs), width, dtype=torch.int64)
    for row, (prompt, response) in enumerate(pairs):
        token_ids[row, : len(prompt)] = prompt
        token_ids[row, len(prompt) : len(prompt) + len(response)] = response
    total = int(lengths.sum())
    row_of_token = torch.repeat_interleave(torch.arange(len(pairs)), lengths)
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    first = torch.tensor([len(prompt) for prompt, _ in pairs], dtype=torch.int64)
    own = first[row_of_token] + torch.arange(total) - starts
    selection = Selection(
        rows=row_of_token.to(device), positions=(own - 1).to(device), targets=token_ids[row_of_token, own].to(device)
    )
    return MicroBatch(rows, token_ids.to(device), lengths, selection)


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
