"""Which rows make a mini-batch: integers only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def cut_by_prompt(row_prompts: Sequence[str], prompts: int, seed: tuple[int, ...], shuffle: bool) -> list[list[int]]:
    """Row numbers of parts of ``prompts`` prompts (last one shorter), all rows of a prompt in one part, in row order.

    With shuffle the order of prompts is drawn from the seed and the set of prompts alone, so it does not depend on the
    order of rows; without, prompts come in the order of their first row.
    """
    if prompts < 1:
        raise ValueError(f"mini-batches of {prompts} prompts: at least 1")
    order = list(dict.fromkeys(row_prompts))
    if shuffle:
        order.sort()
        order = [order[i] for i in np.random.default_rng(list(seed)).permutation(len(order))]
    part_of = {prompt: number // prompts for number, prompt in enumerate(order)}
    parts: list[list[int]] = [[] for _ in range(-(-len(order) // prompts))]
    for row, prompt in enumerate(row_prompts):
        parts[part_of[prompt]].append(row)
    return parts
