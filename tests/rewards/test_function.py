"""Finding, checking and reading reward functions: pure, no processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.rewards import batched
from flowrl.rewards.function import Batched, graded, graded_batch, resolve


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write_file(text: str) -> str:
        (tmp_path / "mine.py").write_text(text)
        return str(tmp_path / "mine.py")

    return write_file


def test_function_of_a_module_and_of_a_file_are_found(write: Callable[[str], str]) -> None:
    """REW-02."""
    assert resolve("flowrl.builtin.arithmetic:score")("1+1=", "002", {"answer": "002"}) == 1.0
    path = write("def f(prompt, response, row):\n    return 0.5\n")
    assert resolve(f"{path}:f")("", "", {}) == 0.5


def test_a_file_may_import_its_neighbour(tmp_path: Path, write: Callable[[str], str]) -> None:
    """REW-02."""
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 0.25\n")
    path = write("import neighbour_of_mine\ndef f(prompt, response, row):\n    return neighbour_of_mine.VALUE\n")
    assert resolve(f"{path}:f")("", "", {}) == 0.25


def test_a_file_does_not_hide_a_library_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def f(prompt, response, row):\n    return 1\n")
    resolve(f"{tmp_path / 'json.py'}:f")
    import json

    assert json.loads("1") == 1


@pytest.mark.parametrize(
    ("text", "attribute", "expected"),
    [
        ("def f(:\n", "f", r"mine.py, line 1: syntax error"),
        ("# coding: nothing\n", "f", r"mine.py: syntax error: unknown encoding"),
        ("raise SyntaxError()\n", "f", r"mine.py: syntax error: \(no message\)"),
        ("raise ModuleNotFoundError('gone')\n", "f", r"mine.py needs module \(gone\), which is not found in"),
        ("x = 1\0\n", "f", r"mine.py: syntax error: .*null bytes"),
        ("def g(prompt, response, row): pass\n", "f", r"has no 'f'; it has: g; expected f\(prompt: str"),
        ("f = 3\n", "f", r"is 3 \(int\) and cannot be called; expected f\(prompt: str"),
        ("def f(prompt): pass\n", "f", r"f\(prompt\) does not take these three arguments .*; expected f\(prompt: str"),
        ("def f(a, b, c, d): pass\n", "f", r"missing a required argument: 'd'"),
        ("async def f(prompt, response, row): pass\n", "f", r"is asynchronous"),
        ("import no_such_thing\n", "f", r"mine.py needs module 'no_such_thing', which is not found in: "),
        ("raise RuntimeError('at import')\n", "f", r"(?s)fails while it is imported.*mine.py.*RuntimeError: at import"),
        (
            "from flowrl.rewards import batched\n@batched\ndef f(prompts): pass\n",
            "f",
            r"expected @batched f\(prompts: list",
        ),
    ],
)
def test_a_broken_file_names_what_is_wrong(
    write: Callable[[str], str], text: str, attribute: str, expected: str
) -> None:
    """REW-02: file, attribute, expected signature."""
    path = write(text)
    with pytest.raises(ValueError, match=expected):
        resolve(f"{path}:{attribute}")


def test_missing_places_are_named() -> None:
    """REW-02."""
    with pytest.raises(ValueError, match="there is no file .*/nowhere/mine.py"):
        resolve("nowhere/mine.py:f")
    with pytest.raises(ValueError, match="module no_such_package.rewards needs module 'no_such_package'"):
        resolve("no_such_package.rewards:f")
    for name in ("mine", "mine.py", ":f", "mine.py:"):
        with pytest.raises(ValueError, match="names no function; expected package.module:name"):
            resolve(name)


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0.5, 0.5),
        (1, 1.0),
        (True, 1.0),
        (False, 0.0),
        (np.float32(1), 1.0),
        (np.float64(0.25), 0.25),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (Fraction(1, 2), 0.5),
    ],
)
def test_finite_numbers_are_scores(value: Any, score: float) -> None:
    """REW-04."""
    assert graded(value) == (score, {})


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        float("-inf"),
        1e300,
        10**400,
        None,
        "1.0",
        b"1",
        1j,
        [1.0],
        (1.0,),
        np.array([1.0]),
        np.str_("1"),
        np.float32("nan"),
        torch.tensor(1.0, requires_grad=True),
        torch.tensor(1.0),
        (x for x in [1.0]),
        {},
        {"reward": 1.0},
        {"score": None},
        {"score": float("nan")},
        {"score": 1.0, "extra": "x"},
        {"score": 1.0, "mean": 0.0},
        {"score": 1.0, 3: 0.0},
    ],
)
def test_anything_else_is_refused_with_the_value(value: Any) -> None:
    """REW-04."""
    with pytest.raises(ValueError, match=r"^returned "):
        graded(value)


def test_a_dict_carries_extras() -> None:
    assert graded({"score": 1, "format": np.float32(0.5)}) == (1.0, {"format": 0.5})


def test_batched_marks_a_function_and_leaves_it_callable() -> None:
    @batched
    def f(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
        "Docs."
        return [1.0 for _ in prompts]

    assert isinstance(f, Batched) and f(["a"], ["b"], [{}]) == [1.0]
    assert (f.__name__, f.__doc__) == ("f", "Docs.")


@pytest.mark.parametrize("values", [[1.0, 0, True, {"score": 2}], (1.0, 0, True, 2), np.array([1.0, 0, 1, 2])])
def test_a_list_of_the_right_length_is_graded_by_row(values: Any) -> None:
    """REW-03."""
    grades = graded_batch(values, 4)
    assert grades == [(1.0, {}), (0.0, {}), (1.0, {}), (2.0, {})]


def test_one_bad_value_in_a_list_spoils_its_own_row_only() -> None:
    """REW-04."""
    grades = graded_batch([1.0, float("nan"), "2"], 3)
    assert grades[0] == (1.0, {})
    assert isinstance(grades[1], str) and "nan" in grades[1] and isinstance(grades[2], str)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0], "returned 1 scores; expected 4"),
        ([1.0] * 3, "returned 3 scores; expected 4"),
        ([1.0] * 5, "returned 5 scores; expected 4"),
        ([], "returned 0 scores; expected 4"),
        ((x for x in [1.0] * 4), r"\(generator\); expected a list of 4 scores"),
        ({"score": 1.0}, r"\(dict\); expected a list of 4 scores"),
        (None, r"returned None \(NoneType\); expected a list of 4 scores"),
        (1.0, r"returned 1.0 \(float\); expected a list of 4 scores"),
        ("1111", r"\(str\); expected a list of 4 scores"),
        (np.ones((4, 1)), r"\(ndarray\); expected a list of 4 scores"),
    ],
)
def test_a_list_of_another_length_or_no_list_names_both_counts(values: Any, expected: str) -> None:
    """REW-03: nothing is broadcast."""
    with pytest.raises(ValueError, match=expected):
        graded_batch(values, 4)
