"""Paths that a user writes."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str | Path) -> Path:
    """The path with `~` replaced; with the name of an unknown user it stays as it is, and is simply not there."""
    return Path(os.path.expanduser(text))
