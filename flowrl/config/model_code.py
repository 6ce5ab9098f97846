"""Python code of its own that a model folder asks loaders to run."""

from __future__ import annotations

import json
from pathlib import Path

from flowrl.config.paths import user_path


def custom_code(folder: str | Path) -> list[str]:
    """Where the folder's JSON files name code (`auto_map`), as `file: auto_map names ...`; empty where none does."""
    found = []
    for path in sorted(user_path(folder).glob("*config.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # a file that is needed is reported where it is read
        if isinstance(content, dict) and content.get("auto_map"):
            found.append(f"{path.name}: auto_map names {_names(content['auto_map'])}")
    return found


def _names(auto_map: object) -> str:
    """The classes that an `auto_map` names: a table from a loader to a name or, for tokenizers, to two of them."""
    values = list(auto_map.values()) if isinstance(auto_map, dict) else [auto_map]
    names = [name for value in values for name in (value if isinstance(value, list) else [value]) if name]
    return ", ".join(map(str, names)) or "nothing"
