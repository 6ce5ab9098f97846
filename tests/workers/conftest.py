from __future__ import annotations

from pathlib import Path

import pytest
from models import FAMILIES, MIXTURES, make_batch, make_model

from flowrl.protocol import DataProto


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of one model per family, mixtures among them (untied), and of a tied Llama."""
    root = tmp_path_factory.mktemp("models")
    folders = {family: make_model(root / family, family) for family in (*FAMILIES, *MIXTURES)}
    folders["tied"] = make_model(root / "tied", tie_word_embeddings=True)
    return folders


@pytest.fixture(scope="session")
def batch() -> DataProto:
    """Five rows of different lengths, so no split over ranks is even."""
    return make_batch([(3, 7), (6, 2), (2, 1), (9, 4), (4, 9)])
