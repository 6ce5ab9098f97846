"""Seeds of samples: functions of names only, so that a sample depends neither on layout nor on its neighbours."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from flowrl.protocol import DataProto


def sample_seeds(run_seed: int, step: int, prompt_ids: Sequence[str], sample_index: Sequence[int]) -> torch.Tensor:
    """[N] int64 in [0, 2^31): a stable hash of (run seed, step, prompt id, sample index) for each row."""
    pairs = zip(prompt_ids, sample_index, strict=True)
    return torch.tensor([_hash(run_seed, step, prompt, index) for prompt, index in pairs], dtype=torch.int64)


def _hash(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    # The only part of free length comes last, so different inputs never make the same text.
    text = f"{run_seed}/{step}/{sample_index}/{prompt_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % 2**31


def expand(prompts: DataProto, samples_per_prompt: int, run_seed: int, step: int) -> DataProto:
    """Every prompt `samples_per_prompt` times (a, a, b, b), with the dense column `seeds` [N] int64."""
    rows = prompts.repeat(samples_per_prompt)
    index = list(range(samples_per_prompt)) * len(prompts)
    return rows.with_columns(seeds=sample_seeds(run_seed, step, rows.values["prompt_id"], index))
