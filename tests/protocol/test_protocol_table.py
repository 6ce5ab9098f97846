"""The algebra of batches: what each operation keeps, and which undo each other."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.protocol import DataProto, LocalBlock, Metric, MissingColumnError, Ragged, Stored, merge_metrics


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0) -> DataProto:
    """A batch with a ragged, a dense, a bfloat16 and a stored column, values, meta and a metric."""
    rows = draw(st.lists(st.lists(st.integers(-9, 9), max_size=4), min_size=min_rows, max_size=8))
    prompts = draw(st.lists(st.sampled_from("abcd"), min_size=len(rows), max_size=len(rows)))
    column = Ragged.from_rows(rows, torch.int64)
    return DataProto(
        {
            "response_ids": column,
            "dense": torch.arange(len(rows) * 2).reshape(len(rows), 2),
            "half": torch.arange(len(rows)).to(torch.bfloat16),
            "stored": Stored.whole(LocalBlock(Ragged(column.values * 10, column.offsets))),
        },
        values={"prompt_id": prompts, "row": [{"i": i} for i in range(len(rows))]},
        meta={"step": 3},
        metrics={"m": Metric.mean(1, 2)},
    )


def content(batch: DataProto) -> dict[str, list[object]]:
    """Every row of every column as plain Python, by name."""
    columns = {n: batch[n] for n in batch.names}
    plain = {n: [r.tolist() for r in (c.rows() if isinstance(c, Ragged) else c)] for n, c in columns.items()}
    return {**plain, **batch.values, "row_ids": list(batch.row_ids)}


def row_of(batch: DataProto, i: int) -> dict[str, object]:
    return {name: rows[i] for name, rows in content(batch).items()}


@given(batches(), st.integers(1, 10))
def test_concat_undoes_chunk_and_split(batch, n):
    assert content(DataProto.concat(batch.chunk(n))) == content(batch)
    sizes = [len(part) for part in batch.chunk(n)]
    assert len(sizes) == n and max(sizes) - min(sizes) <= 1
    if len(batch):
        assert content(DataProto.concat(batch.split(n))) == content(batch)
        assert all(len(part) == n for part in batch.split(n)[:-1])


@given(batches(), st.randoms(use_true_random=False))
def test_reorder_is_undone_by_the_inverse(batch, random):
    order = list(range(len(batch)))
    random.shuffle(order)
    shuffled = batch.reorder(order)
    assert all(row_of(shuffled, i) == row_of(batch, order[i]) for i in range(len(batch)))
    back = shuffled.reorder(torch.argsort(torch.tensor(order, dtype=torch.int64)))
    assert content(back) == content(batch) and back.metrics == batch.metrics


@given(batches(), st.integers(1, 3))
def test_repeat_interleaves_and_names_the_copies(batch, n):
    repeated = batch.repeat(n)
    for i in range(len(repeated)):
        expected = {**row_of(batch, i // n), "row_ids": f"{batch.row_ids[i // n]}/{i % n}"}
        assert row_of(repeated, i) == expected
    once = repeated.filter([i % n == 0 for i in range(len(repeated))])
    assert {**content(once), "row_ids": None} == {**content(batch), "row_ids": None}


@given(batches(), st.data())
def test_filter_keeps_marked_rows_in_order(batch, data):
    mask = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
    kept = batch.filter(mask)
    assert kept.row_ids == tuple(r for r, keep in zip(batch.row_ids, mask, strict=True) if keep)
    rest = batch.filter([not keep for keep in mask])
    assert sorted(kept.row_ids + rest.row_ids) == sorted(batch.row_ids)


@given(batches(min_rows=1), st.integers(1, 5))
def test_unpad_undoes_pad_even_after_shuffling(batch, k):
    padded = batch.pad_to_multiple(k)
    assert len(padded) % k == 0 and len(padded) - len(batch) < k
    assert content(padded.unpad()) == content(batch)
    turned = padded.reorder(list(range(len(padded)))[::-1]).unpad()
    assert turned.row_ids == batch.row_ids[::-1]


@given(batches())
def test_union_joins_what_select_parted(batch):
    left, right = batch.select("response_ids", "prompt_id"), batch.drop("response_ids", "prompt_id")
    assert content(left.union(right)) == {name: content(batch)[name] for name in content(left.union(right))}
    assert set(left.union(right).names) == set(batch.names)


@given(batches())
def test_pickling_keeps_everything(batch):
    back = pickle.loads(pickle.dumps(batch))
    assert content(back) == content(batch) and back.meta == batch.meta and back.metrics == batch.metrics
    assert back["half"].dtype == torch.bfloat16


@given(batches(min_rows=1))
def test_tensordict_keeps_everything(batch):
    back = DataProto.from_tensordict(batch.to_tensordict())
    assert content(back) == content(batch) and back.meta == batch.meta and back.metrics == batch.metrics


@given(batches(min_rows=1), st.integers(1, 3), st.integers(0, 5), st.randoms(use_true_random=False))
def test_minibatches_hold_whole_prompts_and_do_not_depend_on_row_order(batch, prompts, seed, random):
    parts = batch.minibatches(prompts, (seed, 1))
    assert sorted(r for part in parts for r in part.row_ids) == sorted(batch.row_ids)
    groups = [set(part.values["prompt_id"]) for part in parts]
    assert all(len(group) == prompts for group in groups[:-1]) and len(set().union(*groups)) == sum(map(len, groups))
    assert [p.meta["num_rows_global"] for p in parts] == [len(p) for p in parts]
    assert [p.meta["num_tokens_global"] for p in parts] == [len(p["response_ids"].values) for p in parts]
    order = list(range(len(batch)))
    random.shuffle(order)
    again = batch.reorder(order).minibatches(prompts, (seed, 1))
    assert [set(p.row_ids) for p in again] == [set(p.row_ids) for p in parts]
    unshuffled = batch.minibatches(prompts, (seed,), shuffle=False)
    assert unshuffled[0].values["prompt_id"][0] == batch.values["prompt_id"][0]


def test_missing_column_says_what_is_there():
    """API-02: a ValueError that names the column and lists the columns and values."""
    batch = DataProto({"x": torch.ones(2)}, values={"tag": ["a", "b"]})
    for look in (lambda: batch["y"], lambda: batch.lengths("y"), lambda: batch.values["y"], lambda: batch.select("y")):
        with pytest.raises(MissingColumnError, match="'y'.*tag"):
            look()
    with pytest.raises(ValueError, match="dense"):
        batch.lengths("x")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda b: b.union(b.rows([1, 0])), "row 0 is '0' in one and '1'"),
        (lambda b: b.union(b.rows([0])), "2 and 1 rows"),
        (lambda b: b.union(b), "two of each of"),
        (lambda b: b.with_meta(m=1).union(b.drop("x").with_meta(m=2)), "meta 'm' differs"),
        (lambda b: DataProto.concat([b, b]), "must be unique"),
        (lambda b: DataProto.concat([b, b.drop("x")]), "different tables"),
        (lambda b: b.reorder([0, 0]), "every row once"),
        (lambda b: b.with_columns(y=torch.ones(3)), "'y': 3"),
        (lambda b: b.filter([True]), "filter mask"),
        (lambda b: b.rows([2]), "batch of 2 rows"),
        (lambda b: DataProto.concat([b, b.with_columns(x=torch.ones(2).int()).repeat(2)]), "'x'.*different kinds"),
    ],
)
def test_what_would_mix_rows_up_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong(DataProto({"x": torch.ones(2)}))


def test_a_pending_batch_waits_once_and_only_when_looked_into():
    waits = []

    def wait() -> DataProto:
        waits.append(1)
        return DataProto({"x": torch.ones(2)})

    batch = DataProto.pending(wait)
    assert repr(batch) == "DataProto(pending)" and not waits
    assert len(batch) == 2 and batch.names == ("x",) and batch.select("x").row_ids == ("0", "1")
    assert len(waits) == 1


def test_metrics_merge_with_their_denominators():
    parts = [
        {"a": Metric.mean(1, 1), "b": Metric.max(3), "c": Metric.sum(1)},
        {"a": Metric.mean(1, 3), "b": Metric.max(2)},
    ]
    merged = merge_metrics(parts)
    assert merged["a"].value == 0.5 and merged["b"].value == 3 and merged["c"].value == 1
    assert Metric.mean(0, 0).value == 0 and Metric.min(2).merge(Metric.min(1)).value == 1
    with pytest.raises(ValueError, match="'a' is a mean in one part and a sum"):
        merge_metrics([{"a": Metric.mean(1, 1)}, {"a": Metric.sum(1)}])


def test_what_is_no_index_and_no_mask_is_refused() -> None:
    batch = DataProto({"a": torch.arange(3)})
    for indices in ([True, False, True], [0.9, 1.7], torch.tensor([0.0]), torch.tensor(1)):
        with pytest.raises(ValueError, match="whole numbers"):
            batch.rows(indices)
    with pytest.raises(ValueError, match="whole numbers"):
        batch.reorder([0.2, 1.2, 2.9])  # type: ignore[list-item]
    for mask in ([2, 0, 5], [float("nan"), 0.0, 0.1], [1, 0, 1]):
        with pytest.raises(ValueError, match="one bool for each"):
            batch.filter(mask)  # type: ignore[arg-type]
    assert batch.rows([]).row_ids == () and batch.filter([True, False, True]).row_ids == ("0", "2")
    assert batch.rows(torch.tensor([2, 0], dtype=torch.int32))["a"].tolist() == [2, 0]


@pytest.mark.parametrize(
    "given",
    [dict(columns={"a": "abc"}), dict(columns={"a": [1, 2]}), dict(columns={"a": torch.tensor(1)}),
     dict(values={"a": "abc"}), dict(values={"a": {"x": 1}}), dict(values={"a": {1, 2}}),
     dict(values={"a": [1, 2]}, row_ids="ab")],
)  # fmt: skip
def test_text_and_tables_are_no_rows(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a (tensor|list)"):
        DataProto(**given)


def test_padding_can_be_padded_and_joined() -> None:
    parts = [DataProto({"a": torch.arange(3)}, row_ids=[f"{name}{i}" for i in range(3)]) for name in "xy"]
    padded = [part.pad_to_multiple(2) for part in parts]
    both = DataProto.concat(padded).pad_to_multiple(5)
    assert len(both) == 10 and both.unpad().row_ids == (*parts[0].row_ids, *parts[1].row_ids)
    for k in (0, -2):
        with pytest.raises(ValueError, match="at least 1"):
            parts[0].pad_to_multiple(k)


def test_equal_arrays_and_nan_do_not_differ() -> None:
    def table(value: Any, metric: float, column: str) -> DataProto:
        return DataProto({column: torch.arange(2)}, meta={"m": value}, metrics={"x": Metric.max(metric)})

    nan = float("nan")
    for same in (lambda: torch.tensor([1.0, 2.0]), lambda: np.arange(3), lambda: float("nan")):
        table(same(), nan, "a").union(table(same(), float("nan"), "b"))
    for one, other in ((torch.tensor([1]), torch.tensor([2])), (torch.tensor([1]), 1), (np.arange(2), np.arange(3))):
        with pytest.raises(ValueError, match="meta 'm' differs"):
            table(one, 1.0, "a").union(table(other, 1.0, "b"))


def test_the_column_that_does_not_fit_is_named() -> None:
    parts = [DataProto({"a": torch.zeros(1, 2)}), DataProto({"a": torch.zeros(1, 3)}, row_ids=["x"])]
    with pytest.raises(ValueError, match="column 'a'"):
        DataProto.concat(parts)


@pytest.mark.parametrize("kind", [Metric.max, Metric.min, Metric.sum])
def test_a_figure_that_is_none_stays_so_in_any_order(kind: Any) -> None:
    nan = float("nan")
    assert all(math.isnan(a.merge(b).value) for a, b in ((kind(1.0), kind(nan)), (kind(nan), kind(1.0))))
