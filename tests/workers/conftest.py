from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import FAMILIES, VOCAB, make_model

from flowrl.protocol import DataProto, Ragged


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of one model per family (untied), and of a tied Llama."""
    root = tmp_path_factory.mktemp("models")
    folders = {family: make_model(root / family, family) for family in FAMILIES}
    folders["tied"] = make_model(root / "tied", tie_word_embeddings=True)
    return folders


def make_batch(lengths: list[tuple[int, int]], seed: int = 0) -> DataProto:
    """Rows of random ids with (prompt, response) lengths, and advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (length,), generator=generator)

    return DataProto(
        {
            "prompt_ids": Ragged.from_rows([ids(prompt) for prompt, _ in lengths], dtype=torch.int64),
            "response_ids": Ragged.from_rows([ids(response) for _, response in lengths], dtype=torch.int64),
            "advantages": Ragged.from_rows([torch.randn(r, generator=generator) for _, r in lengths]),
        },
        row_ids=[f"row{i}" for i in range(len(lengths))],
    )


@pytest.fixture(scope="session")
def batch() -> DataProto:
    """Five rows of different lengths, so no split over ranks is even."""
    return make_batch([(3, 7), (6, 2), (2, 1), (9, 4), (4, 9)])
