"""A run's checkpoints: what its roles go on from, when one is begun, and when it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from flowrl.checkpoints.manifest import FileDigest
from flowrl.checkpoints.start import FOLDER, StartPoint, trained_roles
from flowrl.checkpoints.state import RunState
from flowrl.checkpoints.store import CheckpointStore
from flowrl.config.compose import to_yaml
from flowrl.config.schema import Config
from flowrl.config.tree import ConfigError
from flowrl.console import StepConsole

if TYPE_CHECKING:
    from flowrl.workers.trained import TrainedWorker

Role = TypeVar("Role", bound="TrainedWorker")


class Checkpointing:
    """Of one run, in `run_dir/checkpoints`.

    A checkpoint is begun in the loop and takes its tensors at that moment; it becomes complete later, while the run goes
    on. At most one is on its way. What it says of the run is `settled` at the end of its step, when the step's metrics
    are written.
    """

    def __init__(self, config: Config, run_dir: Path, start: StartPoint, console: StepConsole) -> None:
        self._config = config
        self._start = start
        self._console = console
        self._folder = run_dir / FOLDER
        self._store = CheckpointStore(self._folder, config.trainer.keep_checkpoints)
        self._step = 0
        self._trained: dict[str, TrainedWorker] = {}
        self._roles: dict[str, TrainedWorker] = {}
        self._state: RunState | None = None

    def prepare(self, model: Path) -> None:
        """Find out before the run what would make a save or an export fail after it; tidy up after earlier processes.

        Error: `ConfigError` where a folder cannot be written, or a file that an export copies cannot be read.
        """
        trainer = self._config.trainer
        if trainer.save_every:
            _probe(self._folder, "checkpoints (trainer.save_every)")
        if trainer.export_every:
            _probe(self._folder.with_name("export"), "exports (trainer.export_every)")
            for file in model.iterdir():
                _readable(file)
        for sentence in self._store.clean(self._start.step if self._start.in_place else 0):
            self._console.message(f"checkpoints: {sentence}")

    def restored(self, name: str, role: Role) -> Role:
        """The role, in the state of the checkpoint that the run goes on from, if there is one."""
        self._trained[name] = role
        checkpoint = self._start.checkpoint
        if checkpoint is None:
            return role
        before = checkpoint.state.roles.get(name)
        if before is None:
            self._console.warn(
                f"{checkpoint.folder.name} has no {name}: it begins with the weights of its model folder"
            )
            return role
        restored = role.load_state(str(checkpoint.folder / name))
        now = trained_roles(self._config)[name]
        layout = f"{now}" if now == before else f"{before} -> {now}"
        self._console.message(f"resumed from {FOLDER}/{checkpoint.folder.name}: {name} ({layout}): {restored}")
        return role

    def begin(self, step: int, roles: Mapping[str, TrainedWorker | None]) -> None:
        """Start a checkpoint of step `step`: the roles' state of now. One that is on its way is completed before."""
        self.complete()
        partial = self._store.begin(step)
        self._roles = {name: role for name, role in roles.items() if role is not None}
        for name, role in self._roles.items():
            role.save_state(str(partial / name))
        self._step, self._state = step, None

    def settle(self, state: RunState) -> None:
        """The end of a step: what the checkpoint of this step says of the run. An older one is completed."""
        if self._roles and self._step == state.step:
            self._state = state
        else:
            self.complete()

    def save_now(self, state: RunState) -> None:
        """The checkpoint of the step that has just ended, complete when this returns; for a run that is about to stop."""
        if self._step != state.step:
            for role in self._trained.values():
                role.reload()
            self.begin(state.step, self._trained)
        self.settle(state)
        self.complete()

    def complete(self) -> None:
        """Wait for the checkpoint that is on its way, if its step has ended, and give it its name.

        Errors: `WorkerError` of a rank that could not write, or whose weights are not finite; `SaveError`. The
        checkpoints of before are as they were.
        """
        state, roles = self._state, self._roles
        if state is None:
            return
        digests: list[FileDigest] = []
        for name, role in roles.items():
            # All ranks answer, each for the files that it has written.
            by_rank = cast(Sequence[tuple[FileDigest, ...]], role.finish_save())
            digests += [each.under(name) for answer in by_rank for each in answer]
        self._store.commit(state, to_yaml(self._config), digests)
        self._roles, self._state = {}, None


def _probe(folder: Path, what: str) -> None:
    """A file is made and removed where files will be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.write_bytes(b"\0")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written, where {what} will be: {error.strerror}; mend that or give another run.dir"
        ) from None


def _readable(file: Path) -> None:
    if not file.is_file():
        return
    try:
        with file.open("rb") as opened:
            opened.read(1)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; trainer.export_every copies every file of the model folder, so mend or "
            "remove it"
        ) from None
