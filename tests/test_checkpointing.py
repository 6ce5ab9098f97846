"""When a run's checkpoints become complete, with roles that write one small file each."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from flowrl.checkpointing import Checkpointing
from flowrl.checkpoints.manifest import FileDigest, digest_file
from flowrl.checkpoints.start import StartPoint, find_start, trained_roles, versions
from flowrl.checkpoints.state import RunState
from flowrl.checkpoints.store import ROLE_FILES
from flowrl.config.compose import compose
from flowrl.config.schema import Config
from flowrl.config.tree import ConfigError
from flowrl.console import StepConsole

SHARD = "__0_0.distcp"


class Role:
    """Answers as a group of two ranks does."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight, self.calls = weight, []

    def save_state(self, folder: str) -> None:
        self.calls.append("save")
        Path(folder).mkdir(parents=True)
        self._folder, self._written = Path(folder), f"{self.weight}"

    def finish_save(self) -> list[tuple[FileDigest, ...]]:
        self.calls.append("finish")
        if self._written == "nan":
            raise ValueError("weight.x holds a number that is not finite")
        (self._folder / SHARD).write_text(self._written)
        names = (SHARD, *ROLE_FILES)
        for name in ROLE_FILES:
            (self._folder / name).touch()
        return [tuple(digest_file(self._folder, name) for name in names), ()]

    def load_state(self, folder: str) -> str:
        self.weight = float((Path(folder) / SHARD).read_text())
        return "weights"

    def reload(self) -> None:
        self.calls.append("reload")


def made(folder: Path, start: StartPoint | None = None, *overrides: str) -> tuple[Checkpointing, Config, io.StringIO]:
    config = compose(
        [f"run.dir={folder}", "trainer.save_every=1", "trainer.total_steps=9", "cluster.devices=1", *overrides]
    )
    out = io.StringIO()
    console = StepConsole(9, Console(file=out, width=500, force_terminal=False))
    return Checkpointing(config, folder, start or StartPoint(), console), config, out


def state(step: int, config: Config) -> RunState:
    return RunState(step, "id", 9, 0.0, {}, {}, trained_roles(config), versions())


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_a_checkpoint_has_the_tensors_of_its_step_and_waits_for_its_metrics(tmp_path: Path) -> None:
    checkpoints, config, _ = made(tmp_path)
    actor, critic = Role(1.5), Role(2.5)
    checkpoints.begin(1, {"actor": actor, "critic": critic})
    actor.weight = 9.0
    checkpoints.complete()  # the step has not ended
    assert names(tmp_path) == {".step_1.partial"}
    checkpoints.settle(state(1, config))
    assert names(tmp_path) == {".step_1.partial"}
    checkpoints.complete()
    checkpoints.complete()
    assert names(tmp_path) == {"step_1"} and actor.calls == ["save", "finish"]
    assert (tmp_path / "checkpoints" / "step_1" / "actor" / SHARD).read_text() == "1.5"
    start = find_start(config)
    assert start.step == 1
    again, _, out = made(tmp_path, start, "cluster.devices=2", "actor.layout.tp=2")
    assert again.restored("actor", Role()).weight == 1.5 and again.restored("critic", Role()).weight == 2.5
    assert (
        "resumed from checkpoints/step_1: actor (tp 1, pp 1 on 1 rank(s) -> tp 2, pp 1 on 2 rank(s)): weights"
        in out.getvalue()
    )


def test_a_driver_that_reloads_nothing_completes_one_step_later(tmp_path: Path) -> None:
    checkpoints, config, _ = made(tmp_path)
    actor = Role()
    for step in (1, 2):
        checkpoints.begin(step, {"actor": actor, "critic": None})
        checkpoints.settle(state(step, config))
    assert names(tmp_path) == {"step_1", ".step_2.partial"}
    checkpoints.settle(state(3, config))
    assert names(tmp_path) == {"step_1", "step_2"}


def test_weights_that_are_not_finite_never_replace_finite_ones(tmp_path: Path) -> None:
    """NUM-01: with one checkpoint kept, the finite one stays."""
    checkpoints, config, _ = made(tmp_path, None, "trainer.keep_checkpoints=1", "algorithm=grpo")
    actor = Role()
    for step, weight in ((1, 1.0), (2, float("nan"))):
        actor.weight = weight
        checkpoints.begin(step, {"actor": actor})
        checkpoints.settle(state(step, config))
        if step == 1:
            checkpoints.complete()
    with pytest.raises(ValueError, match="not finite"):
        checkpoints.complete()
    assert find_start(config).step == 1
    again, _, out = made(tmp_path, find_start(config))
    again.prepare(tmp_path)
    assert names(tmp_path) == {"step_1"} and "removed .step_2.partial" in out.getvalue()


def test_a_stop_saves_the_last_step_once(tmp_path: Path) -> None:
    checkpoints, config, _ = made(tmp_path, None, "algorithm=grpo")
    actor = checkpoints.restored("actor", Role())
    checkpoints.save_now(state(3, config))
    checkpoints.save_now(state(3, config))
    assert names(tmp_path) == {"step_3"} and actor.calls == ["reload", "save", "finish"]
    checkpoints.begin(4, {"actor": actor})
    checkpoints.settle(state(4, config))
    checkpoints.save_now(state(4, config))
    assert names(tmp_path) == {"step_3", "step_4"} and actor.calls.count("save") == 2


def test_a_role_that_the_checkpoint_does_not_have_begins_anew_and_says_so(tmp_path: Path) -> None:
    checkpoints, config, _ = made(tmp_path, None, "algorithm=grpo")
    checkpoints.restored("actor", Role(4.0))
    checkpoints.save_now(state(3, config))
    allowed = ("trainer.resume_allow=[algorithm]",)
    start = find_start(made(tmp_path, None, *allowed)[1])
    again, _, out = made(tmp_path, start, *allowed)
    assert again.restored("critic", Role(7.0)).weight == 7.0
    assert "warning: step_3 has no critic: it begins with the weights of its model folder" in out.getvalue()


def test_what_would_make_a_save_fail_is_told_before_the_run(tmp_path: Path) -> None:
    """CKP-03: folders that cannot be written, and files of the model that cannot be copied."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer.json").symlink_to("/proc/self/mem")
    checkpoints, _, _ = made(tmp_path / "one", None, "trainer.export_every=1")
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read: .*; trainer.export_every copies"):
        checkpoints.prepare(model)
    for name in ("checkpoints", "export"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(ConfigError, match=rf"{name} cannot be written, where .*trainer"):
            made(folder, None, "trainer.export_every=1")[0].prepare(model)
