"""From `model.path` to a folder: checks a user's, makes and keeps the built-in one."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.builtin.recipe import TinyRecipe
from flowrl.config.paths import user_path

TINY = "builtin:tiny"
BUILTIN_PREFIX = "builtin:"


def resolve_model(path: str, cache_dir: str | Path, progress: Callable[[float, str], None] | None = None) -> Path:
    """The Hugging Face folder that `path` stands for.

    `builtin:tiny` is made under `cache_dir` unless it is there already (about 20 s; `progress` hears a share from 0 to 1
    and a label); runs that start at once make it once. Any other path must be a folder with a `config.json`.
    Errors: `ValueError` naming path and remedy.
    """
    if path == TINY:
        return tiny_model(user_path(cache_dir), TinyRecipe(), progress)
    if path.startswith(BUILTIN_PREFIX):
        raise ValueError(f"model.path={path}: there is no such built-in model; known: {TINY}")
    folder = user_path(path)
    if not folder.is_dir():
        raise ValueError(f"model.path={path} is not a folder; give a downloaded Hugging Face folder or {TINY}")
    if not (folder / "config.json").is_file():
        there = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise ValueError(f"model.path={path} has no config.json (there is: {there}); give the folder that holds it")
    return folder


def tiny_model(cache_dir: Path, recipe: TinyRecipe, progress: Callable[[float, str], None] | None = None) -> Path:
    """The folder of the tiny model made by `recipe`, complete or absent at any moment."""
    folder = cache_dir / recipe.key
    if folder.is_dir():
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{recipe.key}.lock"):
            if not folder.is_dir():
                _make(folder, recipe, progress or _silent)
    except OSError as error:
        raise ValueError(f"model.cache_dir={cache_dir} cannot hold {TINY}: {error}; choose another folder") from error
    return folder


def _make(folder: Path, recipe: TinyRecipe, progress: Callable[[float, str], None]) -> None:
    # Torch and transformers take seconds to import, which a cached model need not pay for.
    from flowrl.builtin.warm_start import make_tiny

    for leftover in folder.parent.glob(f".{folder.name}.making-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.making-", dir=folder.parent))
    try:
        make_tiny(aside, recipe, progress)
        aside.chmod(0o755)
        os.rename(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held by one process at a time; the kernel releases it when that process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _silent(share: float, label: str) -> None:
    """Progress that nobody asked for."""
