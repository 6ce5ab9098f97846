from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "<turn> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}{% if add_generation_prompt %}<turn> assistant{% endif %}"
)
SPECIAL = ("<pad>", "<bos>", "<eos>", "<end>", "<turn>", "<unk>")
WORDS = (*SPECIAL, "user", "assistant", *(f"w{i}" for i in range(112)))


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """A model folder with a word-level tokenizer of 120 entries; "w0".."w111" are one token each."""

    def make(
        name: str = "model", template: str | None = TEMPLATE, bos: bool = False, eos: bool = False, config_eos: Any = None,
        generation_eos: Any = None, words: Sequence[str] = WORDS,
    ) -> Path:  # fmt: skip
        folder = tmp_path / name
        core = Core(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if bos or eos:
            parts = f"{'<bos> ' if bos else ''}$A{' <eos>' if eos else ''}"
            core.post_processor = processors.TemplateProcessing(
                single=parts, special_tokens=[("<bos>", 1), ("<eos>", 2)]
            )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
            additional_special_tokens=["<end>", "<turn>"], chat_template=template,
        )  # fmt: skip
        fast.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": config_eos}))
        if generation_eos is not None:
            (folder / "generation_config.json").write_text(
                json.dumps({"eos_token_id": generation_eos, "do_sample": True})
            )
        return folder

    return make


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines and returns the file's name."""

    def lines(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return lines
