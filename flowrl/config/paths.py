"""Paths that a user writes."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str | Path) -> Path:
    """The path with `~` replaced; with the name of an unknown user it stays as it is, and is simply not there."""
    return Path(os.path.expanduser(text))


def run_lock(folder: Path) -> Path:
    """The lock of a run's folder. It lies beside it, so that it stays when the folder is moved."""
    return folder.with_name(f".{folder.name}.lock")
