"""Reads the small files of a checkpoint, which somebody else may have written: all that can be wrong is a `ValueError`."""

from __future__ import annotations

import json
import reprlib
import stat
from pathlib import Path
from typing import Any

from yaml import SafeLoader, YAMLError, parse, safe_load  # type: ignore[import-untyped]
from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent  # type: ignore[import-untyped]

MANIFEST_BYTES = 64 << 20
TEXT_BYTES = 1 << 20
"""Largest `state.json` and `config.yaml` that are read; written ones have some 10 KiB."""
DEPTH = 32
"""Deepest nesting of YAML that is read; a configuration has 4."""


def read_small(root: Path, name: str, most: int) -> str:
    """The text of `root/name`. Error: `ValueError` where it is no regular file of at most `most` bytes of UTF-8."""
    path = root / name
    try:
        # Opening a pipe would wait for a writer.
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{name} is no regular file")
        if found.st_size > most:
            raise ValueError(f"{name} has {found.st_size} bytes; at most {most} are read")
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{name} is damaged: it is not UTF-8") from None


def parse_json(text: str, name: str) -> Any:
    """Plain values. Error: `ValueError` naming the file."""
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"{name} is damaged: it is not JSON") from None
    except RecursionError:
        raise ValueError(f"{name} is damaged: its JSON is nested too deeply") from None


def check_yaml(text: str, name: str) -> None:
    """Error: `ValueError` where the text is no plain YAML mapping, as `to_yaml` writes it.

    Anchors and tags are refused: with aliases some hundred bytes stand for any number of values.
    """
    try:
        problem = _plain(text)
        if problem is None and not isinstance(safe_load(text), dict):
            problem = "it is no mapping of sections"
    except (YAMLError, OverflowError, ValueError) as error:
        problem = f"it is not YAML: {' '.join(str(error).split())[:200]}"
    if problem:
        raise ValueError(f"{name} is damaged: {problem}")


def _plain(text: str) -> str | None:
    """What keeps YAML from being plain and shallow, in words. Looks at its events, so that nothing is built yet."""
    depth = 0
    for event in parse(text, Loader=SafeLoader):
        if isinstance(event, NodeEvent):
            tag = None if isinstance(event, AliasEvent) else event.tag
            if event.anchor is not None or tag is not None:
                return "it has an anchor, an alias or a tag, which no checkpoint has"
        if isinstance(event, CollectionStartEvent):
            depth += 1
            if depth > DEPTH:
                return f"it is nested more than {DEPTH} deep"
        elif isinstance(event, CollectionEndEvent):
            depth -= 1
    return None


def shown(value: object) -> str:
    """The value as a message has it, of bounded length."""
    return reprlib.repr(value)
