"""How `builtin:tiny` is made, as data: any change here gives the model another name in the cache."""

from __future__ import annotations

import hashlib
import json
import string
from dataclasses import asdict, dataclass

from flowrl.builtin.arithmetic import train_rows

FORMAT = 1
"""Raise when the way the folder is written changes while the recipe does not."""

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (PAD, EOS, UNKNOWN, *string.digits, *"+-*= \n.,:?!", *string.ascii_lowercase)
PAD_ID, EOS_ID = VOCABULARY.index(PAD), VOCABULARY.index(EOS)
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- message['content'] }}"
    "{%- if message['role'] == 'system' %}{{- '\\n' }}{% elif message['role'] == 'assistant' %}{{- eos_token }}{% endif %}"
    "{%- endfor %}"
)


@dataclass(frozen=True)
class TinyRecipe:
    """Sizes and warm start of the tiny Llama (0.13 million parameters).

    First `clean_steps` on right answers teach the ability; then `spoilt_steps`, in which `wrong_share` of the answers
    are off by up to `max_offset`, hide it: the greedy answer stays right, a sampled one mostly is not. That leaves
    reinforcement learning something to find, and something to find it with.
    """

    hidden_size: int = 64
    ffn_size: int = 192
    num_layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 128
    init_std: float = 0.02
    rows_per_step: int = 128
    clean_steps: int = 800
    clean_lr: float = 3e-3
    spoilt_steps: int = 150
    spoilt_lr: float = 5e-4
    wrong_share: float = 2 / 3
    max_offset: int = 10
    seed: int = 0

    @property
    def key(self) -> str:
        """Name of the folder in the cache: format and a hash of everything that decides the weights."""
        facts = [asdict(self), VOCABULARY, CHAT_TEMPLATE, train_rows()]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return f"tiny-{FORMAT}-{digest[:12]}"
