from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.protocol import DataProto, Ragged
from flowrl.workers.microbatch import TokenColumns, fill, make_microbatch, plan_microbatches, token_rows

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_plan_holds_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    plan = plan_microbatches(lengths, budget)
    assert sorted(row for part in plan for row in part) == list(range(len(lengths)))
    for part in plan:
        assert len(part) == 1 or sum(lengths[row] for row in part) <= budget
    longest = [max(lengths[row] for row in part) for part in plan]
    assert longest == sorted(longest, reverse=True)


def test_replica_with_fewer_micro_batches_takes_empty_ones() -> None:
    """PAR-02."""
    assert fill([[2, 0]], 3) == [[2, 0], [], []]


def test_rows_are_packed_and_only_generated_tokens_are_chosen() -> None:
    """MSK-01: the length is what was generated; a row that never ended is not longer, padding takes no part."""
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    responses = [torch.tensor([5, 6]), torch.tensor([7, 8, 9])]
    made = make_microbatch([0, 1], prompts, responses, CPU)
    assert made.token_ids.tolist() == [[1, 2, 3, 5, 6, 4, 7, 8, 9]]
    assert made.packed.starts.tolist() == [0, 5, 9] and made.packed.longest == 5
    assert made.selection.positions.tolist() == [2, 3, 5, 6, 7]
    assert made.selection.targets.tolist() == [5, 6, 7, 8, 9]
    padded = make_microbatch([1, 0], prompts, responses, CPU, multiple=4)
    assert padded.token_ids.tolist() == [[4, 7, 8, 9, 1, 2, 3, 5, 6, 0, 0, 0]]
    assert padded.packed.starts.tolist() == [0, 4, 12]
    assert padded.selection.positions.tolist() == [0, 1, 2, 6, 7] and padded.lengths.tolist() == [3, 2]


def test_row_without_response_is_packed_like_the_others() -> None:
    made = make_microbatch(
        [0, 1], [torch.tensor([1, 2]), torch.tensor([3])], [torch.empty(0).long(), torch.tensor([4])], CPU
    )
    assert made.packed.starts.tolist() == [0, 2, 4] and made.selection.positions.tolist() == [2]


def test_empty_micro_batch_is_one_row_without_response() -> None:
    made = make_microbatch([], [], [], CPU)
    assert made.token_ids.shape == (1, 1) and made.num_tokens == 0 and made.lengths.tolist() == [0]
    assert make_microbatch([], [], [], CPU, multiple=2).packed.starts.tolist() == [0, 2]


def table(**columns: object) -> DataProto:
    rows = {"prompt_ids": Ragged.from_rows([[1], [2, 3]]), "response_ids": Ragged.from_rows([[4, 5], [6]])}
    return DataProto({**rows, **columns}, row_ids=["a", "b"])  # type: ignore[arg-type]


def test_columns_of_a_loss_follow_the_rows_of_the_micro_batch() -> None:
    """PAR-03: dense columns are repeated over a row's tokens."""
    batch = table(advantages=Ragged.from_rows([[0.1, 0.2], [0.3]]), score=torch.tensor([1.0, 2.0]))
    columns = TokenColumns(batch, [1, 0], CPU)
    assert columns["advantages"].tolist() == pytest.approx([0.3, 0.1, 0.2])
    assert columns["score"].tolist() == [2.0, 1.0, 1.0]
    assert "prompt_ids" not in columns and set(columns) == {"response_ids", "advantages", "score"}


def test_column_that_does_not_match_the_responses_is_an_error_with_the_row() -> None:
    batch = table(advantages=Ragged.from_rows([[0.1, 0.2], [0.3, 0.4]]))
    with pytest.raises(ValueError, match="row b: column advantages has 2 values for 1 response tokens"):
        TokenColumns(batch, [0, 1], CPU)["advantages"]


def test_ids_outside_the_vocabulary_and_empty_prompts_are_errors_with_the_row() -> None:
    with pytest.raises(ValueError, match="row b holds token id 6; the model's vocabulary is 6"):
        token_rows(table(), 100, 6)
    with pytest.raises(ValueError, match="row 0 has an empty prompt"):
        token_rows(
            DataProto({"prompt_ids": Ragged.from_rows([[]], torch.int64), "response_ids": Ragged.from_rows([[1]])}),
            9,
            9,
        )


def test_row_over_the_budget_runs_alone_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        lengths, *_ = token_rows(table(), 2, 10)
    assert plan_microbatches(lengths, 2) == [[0], [1]]
    assert "a row of 3 tokens exceeds tokens_per_microbatch=2" in caplog.text
