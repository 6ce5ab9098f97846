from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from flowrl.config import compose as compose_module
from flowrl.config.machine import Machine

LAPTOP = Machine(cpus=2, memory_bytes=8 * 2**30, shared_memory_bytes=4 * 2**30)
BASE = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 131,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every machine that runs these tests is the same one."""
    monkeypatch.setattr(compose_module, "find_machine", lambda: LAPTOP)


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """A model folder with nothing but a config.json: the base model with changes."""

    def make(name: str = "model", **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        config: Mapping[str, Any] = {**BASE, **changes}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make
