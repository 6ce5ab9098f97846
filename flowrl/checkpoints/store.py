"""The checkpoints of a run: one is complete or absent, and the last complete one outlives every failure.

A checkpoint is written to `.step_N.partial`, synced, and renamed to `step_N`. Names that begin with a dot are leftovers
of a process that died, and are removed when the next one begins.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from flowrl.checkpoints.files import Files
from flowrl.checkpoints.manifest import (
    MANIFEST,
    FileDigest,
    digest_file,
    read_manifest,
    size_problems,
    unlisted,
    verify,
    write_manifest,
)
from flowrl.checkpoints.reading import TEXT_BYTES, check_yaml, read_small
from flowrl.checkpoints.state import STATE, RunState, parse_state

CONFIG = "config.yaml"
ROLE_FILES = (".metadata", "common.pt", "metadata.json")
"""What every role's folder has, beside at least one `.distcp` with tensors."""


class SaveError(RuntimeError):
    """A checkpoint could not be written; the message has the folder and the numbers. Earlier ones are as they were."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete one: its folder, and what it says of the run."""

    folder: Path
    state: RunState
    config: str


@dataclass(frozen=True)
class Found:
    """The newest complete checkpoint, or None, and a sentence about each newer one that is not complete."""

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...] = ()


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder, every byte compared with its manifest.

    Error: `ValueError` listing everything that is wrong with it, one problem a line.
    """
    problems = verify(folder)
    if problems:
        raise ValueError("\n".join(problems))
    listed = {each.path for each in read_manifest(folder)}
    _no_problems(f"{name} is not in {MANIFEST}" for name in (STATE, CONFIG) if name not in listed)
    state = parse_state(read_small(folder, STATE, TEXT_BYTES))
    config = read_small(folder, CONFIG, TEXT_BYTES)
    check_yaml(config, CONFIG)
    _no_problems(problem for role in state.roles for problem in _role_problems(folder, role, listed))
    if folder.name != name_of(state.step):
        raise ValueError(f"{STATE} is of step {state.step}; a checkpoint's folder must be called {name_of(state.step)}")
    return Checkpoint(folder, state, config)


def _role_problems(folder: Path, role: str, listed: Collection[str]) -> Iterator[str]:
    """What keeps a role's files from being a whole Megatron-core checkpoint whose every file is in the manifest."""
    own = {path.removeprefix(f"{role}/") for path in listed if path.startswith(f"{role}/")}
    if not own:
        yield f"{role}/ is missing: {MANIFEST} lists no file of it"
        return
    for name in ROLE_FILES:
        if name not in own:
            yield f"{role}/{name} is not in {MANIFEST}"
    if not any("/" not in name and name.endswith(".distcp") for name in own):
        yield f"{role}/*.distcp: none is in {MANIFEST}"
    try:
        for path in unlisted(folder, role, listed):
            yield f"{path!r} is there and not in {MANIFEST}"
    except OSError as error:
        yield f"{role}/ cannot be read: {error.strerror}"


def _no_problems(problems: Iterable[str]) -> None:
    found = list(problems)
    if found:
        raise ValueError("\n".join(found))


def name_of(step: int) -> str:
    """Of a checkpoint's folder."""
    return f"step_{step}"


class CheckpointStore:
    """`folder` holds the checkpoints; the newest `keep` complete ones are kept, all of them where it is 0."""

    def __init__(self, folder: Path, keep: int, files: Files | None = None) -> None:
        self.folder = folder
        self._keep = keep
        self._files = files or Files()

    def steps(self) -> list[int]:
        """Steps that have an entry, complete or not, in ascending order."""
        if not self.folder.is_dir():
            return []
        found = (re.fullmatch(r"step_(0|[1-9][0-9]*)", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> Found:
        """Looks from the last step backwards. Changes nothing."""
        skipped: list[str] = []
        for step in reversed(self.steps()):
            try:
                return Found(open_checkpoint(self._path(step)), tuple(skipped))
            except ValueError as error:
                skipped.append(f"{name_of(step)} is not complete and was skipped: {'; '.join(str(error).splitlines())}")
        return Found(None, tuple(skipped))

    def clean(self, last_step: int) -> list[str]:
        """Makes room for a run that goes on after `last_step`; says what was done.

        What processes that died have left is removed. Checkpoints of later steps, damaged or of a branch that is given
        up, get the name `step_N.old`: this run will write these steps itself.
        """
        done: list[str] = []
        if not self.folder.is_dir():
            return done
        for path in sorted(self.folder.iterdir()):
            if re.fullmatch(r"\.step_\d+\.(partial|removed)", path.name):
                self._files.remove(path)
                done.append(f"removed {path.name}, which an earlier process has left unfinished")
        for step in self.steps():
            if step > last_step:
                names = (f"{name_of(step)}.old{number or ''}" for number in count())
                aside = next(path for name in names if not (path := self.folder / name).exists())
                self._files.rename(self._path(step), aside)
                done.append(f"{name_of(step)} is called {aside.name} now: the run goes on from step {last_step}")
        return done

    def begin(self, step: int) -> Path:
        """An empty folder for the files of step `step`.

        Error: `SaveError` where the disk cannot be written, or has less room than the previous checkpoint takes.
        """
        partial = self._partial(step)
        try:
            self._files.make_folder(self.folder)
            if partial.exists():
                self._files.remove(partial)
            needed = self.last_bytes()
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                raise SaveError(
                    f"step_{step}: {self.folder} has {free} bytes free, and a checkpoint takes about {needed}, as the last one; "
                    + self._room_advice()
                )
            self._files.make_folder(partial)
        except OSError as error:
            raise self.failed(step, error) from error
        return partial

    def _room_advice(self) -> str:
        if self._keep == 1:
            return "make room there"
        fewer = (
            f"lower trainer.keep_checkpoints={self._keep}"
            if self._keep
            else "keep fewer: trainer.keep_checkpoints=0 keeps all"
        )
        return f"make room there, or {fewer}"

    def commit(self, state: RunState, config: str, digests: Iterable[FileDigest]) -> Path:
        """Completes what `begin` began: `digests` are of the files that the roles have written, relative to that folder.

        Then the oldest complete checkpoints over the number that is kept are removed.
        Errors: `SaveError` where the disk cannot be written; where the files are not those of the digests.
        """
        partial, final = self._partial(state.step), self._path(state.step)
        try:
            self._files.write(partial / STATE, state.to_json())
            self._files.write(partial / CONFIG, config)
            listed = [*digests, *(digest_file(partial, name) for name in (STATE, CONFIG))]
            problems = size_problems(partial, listed)
            if problems:
                raise SaveError(
                    f"step_{state.step}: what the ranks have written is not in {partial} as this process sees it: {'; '.join(problems[:5])}; "
                    "run.dir must be a folder that all nodes share"
                )
            for each in listed:
                self._files.sync(partial / each.path)
            write_manifest(self._files, partial, listed)
            for folder in sorted({(partial / each.path).parent for each in listed}, reverse=True):
                self._files.sync(folder)
            self._files.rename(partial, final)
            self._files.sync(self.folder)
            self._retain(state.step)
        except OSError as error:
            raise self.failed(state.step, error) from error
        return final

    def _retain(self, newest: int) -> None:
        """Removes checkpoints older than the last `keep` complete ones, of which `newest` is one."""
        if not self._keep:
            return
        complete = [step for step in self.steps() if step <= newest and self._looks_complete(step)]
        for step in self.steps():
            if step < complete[-self._keep :][0]:
                # Renamed first, so that nobody takes a checkpoint that is half removed for one that is damaged.
                removed = self.folder / f".{name_of(step)}.removed"
                self._files.rename(self._path(step), removed)
                self._files.remove(removed)

    def _looks_complete(self, step: int) -> bool:
        """By names and sizes; contents are compared before a run goes on from it."""
        try:
            return not size_problems(self._path(step), read_manifest(self._path(step)))
        except ValueError:
            return False

    def last_bytes(self) -> int:
        """Bytes of the newest checkpoint that looks complete; 0 where there is none."""
        for step in reversed(self.steps()):
            if self._looks_complete(step):
                return sum(each.bytes for each in read_manifest(self._path(step)))
        return 0

    def failed(self, step: int, error: OSError) -> SaveError:
        """The message about a disk that refused a write, with what was there and what is free."""
        partial = self._partial(step)
        written = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()) if partial.is_dir() else 0
        place = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        kept = [name_of(step) for step in self.steps() if self._looks_complete(step)]
        return SaveError(
            f"step_{step} could not be written to {self.folder}: {error.strerror or error}; {written} bytes of it are written (the last "
            f"checkpoint has {self.last_bytes()}), {shutil.disk_usage(place).free} are free there; "
            + (f"complete: {', '.join(kept)}" if kept else "there is no complete checkpoint")
        )

    def _path(self, step: int) -> Path:
        return self.folder / name_of(step)

    def _partial(self, step: int) -> Path:
        return self.folder / f".{name_of(step)}.partial"
