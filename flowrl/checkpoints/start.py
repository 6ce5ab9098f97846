"""Where a run begins: at its first step, or after the step of a checkpoint that fits its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.checkpoints.state import RoleState
from flowrl.checkpoints.store import Checkpoint, CheckpointStore, Found, open_checkpoint
from flowrl.config.changes import changes, keys
from flowrl.config.machine import installed_version
from flowrl.config.paths import user_path
from flowrl.config.plan import layout_words
from flowrl.config.schema import Config
from flowrl.config.tree import ConfigError, nearest
from flowrl.config.units import pool_of

FOLDER = "checkpoints"


@dataclass(frozen=True)
class StartPoint:
    """`checkpoint`: what the run goes on from, None for a run from its first step. `in_place`: it lies in `run.dir`, so
    the run continues what is there. `warnings`: checkpoints that were passed over, versions that differ."""

    checkpoint: Checkpoint | None = None
    in_place: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self.checkpoint.state.step if self.checkpoint else 0

    def words(self, total_steps: int) -> str:
        """What will happen, in one sentence."""
        if self.checkpoint is None:
            return "nothing to resume: the run begins with step 1"
        if self.step == total_steps:
            return f"nothing to do: {self.checkpoint.folder} is of step {self.step}, the last of trainer.total_steps={total_steps}"
        return f"resumes from {self.checkpoint.folder} with step {self.step + 1} of {total_steps}"


def find_start(config: Config) -> StartPoint:
    """What `trainer.resume` comes to. Reads and compares; changes nothing.

    Error: `ConfigError` where a named checkpoint is not complete, where keys that change the result differ, or where the
    checkpoint is beyond the last step.
    """
    resume, own = config.trainer.resume, user_path(config.run.dir) / FOLDER
    if resume == "never":
        return StartPoint()
    if resume == "auto":
        found = _newest(config, own)
        if found.checkpoint is None:
            _check_allowed(config, ())
            return StartPoint(warnings=found.skipped)
        checkpoint, skipped, in_place = found.checkpoint, found.skipped, True
    else:
        checkpoint, skipped = _named(user_path(resume)), ()
        in_place = _lies_in(checkpoint.folder, own)
    _check(config, checkpoint)
    return StartPoint(checkpoint, in_place, (*skipped, *_other_versions(checkpoint)))


def _newest(config: Config, own: Path) -> Found:
    try:
        if own.exists() and not own.is_dir():
            raise ConfigError(
                f"{own} is a file, and checkpoints lie in a folder of this name; remove it or give another run.dir"
            )
        return CheckpointStore(own, config.trainer.keep_checkpoints).newest()
    except OSError as error:
        raise ConfigError(f"{own} cannot be read: {error.strerror}; mend that or give another run.dir") from None


def _lies_in(folder: Path, own: Path) -> bool:
    """Whether the checkpoint is one of `own`, the folder of this run's checkpoints, links followed or not.

    Error: `ConfigError` where it lies elsewhere in `run.dir`, which would be set aside with the checkpoint in it.
    """
    real, run = folder.resolve(), own.parent.resolve()
    unfollowed = folder.parent.resolve() / folder.name
    if own.resolve() in (real.parent, unfollowed.parent):
        return True
    if real.is_relative_to(run) or unfollowed.is_relative_to(run):
        raise ConfigError(
            f"trainer.resume={folder} lies in run.dir={own.parent} but not in its {FOLDER}/, and this run would set run.dir aside with it; "
            f"give another run.dir, or move the checkpoint out of run.dir or to {own / folder.name}"
        )
    return False


def find_restart(config: Config, first: StartPoint) -> StartPoint:
    """Where this run goes on after a failure: from the newest complete checkpoint in `run.dir`, else as it began.

    Whatever `trainer.resume` says: what lies there now is of this run.
    """
    found = CheckpointStore(user_path(config.run.dir) / FOLDER, config.trainer.keep_checkpoints).newest()
    if found.checkpoint is None:
        return replace(first, warnings=found.skipped)
    return StartPoint(found.checkpoint, True, found.skipped)


def _named(folder: Path) -> Checkpoint:
    try:
        return open_checkpoint(folder)
    except ValueError as error:
        raise ConfigError(
            f"trainer.resume={folder} is not a complete checkpoint: "
            + "; ".join(str(error).splitlines())
            + "; give another one, or trainer.resume=auto for the newest complete one of run.dir"
        ) from None


def _check(config: Config, checkpoint: Checkpoint) -> None:
    total, step = config.trainer.total_steps, checkpoint.state.step
    if total < step:
        raise ConfigError(
            f"trainer.total_steps={total}, and {checkpoint.folder} is of step {step} already; give trainer.total_steps>={step}, an "
            "earlier checkpoint (trainer.resume=PATH), or trainer.resume=never"
        )
    try:
        changed = changes(checkpoint.config, config)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint.folder / 'config.yaml'}: {error}") from None
    _check_allowed(config, [change.key for change in changed])
    refused = [change for change in changed if change.key not in config.trainer.resume_allow]
    if refused:
        lines = [f"  {change.key}: {change.before} in the checkpoint, {change.now} now" for change in refused]
        keys = ",".join(change.key for change in refused)
        raise ConfigError(
            "\n".join(
                [
                    f"{checkpoint.folder} was made with another configuration, and these keys change the result:",
                    *lines,
                    f"give the checkpoint's values, allow the change with trainer.resume_allow=[{keys}], or begin anew with "
                    "trainer.resume=never",
                ]
            )
        )


def _check_allowed(config: Config, changed: Iterable[str]) -> None:
    """Error: `ConfigError` where `trainer.resume_allow` has a key that neither this version nor the checkpoint has."""
    known = {*keys(config), *changed}
    wrong = [f"unknown key {key}{nearest(key, known)}" for key in config.trainer.resume_allow if key not in known]
    if wrong:
        raise ConfigError(*(f"trainer.resume_allow: {each}" for each in wrong))


def check_data(config: Config, checkpoint: Checkpoint, digests: Mapping[str, str]) -> None:
    """Compares the prompts of each training file with those that the checkpoint's run has read.

    `trainer.resume_allow=[data.train_files]` allows others. Error: `ConfigError` naming the files.
    """
    if "data.train_files" in config.trainer.resume_allow:
        return
    before = checkpoint.state.data
    changed = [name for name in sorted({*before, *digests}) if before.get(name) != digests.get(name)]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}: these prompts are not those that {checkpoint.folder} was trained on (content, order or "
            "tokenizer has changed), so its position in the data means nothing; restore the file, allow the change with "
            "trainer.resume_allow=[data.train_files], or begin anew with trainer.resume=never"
        )


def trained_roles(config: Config) -> dict[str, RoleState]:
    """How the roles with a state of their own are laid out."""
    sections = {"actor": config.actor} | ({"critic": config.critic} if config.algorithm.needs_critic else {})
    return {
        role: RoleState(layout_words(section.layout), pool_of(config, role).devices)
        for role, section in sections.items()
    }


def versions() -> dict[str, str]:
    """Of the libraries that trained states depend on."""
    return {name: installed_version(name) for name in ("flowrl", "torch", "megatron-core")}


def _other_versions(checkpoint: Checkpoint) -> Sequence[str]:
    before, now = checkpoint.state.versions, versions()
    differ = [f"{name} {before.get(name)} then, {now[name]} now" for name in now if before.get(name) != now[name]]
    if not differ:
        return ()
    return (
        f"{checkpoint.folder.name} was written with other versions, so results may differ in the last bits: {'; '.join(differ)}",
    )
