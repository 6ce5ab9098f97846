"""What a reward function is: where it is found, how it is called, and what it may return."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flowrl.config.paths import is_file, user_path

SIGNATURE = "f(prompt: str, response: str, row: dict) -> float | dict with key 'score'"
BATCHED_SIGNATURE = "@batched f(prompts: list, responses: list, rows: list) -> list of the same length"
MAX_FLOAT32 = 3.4028234e38
RESERVED_EXTRAS = ("mean", "std", "errors")

Graded = tuple[float, dict[str, float]]
"""A score and the further figures that came with it."""


class Batched:
    """A reward function that takes all rows of a step at once: `f(prompts, responses, rows) -> list`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def batched(function: Callable[..., Any]) -> Batched:
    """Decorator: this reward function takes lists of prompts, responses and rows, and returns a list of scores."""
    return Batched(function)


def resolve(name: str) -> Callable[..., Any]:
    """The reward function called `name`: `package.module:name` or `path/to/file.py:name`.

    A file may import what lies next to it. Errors: `ValueError` naming file or module, attribute and the expected
    signature.
    """
    place, colon, attribute = name.rpartition(":")
    if not (place and colon and attribute):
        raise ValueError(f"{name!r} names no function; expected package.module:name or path/to/file.py:name")
    module = _load_file(user_path(place)) if place.endswith(".py") else _load_module(place)
    if attribute not in vars(module):
        there = ", ".join(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ValueError(f"{place} has no {attribute!r}; it has: {there or 'no functions'}; expected {SIGNATURE}")
    return _checked(vars(module)[attribute], name)


def graded(value: Any) -> Graded:
    """The score, and the extras, of what a reward function returned for one row.

    Legal: a finite number (float, int, bool, numpy scalar), or a dict of such numbers with key `score`.
    Errors: `ValueError` saying what was returned and what is expected.
    """
    if not isinstance(value, dict):
        return _number(value, "a finite number or a dict with key 'score'"), {}
    if "score" not in value:
        raise ValueError(f"returned a dict without key 'score': {_shown(value)}")
    extras = {}
    for key, extra in value.items():
        if not isinstance(key, str) or key in RESERVED_EXTRAS:
            raise ValueError(f"returned the key {key!r}; keys are strings other than {', '.join(RESERVED_EXTRAS)}")
        if key != "score":
            extras[key] = _number(extra, f"a finite number under key {key!r}")
    return _number(value["score"], "a finite number under key 'score'"), extras


def graded_batch(values: Any, num_rows: int) -> list[Graded | str]:
    """For each of `num_rows` rows its grade, or what is wrong with it, from what a `@batched` function returned.

    Errors: `ValueError` where it is no list, tuple or one-dimensional numpy array of `num_rows` values.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(values, numpy.ndarray) and values.ndim == 1:
        values = list(values)
    if not isinstance(values, list | tuple):
        raise ValueError(f"returned {_shown(values)}; expected a list of {num_rows} scores")
    if len(values) != num_rows:
        raise ValueError(f"returned {len(values)} scores; expected {num_rows}, one for each row")
    grades: list[Graded | str] = []
    for value in values:
        try:
            grades.append(graded(value))
        except ValueError as error:
            grades.append(str(error))
    return grades


def described(error: BaseException) -> str:
    """Type and text of an exception of the user's code, whose own `__str__` may raise."""
    try:
        text = str(error)
    except BaseException as inner:  # see above
        text = f"(its __str__ raises {type(inner).__name__})"
    return f"{type(error).__name__}: {text}"


def user_traceback(error: BaseException) -> str:
    """The traceback as the user's code saw it: without the first frame, which is ours."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _number(value: Any, expected: str) -> float:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        legal = value.ndim == 0 and value.dtype.kind in "biuf"
    else:
        legal = isinstance(value, numbers.Real)
    if not legal:
        raise ValueError(f"returned {_shown(value)}; expected {expected}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > MAX_FLOAT32:
        raise ValueError(f"returned {_shown(value)}; expected {expected} (within float32)")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _load_file(path: Path) -> ModuleType:
    path = path.absolute()
    if not is_file(path):
        raise ValueError(f"there is no file {path}")
    # A package-like name of its own, so that a file called `json.py` does not become the module `json`.
    name = f"_reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    loader = spec.loader
    _import(lambda: loader.exec_module(module), str(path))
    return module


def _load_module(name: str) -> ModuleType:
    _import(lambda: importlib.import_module(name), f"module {name}")
    return sys.modules[name]


def _import(load: Callable[[], object], place: str) -> None:
    try:
        load()
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ValueError(f"{error.filename or place}{line}: syntax error: {error.msg or '(no message)'}") from None
    except ModuleNotFoundError as error:
        searched = ", ".join(dict.fromkeys(e for e in map(str, sys.path) if not e.endswith((".zip", "lib-dynload"))))
        name = repr(error.name) if error.name else f"({error})"
        raise ValueError(f"{place} needs module {name}, which is not found in: {searched}") from None
    except BaseException as error:  # a user's module may raise anything, SystemExit included
        raise ValueError(f"{place} fails while it is imported\n{user_traceback(error)}") from None


def _checked(function: Any, name: str) -> Callable[..., Any]:
    plain: object = function.function if isinstance(function, Batched) else function
    expected = BATCHED_SIGNATURE if isinstance(function, Batched) else SIGNATURE
    if not callable(plain):
        raise ValueError(f"{name} is {_shown(plain)} and cannot be called; expected {expected}")
    if inspect.iscoroutinefunction(plain):
        raise ValueError(f"{name} is asynchronous; expected a plain function: {expected}")
    call: Callable[..., Any] = function
    try:
        signature = inspect.signature(plain)
    except (ValueError, TypeError):
        return call  # functions written in C do not all tell their signature
    try:
        signature.bind("", "", {})
    except TypeError as error:
        raise ValueError(
            f"{name}{signature} does not take these three arguments ({error}); expected {expected}"
        ) from None
    return call
