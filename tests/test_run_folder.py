"""What a run's folder is called, who holds it, and what a refusal leaves behind. No process is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl import launch
from flowrl.config.compose import compose
from flowrl.config.paths import run_lock
from flowrl.config.tree import ConfigError


def test_a_link_to_a_held_folder_is_held_too(tmp_path: Path) -> None:
    (tmp_path / "runs" / "real").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "runs" / "real")
    assert run_lock(link) == run_lock(tmp_path / "runs" / "real") == tmp_path.resolve() / "runs" / ".real.lock"
    with (
        launch._alone(tmp_path / "runs" / "real"),
        pytest.raises(ConfigError, match="still going"),
        launch._alone(link),
    ):
        pass
    assert not run_lock(link).exists()


def test_a_refusal_leaves_no_lock_and_no_new_parents(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "parents" / "run"
    with pytest.raises(ConfigError), launch._gone_if_refused(folder), launch._alone(folder):
        folder.mkdir()
        raise ConfigError("refused")
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_removes_no_parent_that_holds_something(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with pytest.raises(ConfigError), launch._gone_if_refused(folder), launch._alone(folder):
        (tmp_path / "new" / "other").touch()
        raise ConfigError("refused")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["other"]


def test_folders_that_can_hold_no_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run.dir=/ is the root of the file system"):
        compose(["run.dir=/"])
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match="run.dir=.*loop"):
        compose([f"run.dir={tmp_path / 'loop'}"])
    with pytest.raises(ConfigError, match="is no folder; legal: auto"):
        compose([f"trainer.resume={'a' * 300}"])
