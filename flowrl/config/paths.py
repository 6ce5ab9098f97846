"""Paths that a user writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def user_path(text: str | Path) -> Path:
    """The path with `~` replaced, absolute, since worker processes on any node start in folders of their own.

    With the name of an unknown user a `~` stays as it is, and is simply not there.
    """
    path = Path(os.path.expanduser(text))
    return path if str(path).startswith("~") else path.absolute()


def is_file(path: str | Path) -> bool:
    """Whether there is a file; what no file system takes as a name is none."""
    return _is(Path.is_file, path)


def is_folder(path: str | Path) -> bool:
    """Whether there is a folder; what no file system takes as a name is none."""
    return _is(Path.is_dir, path)


def _is(kind: Callable[[Path], bool], path: str | Path) -> bool:
    try:
        return kind(user_path(path))
    except (OSError, ValueError):
        return False


def run_lock(folder: Path) -> Path:
    """The lock of a run's folder. It lies beside it, so that it stays when the folder is moved; beside the folder itself
    where `folder` is a link, since other names lead to it too."""
    folder = folder.resolve()
    return folder.with_name(f".{folder.name}.lock")
