"""Paths that a user writes."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(text: str | Path) -> Path:
    """The path with `~` replaced, absolute, since worker processes on any node start in folders of their own.

    With the name of an unknown user a `~` stays as it is, and is simply not there.
    """
    return Path(os.path.expanduser(text)).absolute()
