"""The list of a checkpoint's files with their sizes and hashes: what makes "complete" a thing that can be checked."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from flowrl.checkpoints.files import Files
from flowrl.checkpoints.reading import MANIFEST_BYTES, parse_json, read_small, shown

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class FileDigest:
    """One file. `path` is relative, with `/`, to the folder whose files are listed; `sha256` in hexadecimal."""

    path: str
    bytes: int
    sha256: str

    def under(self, folder: str) -> FileDigest:
        """The same file, seen from the parent of `folder`."""
        return FileDigest(f"{folder}/{self.path}", self.bytes, self.sha256)


def digest_file(root: Path, path: str) -> FileDigest:
    """Size and hash of `root/path` as they are now. Error: `OSError` where the file cannot be read."""
    with (root / path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(path, file.tell(), digest.hexdigest())


def write_manifest(files: Files, root: Path, digests: Iterable[FileDigest]) -> None:
    """Writes `manifest.json` over exactly the files that lie under `root`.

    Error: `ValueError` naming files that are listed twice, or of which only the list or only the folder knows: such a
    checkpoint would never be complete.
    """
    listed = sorted(digests, key=lambda each: each.path)
    names = [each.path for each in listed]
    present = set(_files(root))
    twice = sorted({name for name in names if names.count(name) > 1})
    for what, wrong in (
        ("listed more than once", twice),
        ("listed but not there", sorted(set(names) - present)),
        ("there but not listed", sorted(present - set(names))),
    ):
        if wrong:
            raise ValueError(f"{root}: files {what}: {_some(wrong)}")
    rows = {each.path: {"bytes": each.bytes, "sha256": each.sha256} for each in listed}
    files.write(root / MANIFEST, json.dumps({"format": FORMAT, "files": rows}, indent=1) + "\n")


def read_manifest(root: Path) -> tuple[FileDigest, ...]:
    """The files that a checkpoint consists of, beside its manifest.

    Error: `ValueError` saying what is wrong with the list.
    """
    raw = parse_json(read_small(root, MANIFEST, MANIFEST_BYTES), MANIFEST)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise ValueError(f"{MANIFEST} has format {shown(found)}; this version reads format {FORMAT}")
    rows = raw.get("files")
    if not isinstance(rows, dict):
        raise ValueError(f"{MANIFEST} is damaged: it has no table of files")
    return tuple(_digest(path, row) for path, row in rows.items())


def _digest(path: str, row: object) -> FileDigest:
    inside = PurePosixPath(path)
    # Two spellings of one name would let a file be compared under the one and read under the other.
    if inside.is_absolute() or ".." in inside.parts or str(inside) != path or not path.isprintable():
        raise ValueError(f"{MANIFEST} is damaged: {shown(path)} is not a file of the checkpoint")
    match row:
        case {"bytes": int(size), "sha256": str(sha256)}:
            return FileDigest(path, size, sha256)
    raise ValueError(f"{MANIFEST} is damaged: {path} has no size and hash")


def verify(root: Path) -> list[str]:
    """What keeps the folder from being a complete checkpoint, each problem in words; empty where it is complete.

    Sizes are compared first, and contents only where all sizes are right: a truncated checkpoint is told at once. Files
    that the manifest does not list are the business of `unlisted`.
    """
    try:
        if not stat.S_ISDIR(root.stat().st_mode):
            return ["it is not a folder"]
    except FileNotFoundError:
        return ["there is no such folder"]
    except OSError as error:
        return [f"it cannot be read: {error.strerror}"]
    try:
        listed = read_manifest(root)
    except ValueError as error:
        return [str(error)]
    found = size_problems(root, listed)
    if found:
        return found
    # Hashing lets other threads run; disks and networks are faster with several readers.
    with ThreadPoolExecutor(max_workers=8) as readers:
        return [problem for problem in readers.map(partial(_content_problem, root), listed) if problem]


def size_problems(root: Path, listed: Iterable[FileDigest]) -> list[str]:
    """Files that are missing under `root` or have another size than listed, in words."""
    return [problem for each in listed if (problem := _size_problem(root, each))]


def _size_problem(root: Path, expected: FileDigest) -> str | None:
    try:
        found = (root / expected.path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"{expected.path} is missing ({expected.bytes} bytes)"
    except OSError as error:
        return f"{expected.path} cannot be read: {error.strerror}"
    if not stat.S_ISREG(found.st_mode):
        return f"{expected.path} is no regular file"
    size = found.st_size
    if size == expected.bytes:
        return None
    return (
        f"{expected.path} is {'truncated' if size < expected.bytes else 'too long'}: {size} of {expected.bytes} bytes"
    )


def _content_problem(root: Path, expected: FileDigest) -> str | None:
    try:
        found = digest_file(root, expected.path)
    except OSError as error:
        return f"{expected.path} cannot be read: {error.strerror}"
    if found.sha256 == expected.sha256:
        return None
    return f"{expected.path} is damaged: sha256 {found.sha256[:12]}..., the manifest has {expected.sha256[:12]}..."


def unlisted(root: Path, folder: str, listed: Iterable[str]) -> list[str]:
    """Files below `root/folder` that are not in the list, paths relative to `root`. Error: `OSError`."""
    known = set(listed)
    return sorted(path for each in _files(root / folder) if (path := f"{folder}/{each}") not in known)


def _files(root: Path) -> list[str]:
    """Every file under the folder but its manifest; links to folders count, since they are not followed.

    Not `.nfs*`: there NFS keeps what was removed while somebody, an indexer or a backup, had it open.
    """
    files = (path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    found = (path.relative_to(root).as_posix() for path in files if not path.name.startswith(".nfs"))
    return [path for path in found if path != MANIFEST]


def _some(names: Sequence[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
