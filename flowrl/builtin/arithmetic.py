"""The built-in task: two digits plus one digit, `37+5=` to `042`, and its grader, an ordinary reward function."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

NUM_EVAL = 150
PROMPT_TOKENS = 5
ANSWER_DIGITS = 3


def train_rows() -> list[dict[str, Any]]:
    """The 750 training problems: rows with `id`, `prompt` and `answer`, ordered by their sum's operands."""
    held_out = set(_held_out())
    return [row for row in _all_rows() if row["prompt"] not in held_out]


def eval_rows() -> list[dict[str, Any]]:
    """The 150 held-out problems, in an order that mixes them; neither training nor the warm start sees them."""
    rows = {row["prompt"]: row for row in _all_rows()}
    return [rows[prompt] for prompt in _held_out()]


def score(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """1.0 where the response, without white space around it, is the row's `answer`; else 0.0."""
    return 1.0 if response.strip() == row["answer"] else 0.0


def _all_rows() -> list[dict[str, Any]]:
    return [_row(left, right) for left in range(10, 100) for right in range(10)]


def _row(left: int, right: int) -> dict[str, Any]:
    return {"id": f"{left}+{right}", "prompt": f"{left}+{right}=", "answer": f"{left + right:0{ANSWER_DIGITS}d}"}


def _held_out() -> list[str]:
    """Chosen by a hash, so the split is the same on every machine and for every Python version."""
    prompts = [row["prompt"] for row in _all_rows()]
    return sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())[:NUM_EVAL]
