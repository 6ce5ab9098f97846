"""One PPO update is a function of the global mini-batch: not of layout, replicas, micro-batches or row order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCAB, folder_names, make_batch, make_model
from processes import run
from scenarios import OPTIM, Cell, buffers, update_cells

from flowrl.algorithms.distributions import log_probs_and_entropy
from flowrl.algorithms.losses import ClippedPolicyLoss, TokenOutputs
from flowrl.algorithms.masked import row_weights
from flowrl.protocol import DataProto, Ragged
from flowrl.resharding.ranks import ParallelSizes

MANY, TWO = 13, 48
CONFIG: dict[str, Any] = {"entropy_coefficient": 0.01}
CELLS = {
    1: [Cell(), Cell(budget=TWO), Cell(budget=MANY), Cell(order=(4, 2, 0, 3, 1), budget=TWO), Cell(recompute=True)],
    2: [
        Cell(tp=2),
        Cell(tp=2, budget=MANY),
        Cell(pp=2),
        Cell(pp=2, budget=MANY),
        Cell(pp=2, vpp=2),
        Cell(pp=2, vpp=2, budget=MANY),
        Cell(pp=2, vpp=2, distributed_optimizer=True, recompute=True, budget=TWO),
        Cell(),
        Cell(budget=TWO),
        Cell(budget=MANY, order=(4, 2, 0, 3, 1)),
        Cell(distributed_optimizer=True, budget=MANY),
        Cell(tp=2, distributed_optimizer=True),
    ],
    4: [
        Cell(tp=2),
        Cell(tp=2, budget=MANY, order=(4, 2, 0, 3, 1)),
        Cell(tp=2, beside=ParallelSizes(tp=4)),
        Cell(tp=2, pp=2, budget=MANY),
        Cell(tp=2, pp=2, vpp=2, budget=MANY),
        Cell(pp=2, vpp=2, budget=TWO),
        Cell(tp=4),
    ],
}


@dataclass
class Expected:
    loss: float
    grad_norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def update_batch(batch: DataProto) -> DataProto:
    return with_old_log_probs(batch)


def with_old_log_probs(batch: DataProto) -> DataProto:
    """The batch with old log-probs around those of a uniform policy, so that ratios differ and some are clipped."""
    generator = torch.Generator().manual_seed(1)
    lengths = batch.lengths("response_ids")
    total = int(lengths.sum())
    return batch.with_columns(
        old_log_probs=Ragged.from_lengths(torch.randn(total, generator=generator) * 0.2 - 5.5, lengths)
    )


def hugging_face_update(folder: Path, batch: DataProto, aggregation: str = "token-mean", limit: int = 1) -> Expected:
    """The update by transformers and torch.optim.AdamW, row by row, straight from the definition."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    policy = ClippedPolicyLoss(clip_low=0.2, clip_high=0.2, dual_clip=3.0, **CONFIG)
    lengths = batch.lengths("response_ids")
    weights = row_weights(lengths, aggregation, num_tokens=int(lengths.sum()), num_rows=len(batch), max_tokens=limit)
    total = torch.zeros(())
    for row, (prompt, response) in enumerate(
        zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True)
    ):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        outputs = TokenOutputs(*log_probs_and_entropy(logits, response, 1.0, VOCAB))
        columns = {name: batch[name].rows()[row] for name in ("old_log_probs", "advantages")}
        total = total + (policy(outputs, columns)[0] * weights[row]).sum()
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_grad)
    torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, eps=OPTIM.eps, weight_decay=0.0).step()
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    family = type(model).__name__.removesuffix("ForCausalLM")
    return Expected(total.item(), grad_norm.item(), folder_names(gradients, family), folder_names(after, family))


def check(result: dict[str, Any], expected: Expected, cell: Cell) -> None:
    metrics = result["metrics"]
    assert metrics["policy/loss"] == pytest.approx(expected.loss, abs=1e-6), cell
    assert metrics["policy/grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5), cell
    assert metrics["policy/optimizer_steps"] == 1 and metrics["policy/skipped_steps"] == 0
    for name, gradient in result["gradients"].items():
        assert (gradient - expected.gradients[name]).norm() <= 1e-5 * expected.grad_norm, (cell, name)
    assert set(result["weights"]) == set(expected.weights)
    for name, weight in result["weights"].items():
        assert (weight - expected.weights[name]).norm() <= 1e-5 * weight.norm(), (cell, name)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_update_does_not_depend_on_layout_replicas_micro_batches_or_row_order(
    model_folder: dict[str, Path], update_batch: DataProto, world_size: int
) -> None:
    """ALG-01, BAT-01, PAR-02: five rows over two replicas and several numbers of micro-batches. PAR-04: tp=4."""
    expected = hugging_face_update(model_folder["Qwen3"], update_batch)
    cells = CELLS[world_size]
    for result in run(world_size, update_cells, model_folder["Qwen3"], cells, update_batch, CONFIG):
        for cell, one in zip(cells, result, strict=True):
            check(one, expected, cell)


def test_parameters_stay_in_one_piece_of_memory(model_folder: dict[str, Path], update_batch: DataProto) -> None:
    """flowrl's continuous buffer, and the distributed optimizer's own; moves read weights where they lie."""
    cells = [Cell(tp=2), Cell(tp=2, dtype="bfloat16"), Cell(pp=2, distributed_optimizer=True)]
    for found in run(2, buffers, model_folder["Qwen3"], cells, update_batch):
        assert found == [(1, 1, True)] * 3


@pytest.mark.parametrize("family", ["Qwen2", "tied"])
def test_update_of_biased_and_tied_models_does_not_depend_on_the_layout(
    model_folder: dict[str, Path], update_batch: DataProto, family: str
) -> None:
    """PAR-07: the two copies of a tied embedding learn as one."""
    expected = hugging_face_update(model_folder[family], update_batch)
    cells = [Cell(tp=2), Cell(pp=2, budget=TWO), Cell(pp=2, distributed_optimizer=True), Cell()]
    cells.append(Cell(pp=2, vpp=2))
    for cell, one in zip(
        cells, run(2, update_cells, model_folder[family], cells, update_batch, CONFIG)[0], strict=True
    ):
        check(one, expected, cell)


@pytest.mark.parametrize(
    ("world_size", "layers", "cells"),
    [
        (2, 5, [Cell(pp=2, budget=TWO), Cell(pp=2, first_stage_layers=2, distributed_optimizer=True)]),
        pytest.param(4, 8, [Cell(pp=4, vpp=2, budget=MANY), Cell(pp=2, vpp=4, budget=TWO)], marks=pytest.mark.slow),
    ],
    ids=["uneven", "interleaved"],
)
def test_update_of_a_tied_model_does_not_depend_on_the_cut_of_its_layers(
    tmp_path: Path, update_batch: DataProto, world_size: int, layers: int, cells: list[Cell]
) -> None:
    """PAR-07: five layers in stages of three and two or two and three; eight layers in eight chunks."""
    folder = make_model(tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=layers)
    expected = hugging_face_update(folder, update_batch)
    for cell, one in zip(cells, run(world_size, update_cells, folder, cells, update_batch, CONFIG)[0], strict=True):
        check(one, expected, cell)


@pytest.mark.slow
def test_update_of_a_single_key_value_head_does_not_depend_on_the_layout(
    tmp_path: Path, update_batch: DataProto
) -> None:
    """PAR-04: gradients of a head whose rows are on four ranks are summed once."""
    folder = make_model(tmp_path / "single", num_key_value_heads=1)
    expected = hugging_face_update(folder, update_batch)
    cells = [Cell(tp=4), Cell(tp=2), Cell(tp=2, beside=ParallelSizes(tp=4))]
    for cell, one in zip(cells, run(4, update_cells, folder, cells, update_batch, CONFIG)[0], strict=True):
        check(one, expected, cell)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum", "sum-norm"])
def test_every_aggregation_is_a_function_of_the_mini_batch(
    model_folder: dict[str, Path], update_batch: DataProto, aggregation: str
) -> None:
    """ALG-01."""
    batch = update_batch.with_meta(max_response_tokens=10)
    expected = hugging_face_update(model_folder["Llama"], batch, aggregation, 10)
    cells = [Cell(), Cell(budget=MANY), Cell(tp=2)]
    config = {**CONFIG, "aggregation": aggregation}
    for cell, one in zip(cells, run(2, update_cells, model_folder["Llama"], cells, batch, config)[0], strict=True):
        check(one, expected, cell)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_and_distributed_optimizer_learn_alike_in_both_types(
    model_folder: dict[str, Path], update_batch: DataProto, dtype: str
) -> None:
    """CPU-02: dp=2 and tp=2, float32 and bfloat16. Bit for bit without clipping, for the norm is summed in another order."""
    config = CONFIG | {"optim": replace(OPTIM, clip_grad=0.0)}
    cells = [Cell(tp=tp, dtype=dtype, distributed_optimizer=sharded) for tp in (1, 2) for sharded in (False, True)]
    expected = hugging_face_update(model_folder["Llama"], update_batch)
    results = run(2, update_cells, model_folder["Llama"], cells, update_batch, config)[0]
    tolerance = 1e-5 if dtype == "float32" else 0.1
    for cell, one in zip(cells, results, strict=True):
        assert one["metrics"]["policy/grad_norm"] == pytest.approx(expected.grad_norm, rel=tolerance), cell
    for plain, sharded in ((0, 1), (2, 3)):
        for name, weight in results[plain]["weights"].items():
            assert torch.equal(weight, results[sharded]["weights"][name]), name


def test_more_replicas_than_rows_learn_the_same(model_folder: dict[str, Path], update_batch: DataProto) -> None:
    """PAR-02: a replica without rows takes part with weight zero."""
    one_row = update_batch.rows([0])
    expected = hugging_face_update(model_folder["Llama"], one_row)
    for cell, one in zip(
        [Cell()], run(2, update_cells, model_folder["Llama"], [Cell()], one_row, CONFIG)[0], strict=True
    ):
        check(one, expected, cell)


def test_rows_without_response_change_nothing(model_folder: dict[str, Path], update_batch: DataProto) -> None:
    """REW-06: token-mean over the other rows; the empty ones weigh nothing."""
    empty = make_batch([(3, 0), (5, 0)], seed=5).with_columns(
        old_log_probs=Ragged.from_rows([torch.empty(0), torch.empty(0)])
    )
    renamed = DataProto(dict(empty.columns), row_ids=["empty0", "empty1"])
    mixed = DataProto.concat([update_batch, renamed]).rows([5, 0, 1, 2, 6, 3, 4])
    expected = hugging_face_update(model_folder["Llama"], update_batch)
    check_all: Callable[..., None] = check
    for cell, one in zip(
        [Cell(), Cell(budget=MANY)],
        run(2, update_cells, model_folder["Llama"], [Cell(), Cell(budget=MANY)], mixed, CONFIG)[0],
        strict=True,
    ):
        check_all(one, expected, cell)
