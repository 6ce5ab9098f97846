"""Tiny random Hugging Face models: hidden 64, 4 heads of 32, 2 key/value heads, prime vocabulary 131, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 131
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def make_model(folder: Path, family: str = "Llama", *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Write the model and return its folder."""
    import torch
    import transformers

    settings: dict[str, Any] = dict(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    if family == "Mistral":
        settings["sliding_window"] = None
    if family == "Qwen2":
        # Qwen2 has no head_dim of its own: it is hidden_size / heads.
        settings |= {"hidden_size": 128}
    settings |= overrides
    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            # Fresh norms are all ones and fresh biases all zero: swapped or lost ones would not show.
            if "norm" in name or name.endswith("bias"):
                parameter.data += torch.randn_like(parameter) * 0.1
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"stands": "for any file"}')
    return folder
