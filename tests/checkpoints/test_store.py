from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.checkpoints import store as store_module
from flowrl.checkpoints.files import Files, replace_text
from flowrl.checkpoints.manifest import digest_file
from flowrl.checkpoints.state import RoleState, RunState
from flowrl.checkpoints.store import CheckpointStore, SaveError, open_checkpoint

STATE = RunState(
    step=4, run_id="abc", total_steps=12, kl_coefficient=0.01, data={"prompts.jsonl": "d1"},
    skipped_in_a_row={"policy/skipped_steps": 1}, roles={"actor": RoleState("tp 2, pp 1", 2), "critic": RoleState("tp 1, pp 1", 2)},
    versions={"flowrl": "0.4"},
)  # fmt: skip
SHARDS = (
    "actor/__0_0.distcp", "actor/__1_0.distcp", "actor/common.pt", "actor/.metadata", "actor/metadata.json",
    "critic/__0_0.distcp", "critic/common.pt", "critic/.metadata", "critic/metadata.json",
)  # fmt: skip


class Killed(BaseException):
    """Stands for SIGKILL: nothing below may catch it."""


class Dying(Files):
    """A disk whose process dies in its `last`-th operation, before it or in the middle of it."""

    def __init__(self, last: int, half: bool) -> None:
        self.count, self._last, self._half = 0, last, half

    def _dies(self) -> bool:
        self.count += 1
        return self.count == self._last

    def make_folder(self, path: Path) -> None:
        if self._dies():
            raise Killed
        super().make_folder(path)

    def write(self, path: Path, text: str) -> None:
        if self._dies():
            if self._half:
                path.write_text(text[: len(text) // 2])
            raise Killed
        super().write(path, text)

    def sync(self, path: Path) -> None:
        if self._dies():
            raise Killed
        super().sync(path)

    def rename(self, path: Path, to: Path) -> None:
        if self._dies():
            if self._half:
                super().rename(path, to)
            raise Killed
        super().rename(path, to)

    def remove(self, path: Path) -> None:
        if self._dies():
            if self._half and path.is_dir():
                for file in sorted(path.rglob("*"))[::2]:
                    if file.is_file():
                        file.unlink()
            raise Killed
        super().remove(path)


def save(store: CheckpointStore, step: int) -> Path:
    """What a run does, with the roles' files written by hand."""
    partial = store.begin(step)
    for name in SHARDS:
        path = partial / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(f"{name} of {step}".encode() * 50)
    return store.commit(replace(STATE, step=step), f"step: {step}\n", [digest_file(partial, name) for name in SHARDS])


def test_a_saved_checkpoint_is_found_with_its_state_and_configuration(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    assert store.newest().checkpoint is None
    folder = save(store, 4)
    found = store.newest()
    assert found.skipped == () and found.checkpoint is not None
    assert (found.checkpoint.folder, found.checkpoint.state, found.checkpoint.config) == (folder, STATE, "step: 4\n")
    assert {path.name for path in store.folder.iterdir()} == {"step_4"}


def test_the_newest_are_kept_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        save(store, step)
    assert store.steps() == [3, 4]
    (tmp_path / "step_4" / SHARDS[0]).write_bytes(b"")
    save(store, 5)
    assert store.steps() == [3, 4, 5]  # two complete ones and, between them, the damaged one
    save(store, 6)
    assert store.steps() == [5, 6]
    keeps_all = CheckpointStore(tmp_path / "all", keep=0)
    for step in (1, 2, 3, 4):
        save(keeps_all, step)
    assert keeps_all.steps() == [1, 2, 3, 4]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_any_operation_leaves_the_last_checkpoint_usable(tmp_path: Path, keep: int, half: bool) -> None:
    """CKP-01: killed before or within every operation of a save with retention, a run finds a complete checkpoint, at
    least the previous one, skips nothing, and can clean up and save again."""
    counting = Dying(0, half)
    for step in (1, 2, 3):
        save(CheckpointStore(tmp_path / "before", keep), step)
    for last in range(1, 100):
        folder = tmp_path / str(last)
        shutil.copytree(tmp_path / "before", folder)
        dying = Dying(last, half)
        try:
            save(CheckpointStore(folder, keep, dying), 4)
            counting = dying
            break
        except Killed:
            pass
        store = CheckpointStore(folder, keep)
        found = store.newest()
        assert found.checkpoint is not None and found.skipped == (), last
        assert found.checkpoint.state.step in (3, 4)
        resumed = found.checkpoint.state.step
        store.clean(resumed)
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        save(store, resumed + 1)
        assert store.newest().checkpoint is not None and store.steps()[-1] == resumed + 1
        assert len(store.steps()) <= keep + 1
    assert counting.count > 15  # the loop has reached an undisturbed save


def damage(folder: Path, how: str) -> None:
    shard = folder / SHARDS[0]
    if how == "a shard cut to half":
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    elif how == "one byte flipped":
        content = bytearray(shard.read_bytes())
        content[7] ^= 1
        shard.write_bytes(content)
    elif how == "no critic":
        shutil.rmtree(folder / "critic")
    elif how == "a file in its place":
        shutil.rmtree(folder)
        folder.touch()
    elif how == "an empty folder in its place":
        shutil.rmtree(folder)
        folder.mkdir()
    else:
        (folder / how.removeprefix("no ")).unlink()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("a shard cut to half", "actor/__0_0.distcp is truncated: "),
        ("one byte flipped", "actor/__0_0.distcp is damaged: sha256"),
        ("no critic", "critic/__0_0.distcp is missing"),
        ("no state.json", "state.json is missing"),
        ("no config.yaml", "config.yaml is missing"),
        ("no manifest.json", "manifest.json cannot be read"),
        ("a file in its place", "it is not a folder"),
        ("an empty folder in its place", "manifest.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_the_reason_and_kept_aside(tmp_path: Path, how: str, words: str) -> None:
    """CKP-01: the one before is taken; an explicit path to the damaged one is an error with the same words."""
    store = CheckpointStore(tmp_path, keep=3)
    for step in (4, 9, 10):
        save(store, step)
    damage(tmp_path / "step_10", how)
    found = store.newest()
    assert found.checkpoint is not None and found.checkpoint.state.step == 9
    assert len(found.skipped) == 1 and found.skipped[0].startswith("step_10 is not complete and was skipped: ")
    assert words in found.skipped[0]
    with pytest.raises(ValueError, match=words.split(":")[0]):
        open_checkpoint(tmp_path / "step_10")
    assert store.clean(9) == ["step_10 is called step_10.old now: the run goes on from step 9"]
    save(store, 10)
    assert store.newest().skipped == () and store.steps() == [4, 9, 10]
    store.clean(4)
    assert {path.name for path in tmp_path.iterdir()} == {"step_4", "step_9.old", "step_10.old", "step_10.old1"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "4"}, "step='4'"),
        ({"step": -1}, "step=-1"),
        ({"step": True}, "step=True"),
        ({"kl_coefficient": float("nan")}, "kl_coefficient=nan"),
        ({"roles": {"actor": {"layout": "tp 1"}}}, "roles="),
        ({"skipped_in_a_row": []}, "skipped_in_a_row="),
        ({"data": {"a": 3}}, "data="),
        ({"roles": {"critic": {"layout": "tp 1", "world_size": 1}, "reward": {"layout": "", "world_size": 1}}}, "reward/ is missing"),
        ({"step": 5}, "state.json is of step 5; a checkpoint's folder must be called step_5"),
        (None, "it has no step"),
        ("half", "it is not JSON"),
        ("[]", "it is no object"),
    ],
)  # fmt: skip
def test_a_state_that_makes_no_sense_is_a_problem_in_words(tmp_path: Path, change: object, words: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    partial = store.begin(4)
    for name in SHARDS:
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).touch()
    store.commit(STATE, "step: 4\n", [digest_file(partial, name) for name in SHARDS])
    raw = json.loads(STATE.to_json())
    text = json.dumps(raw | change) if isinstance(change, dict) else "{}"
    if isinstance(change, str):
        text = text[:1] if change == "half" else change
    path = tmp_path / "step_4" / "state.json"
    path.write_text(text)
    manifest = tmp_path / "step_4" / "manifest.json"
    rows = json.loads(manifest.read_text())
    digest = digest_file(path.parent, path.name)
    rows["files"]["state.json"] = {"bytes": digest.bytes, "sha256": digest.sha256}
    manifest.write_text(json.dumps(rows))
    found = store.newest()
    assert found.checkpoint is None and words in found.skipped[0]


class Full(Files):
    """A disk that refuses every write from the `first`-th on."""

    def __init__(self, first: int, number: int) -> None:
        self._left, self._number = first, number

    def write(self, path: Path, text: str) -> None:
        self._left -= 1
        if self._left <= 0:
            raise OSError(self._number, errno.errorcode[self._number], str(path))
        super().write(path, text)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_disk_that_refuses_is_one_error_with_folder_and_numbers(tmp_path: Path, first: int, number: int) -> None:
    """CKP-01: the previous checkpoint stays usable."""
    save(CheckpointStore(tmp_path, keep=1), 3)
    with pytest.raises(SaveError) as caught:
        save(CheckpointStore(tmp_path, 1, Full(first, number)), 4)
    message = str(caught.value)
    assert str(tmp_path) in message and errno.errorcode[number] in message and "bytes" in message
    assert "complete: step_3" in message
    found = CheckpointStore(tmp_path, keep=1).newest().checkpoint
    assert found is not None and found.state.step == 3


def test_too_little_room_is_told_before_a_save_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 3)
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: Usage(10, 8, store.last_bytes() - 1))
    with pytest.raises(SaveError, match=r"has \d+ bytes free, and a checkpoint takes about \d+, .*make room there$"):
        store.begin(4)
    with pytest.raises(SaveError, match=r"keep fewer: trainer.keep_checkpoints=0 keeps all"):
        CheckpointStore(tmp_path, keep=0).begin(4)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: Usage(10, 8, store.last_bytes()))
    store.begin(4)


def test_files_that_this_process_does_not_see_are_never_called_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    partial = store.begin(4)
    (partial / "actor").mkdir()
    (partial / SHARDS[0]).write_bytes(b"abc")
    digest = digest_file(partial, SHARDS[0])
    for wrong in (replace(digest, path="actor/of_another_node"), replace(digest, bytes=4)):
        with pytest.raises(SaveError, match="a folder that all nodes share"):
            store.commit(STATE, "", [wrong])
    assert store.newest().checkpoint is None


def test_a_replaced_text_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for last in (1, 2, 3):
        for half in (False, True):
            path.write_text("old")
            with pytest.raises(Killed):
                replace_text(Dying(last, half), path, "new text")
            assert path.read_text() in ("old", "new text")
