from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.checkpoints.manifest import digest_file
from flowrl.checkpoints.reading import DEPTH, TEXT_BYTES, check_yaml, parse_json
from flowrl.checkpoints.state import RoleState, RunState
from flowrl.checkpoints.store import ROLE_FILES, CheckpointStore, open_checkpoint

FILES = tuple(f"actor/{name}" for name in ("__0_0.distcp", *ROLE_FILES))


def saved(folder: Path) -> Path:
    store = CheckpointStore(folder, keep=0)
    partial = store.begin(4)
    (partial / "actor").mkdir()
    for name in FILES:
        (partial / name).write_text(name)
    state = RunState(4, "id", 12, 0.1, {}, {}, {"actor": RoleState("tp 1, pp 1", 1)}, {})
    return store.commit(state, "step: 4\n", [digest_file(partial, name) for name in FILES])


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """With a manifest that fits, as one who wishes ill would write it."""
    (folder / name).write_bytes(content)
    rows = json.loads((folder / "manifest.json").read_text())
    digest = digest_file(folder, name)
    rows["files"][name] = {"bytes": digest.bytes, "sha256": digest.sha256}
    (folder / "manifest.json").write_text(json.dumps(rows))


def listed(change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        raw = json.loads((folder / "manifest.json").read_text())
        change(raw["files"])
        (folder / "manifest.json").write_text(json.dumps(raw))

    return damage


def pipe(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


def written(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: rewrite(folder, name, content)


def state(**change: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        raw = json.loads((folder / "state.json").read_text())
        rewrite(folder, "state.json", json.dumps(raw | change).encode())

    return damage


DEEP = b"[" * 200_000
ROW = {"bytes": 1, "sha256": ""}
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "manifest.json").write_bytes(DEEP), "manifest.json is damaged: its JSON is nested too deeply"),
    (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "manifest.json is damaged: it is not UTF-8"),
    (pipe("manifest.json"), "manifest.json is no regular file"),
    (pipe("state.json"), "state.json is no regular file"),
    (pipe("config.yaml"), "config.yaml is no regular file"),
    (listed(lambda files: files.update({"a" * 300: ROW})), "File name too long"),
    (listed(lambda files: files.update({"\ud800": ROW})), "is not a file of the checkpoint"),
    (listed(lambda files: files.update({"a\0": ROW})), "is not a file of the checkpoint"),
    (listed(lambda files: files.update({"./state.json": ROW})), "is not a file of the checkpoint"),
    (listed(lambda files: files.pop("state.json")), "state.json is not in manifest.json"),
    (listed(lambda files: files.pop("config.yaml")), "config.yaml is not in manifest.json"),
    (listed(lambda files: files.pop("actor/.metadata")), "actor/.metadata is not in manifest.json"),
    (listed(lambda files: files.pop("actor/common.pt")), "actor/common.pt is not in manifest.json"),
    (listed(lambda files: files.pop("actor/metadata.json")), "actor/metadata.json is not in manifest.json"),
    (listed(lambda files: files.pop("actor/__0_0.distcp")), "actor/*.distcp: none is in manifest.json"),
    (lambda folder: (folder / "actor" / "__1_0.distcp").touch(), "__1_0.distcp' is there and not in manifest.json"),
    (written("state.json", DEEP), "state.json is damaged: its JSON is nested too deeply"),
    (written("state.json", b"\xff"), "state.json is damaged: it is not UTF-8"),
    (written("state.json", b" " * (TEXT_BYTES + 1)), f"at most {TEXT_BYTES} are read"),
    (state(kl_coefficient=10**400), "kl_coefficient=1"),
    (state(roles={"../actor": {"layout": "", "world_size": 1}}), "roles="),
    (state(roles={"": {"layout": "", "world_size": 1}}), "roles="),
    (written("config.yaml", b"\xff"), "config.yaml is damaged: it is not UTF-8"),
    (written("config.yaml", DEEP), "config.yaml is damaged: "),
    (written("config.yaml", b"a: &x [1]\nb: [*x, *x]\n"), "an anchor, an alias or a tag"),
    (written("config.yaml", b"[1, 2]"), "no mapping of sections"),
    (written("config.yaml", b""), "no mapping of sections"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_whatever_lies_in_the_folder_is_a_problem_in_words(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    """CKP-01: nothing waits, nothing but `ValueError` comes out, and `auto` passes the checkpoint over."""
    folder = saved(tmp_path)
    assert open_checkpoint(folder).state.step == 4
    damage(folder)
    with pytest.raises(ValueError) as caught:
        open_checkpoint(folder)
    assert words in str(caught.value)
    str(caught.value).encode()
    assert words in CheckpointStore(tmp_path, keep=0).newest().skipped[0]


def test_a_name_that_no_file_can_have_is_a_problem_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="File name too long"):
        open_checkpoint(tmp_path / ("a" * 300))


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * DEPTH + "]" * DEPTH, "a: !!python/name:os.system", "a: !!binary x", "a: 1\n---\nb: 2\n",
        "a: [", "? [x]\n: 1", "a: " + "1:" * 400 + "1.5", "a: 9999-99-99", "a: \x00",
    ],
)  # fmt: skip
def test_yaml_that_no_configuration_has_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"config\.yaml"):
        check_yaml(text, "config.yaml")


def test_json_that_is_none_is_told_with_its_file() -> None:
    with pytest.raises(ValueError, match="x is damaged: it is not JSON"):
        parse_json("1" * 5000, "x")
