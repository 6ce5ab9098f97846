"""Rows of prompt files, with the place each came from, checked for shape."""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.config.paths import user_path
from flowrl.config.tree import ConfigError

ROLES = ("system", "developer", "user", "assistant", "tool")
SHOWN = 5
Message = Mapping[str, Any]


@dataclass(frozen=True)
class PromptRow:
    """One row: `place` is file and line, `prompt` text or messages, `row` everything the file says."""

    place: str
    prompt_id: str
    prompt: str | tuple[Message, ...]
    row: Mapping[str, Any]


def read_rows(files: Sequence[str]) -> list[PromptRow]:
    """All rows of all files, in order. Error: `ConfigError` naming file and line of the first few wrong rows."""
    rows: list[PromptRow] = []
    wrong: list[str] = []
    for position, name in enumerate(files):
        for number, raw in _read(name):
            place = f"{name}, {'line' if name.endswith(JSON_SUFFIXES) else 'row'} {number}"
            problem = _problem(raw)
            if problem is None:
                prompt = raw["prompt"]
                prompt = prompt if isinstance(prompt, str) else tuple(_clean(message) for message in prompt)
                given = raw.get("id")
                rows.append(PromptRow(place, f"{position}:{number}" if given is None else str(given), prompt, raw))
            else:
                wrong.append(f"{place}: {problem}")
    refuse(wrong, "rows are malformed")
    taken = {row.prompt_id for row in rows if row.row.get("id") is not None}
    rows = [row if row.row.get("id") is not None else _apart(row, taken) for row in rows]
    _check_unique(rows)
    if not rows:
        raise ConfigError(f"{', '.join(files)}: no rows")
    return rows


def _apart(row: PromptRow, taken: Collection[str]) -> PromptRow:
    """A row without an id of its own, with one that no other row was given."""
    name = row.prompt_id
    while name in taken:
        name += "+"
    return replace(row, prompt_id=name)


def refuse(wrong: Sequence[str], what: str) -> None:
    """Raises `ConfigError` with the first few of `wrong`, if there are any."""
    if wrong:
        more = [f"... {len(wrong)} {what} in all"] if len(wrong) > SHOWN else []
        raise ConfigError(*wrong[:SHOWN], *more)


def _check_unique(rows: Iterable[PromptRow]) -> None:
    places: dict[str, str] = {}
    wrong = []
    for row in rows:
        first = places.setdefault(row.prompt_id, row.place)
        if first != row.place:
            wrong.append(f"{row.place}: id {row.prompt_id!r} is also that of {first}; ids must be unique, or left out")
    refuse(wrong, "ids are repeated")


# Shapes of rows


def _problem(raw: Any) -> str | None:
    """What is wrong with the shape of a row, or None."""
    if not isinstance(raw, dict):
        return f"a row is an object with the key 'prompt', not {_kind(raw)}"
    given = raw.get("id")
    if given is not None and (isinstance(given, bool) or not isinstance(given, (str, int))):
        return f"id is {_kind(given)}; give text, an integer, or leave it out"
    if isinstance(given, str) and (problem := _text_problem(given)):
        return f"id: {problem}"
    if "prompt" not in raw:
        return f"there is no key 'prompt'; the row has {', '.join(sorted(map(str, raw))) or 'no keys'}"
    return _prompt_problem(raw["prompt"])


def _prompt_problem(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return _text_problem(prompt) or (None if prompt.strip() else "prompt is empty")
    if not isinstance(prompt, list):
        return f"prompt is {_kind(prompt)}; give text or a list of {{role, content}}"
    if not prompt:
        return "prompt is an empty list; give text or at least one message {role, content}"
    for number, message in enumerate(prompt, 1):
        problem = _message_problem(message)
        if problem:
            return f"prompt: message {number} {problem}"
    if prompt[-1]["role"] == "assistant":
        return "prompt: the last message is the assistant's; the response would have no turn of its own"
    return None


def _text_problem(text: str) -> str | None:
    """A half of a surrogate pair is legal in JSON and no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start + 1} is half of a surrogate pair"
    return None


def _message_problem(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"is {_kind(message)}; give an object {{role, content}}"
    for key in ("role", "content"):
        if key not in message:
            return f"has no {key!r}"
        if not isinstance(message[key], str):
            return f"has a {key!r} that is {_kind(message[key])}; give text"
        if problem := _text_problem(message[key]):
            return f"has a {key!r} of which {problem}"
    if message["role"] not in ROLES:
        return f"has role {message['role']!r}; legal: {', '.join(ROLES)}"
    return None


def _clean(message: Message) -> Message:
    """Parquet gives every message the keys of all: those without value are left out, as templates ask for presence."""
    return {key: value for key, value in message.items() if value is not None}


def _kind(value: Any) -> str:
    names = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), type(value).__name__)


# Files

JSON_SUFFIXES = (".jsonl", ".json")


def _read(name: str) -> Iterator[tuple[int, Any]]:
    """(line or row number from 1, row as Python values)."""
    if name.startswith("builtin:"):
        return _builtin(name)
    if name.startswith("hf:"):
        return _hub(name)
    path = user_path(name)
    if name.endswith(JSON_SUFFIXES):
        return _json_lines(name, path)
    return _parquet(name, path)


def _json_lines(name: str, path: Path) -> Iterator[tuple[int, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text (byte {error.start}); a Parquet file must end in .parquet"
        ) from None
    # Not splitlines(): that also cuts at separators which are legal inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{name}, line {number} is not JSON: {error}; write one object per line") from None


def _parquet(name: str, path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{name} cannot be read as Parquet: {error}") from None
    try:
        rows = table.to_pylist()
    except (ValueError, OverflowError, ImportError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{name}: {_parquet_problem(table)}: {error}") from None
    yield from enumerate(rows, 1)


def _parquet_problem(table: Any) -> str:
    """The first column and row whose value Python cannot hold (text that is no UTF-8, a time beyond its calendar)."""
    for column in table.column_names:
        for number, value in enumerate(table.column(column), 1):
            try:
                value.as_py()
            except Exception:
                return f"row {number}: {column} has a value that cannot be read"
    return "a value cannot be read"


def _hub(name: str) -> Iterator[tuple[int, Any]]:
    parts = name.split(":")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise ConfigError(f"{name} needs the package `datasets` (pip install 'flowrl[datasets]')") from None
    try:
        table = datasets.load_dataset(parts[1], split=parts[2] if len(parts) == 3 else "train")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} cannot be loaded: {error}") from None
    yield from enumerate(map(dict, table), 1)


def _builtin(name: str) -> Iterator[tuple[int, Any]]:
    from flowrl.builtin import arithmetic

    rows = {"builtin:arithmetic": arithmetic.train_rows, "builtin:arithmetic/eval": arithmetic.eval_rows}
    if name not in rows:
        raise ConfigError(f"{name} is not built in; legal: builtin:arithmetic")
    yield from enumerate(rows[name](), 1)
