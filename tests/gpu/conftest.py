"""Tests that need a CUDA device; `make test-gpu` runs them with the host's own Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Models, batches and scenarios are those of the CPU tests.
sys.path.insert(0, str(Path(__file__).parent.parent / "workers"))

from models import make_batch, make_model  # noqa: E402

from flowrl.protocol import DataProto  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("gpu") / "tiny")


WIDE_VOCAB = 151936
WIDE = dict(
    hidden_size=1536,
    num_hidden_layers=2,
    num_attention_heads=12,
    num_key_value_heads=2,
    head_dim=128,
    intermediate_size=8960,
    vocab_size=WIDE_VOCAB,
    initializer_range=0.02,
    tie_word_embeddings=True,
)
"""Two layers of Qwen2.5-1.5B."""


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("gpu") / "wide", "Qwen2", **WIDE)


@pytest.fixture(scope="session")
def batch() -> DataProto:
    return make_batch([(3, 7), (6, 2), (2, 1), (9, 4), (4, 9)])
