from __future__ import annotations

import subprocess
import sys

import pytest

from flowrl.builtin.arithmetic import eval_rows, score, train_rows


def test_problems_are_split_once_and_completely() -> None:
    train, held_out = train_rows(), eval_rows()
    assert len(train) == 750 and len(held_out) == 150
    ids = [row["id"] for row in train + held_out]
    assert len(set(ids)) == 900
    assert eval_rows() == held_out and train_rows() == train


def test_rows_hold_prompt_and_three_digit_answer() -> None:
    rows = {row["prompt"]: row for row in train_rows() + eval_rows()}
    assert rows["37+5="] == {"id": "37+5", "prompt": "37+5=", "answer": "042"}
    assert rows["99+9="]["answer"] == "108"
    assert all(len(row["prompt"]) == 5 and len(row["answer"]) == 3 for row in rows.values())


@pytest.mark.parametrize(
    ("response", "expected"), [("042", 1.0), (" 042\n", 1.0), ("42", 0.0), ("043", 0.0), ("", 0.0), ("0420", 0.0)]
)
def test_only_the_right_answer_scores(response: str, expected: float) -> None:
    assert score("37+5=", response, {"answer": "042"}) == expected


def test_grader_needs_neither_torch_nor_ray() -> None:
    """Reward processes start in a fraction of a second only while the grader stays light."""
    code = (
        "import sys, flowrl.builtin.arithmetic; print(*({'torch', 'ray', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert done.stdout.split() == []
