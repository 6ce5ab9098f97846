"""Code and commands in the documents are true."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.checkpoints.manifest import digest_file
from flowrl.checkpoints.start import find_start, trained_roles, versions
from flowrl.checkpoints.state import RunState
from flowrl.checkpoints.store import CheckpointStore
from flowrl.config.compose import compose, to_yaml
from flowrl.config.tree import ConfigError

ROOT = Path(__file__).parent.parent


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


def test_the_code_of_authoring_runs(tmp_path: Path) -> None:
    blocks = code_blocks(ROOT / "docs" / "authoring.md")
    assert len(blocks) == 3
    main = blocks.pop(1)
    script = tmp_path / "mine.py"
    script.write_text("\n".join([*blocks, main]))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_file_that_a_document_names_exists() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"`((?:flowrl|recipes|docs|tests|requirements)/[\w/.-]+\.\w+)`", document.read_text()):
            assert (ROOT / name).exists(), f"{document.name} names {name}"


def commands(path: Path) -> list[list[str]]:
    """Overrides of every call of the PPO driver in a document."""
    return [
        line.split()[3:] for line in path.read_text().splitlines() if line.startswith("    python -m flowrl.main_ppo")
    ]


def test_the_commands_about_checkpoints_are_legal_and_say_what_they_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as a reader goes through the page, with a checkpoint of step 8 put in the place where the first
    command would have written it; none needs Ray to be decided."""
    monkeypatch.chdir(tmp_path)
    first, elsewhere, allowed, dry, branch = commands(ROOT / "docs" / "checkpoints.md")
    made = compose(first)
    assert find_start(made).checkpoint is None
    store = CheckpointStore(tmp_path / "runs" / "mine" / "checkpoints", keep=0)
    folder = store.begin(8)
    (folder / "actor").mkdir()
    names = [f"actor/{name}" for name in (".metadata", "common.pt", "metadata.json", "__0_0.distcp")]
    for name in names:
        (folder / name).write_bytes(b"x")
    state = RunState(8, "id", 12, 0.0, {}, {}, {"actor": trained_roles(made)["actor"]}, versions())
    store.commit(state, to_yaml(made), [digest_file(folder, name) for name in names])
    for command in (first, elsewhere, allowed, dry):
        start = find_start(compose(command))
        assert start.step == 8 and start.in_place and start.warnings == ()
    assert compose(dry).dry_run
    with pytest.raises(ConfigError, match=r"resume_allow=\[actor.optim.lr\]"):
        find_start(compose(allowed[:-1]))
    assert not find_start(compose(branch)).in_place
