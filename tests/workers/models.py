"""Batches, and tiny random Hugging Face models: hidden 64, 4 heads of 32, 2 key/value heads, prime vocabulary 131, float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flowrl.protocol import DataProto, Ragged

VOCAB = 131
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
MIXTURES = ("Qwen3Moe", "Mixtral")


def make_model(folder: Path, family: str = "Llama", *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Write the model and return its folder."""
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
    if family == "Qwen3Moe":
        settings |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    if family == "Mixtral":
        settings |= {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": None}
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


def folder_names(tensors: Mapping[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Tensors by their names in the folder, from those of a transformers model, which stacks the experts of a layer."""
    layer = "block_sparse_moe" if family == "Mixtral" else "mlp"
    parts = ("w1", "w3", "w2") if family == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, tensor in tensors.items():
        prefix = name.rpartition(".")[0].replace(".mlp.", f".{layer}.")
        if name.endswith(".experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, half in zip(parts[:2], both.chunk(2), strict=True):
                    found[f"{prefix}.{expert}.{part}.weight"] = half
        elif name.endswith(".experts.down_proj"):
            found |= {f"{prefix}.{expert}.{parts[2]}.weight": down for expert, down in enumerate(tensor)}
        else:
            found[name.replace(".mlp.gate.", f".{layer}.gate.")] = tensor
    return found


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
