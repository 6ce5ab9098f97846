"""Mixtures of experts against transformers: log-probs and updates in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenarios import Cell
from test_log_probs import check

from flowrl.protocol import DataProto

TWO = [Cell(ep=2), Cell(tp=2), Cell(tp=2, etp=2), Cell(tp=2, ep=2), Cell(pp=2), Cell(budget=24)]
FOUR = [Cell(tp=2, ep=2), Cell(tp=2, ep=2, etp=2), Cell(tp=2, ep=4), Cell(pp=2, ep=2), Cell(tp=4, ep=2, etp=2)]


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_mixtures_give_the_log_probs_of_transformers(
    model_folder: dict[str, Path], batch: DataProto, family: str
) -> None:
    """ROL-01: one process, and every way to use two."""
    check(model_folder[family], batch, 1, [Cell(), Cell(budget=24)])
    check(model_folder[family], batch, 2, TWO)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_mixtures_on_four_ranks_give_the_log_probs_of_transformers(
    model_folder: dict[str, Path], batch: DataProto, family: str
) -> None:
    check(model_folder[family], batch, 4, FOUR)
