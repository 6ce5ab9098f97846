"""`key=value` arguments and whole numbers, as the commands of this package take them."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from flowrl.config.paths import user_path

MOST_RANKS = 1 << 14
"""A plan of more ranks takes minutes and gigabytes."""


def parse_words(arguments: Sequence[str], known: Collection[str], required: Sequence[str]) -> dict[str, str]:
    """Value by key. Errors: `ValueError` naming an argument that is no `key=value` of a known key, a key that is given
    twice, a value that is empty, or the required keys that are missing."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in known or not equals:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}=...?" if near else ""
            raise ValueError(f"unknown argument {argument!r}{hint}; known: {', '.join(known)} (each as key=value)")
        if key in given:
            raise ValueError(f"{key} is given twice: {given[key]} and {value}")
        if "\0" in value:
            raise ValueError(f"{key}={value!r} has a null character")
        given[key] = value.strip()
    missing = [key for key in required if not given.get(key)]
    if missing:
        raise ValueError(f"missing: {', '.join(f'{key}=...' for key in missing)}; --help explains every key")
    empty = [key for key, value in given.items() if not value]
    if empty:
        raise ValueError(f"{empty[0]}= is empty; give a value or leave it out")
    return given


def output_path(given: Mapping[str, str]) -> Path | None:
    """`out`, or None where it is not given. Error: `ValueError` for the home of a user that does not exist."""
    if "out" not in given:
        return None
    path = user_path(given["out"])
    if str(path).startswith("~"):
        raise ValueError(f"out={path} cannot be written: there is no user {path.parts[0][1:]!r} here")
    return path


def make_folder(out: Path) -> None:
    """Error: `ValueError` where results could not be written there: known before anything is measured."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"out={out} cannot be written: {error.strerror}; give a folder that can") from None


def whole_number(given: Mapping[str, str], key: str, default: int | None = None, *, most: int = 1 << 62) -> int:
    """Errors: `ValueError` naming a value that is not a whole number from 1 to `most`."""
    text = given.get(key, str(default))
    if not (text.isascii() and text.isdigit()) or int(text[:20]) < 1 or len(text) > 19 or int(text) > most:
        limit = "" if most == 1 << 62 else f" and at most {most}"
        raise ValueError(f"{key}={text} must be a whole number of at least 1{limit}")
    return int(text)


def rank_number(given: Mapping[str, str], key: str) -> int:
    """Errors: `ValueError` as `whole_number`, with the most ranks that are planned for."""
    return whole_number(given, key, most=MOST_RANKS)
