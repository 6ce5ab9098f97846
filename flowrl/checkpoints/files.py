"""The operations that change a disk. All of a checkpoint's go through one object, so that a test can stop between any two."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


class Files:
    """Each method is one step that either happened or did not, as far as a process that dies can tell."""

    def make_folder(self, path: Path) -> None:
        """The folder and its parents; it may exist."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, text: str) -> None:
        """The whole text, in UTF-8, on the disk when this returns."""
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """A file's bytes, or a folder's names, are on the disk when this returns."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        """Takes the place of a file `to`; of a folder `to` only where that is empty."""
        os.replace(path, to)

    def remove(self, path: Path) -> None:
        """A file, or a folder with all that is in it."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def replace_text(files: Files, path: Path, text: str) -> None:
    """The file holds its old text or the new one, whenever the process dies."""
    aside = path.with_name(f".{path.name}.partial")
    files.write(aside, text)
    files.rename(aside, path)
    files.sync(path.parent)
