from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.checkpoints.files import Files
from flowrl.checkpoints.manifest import MANIFEST, FileDigest, digest_file, read_manifest, verify, write_manifest


def folder_of(root: Path) -> Path:
    (root / "actor").mkdir(parents=True)
    (root / "actor" / "__0_0.distcp").write_bytes(bytes(range(200)))
    (root / "state.json").write_text("{}")
    write_manifest(Files(), root, [digest_file(root, name) for name in ("state.json", "actor/__0_0.distcp")])
    return root


def test_a_digest_names_size_and_hash_relative_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    digest = digest_file(tmp_path, "file")
    assert digest == FileDigest("file", 3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    assert digest.under("actor").path == "actor/file"


def test_a_whole_folder_has_no_problem_and_reads_back(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "step_1")
    assert verify(root) == []
    assert {each.path for each in read_manifest(root)} == {"actor/__0_0.distcp", "state.json"}


def test_each_kind_of_damage_is_told_with_file_and_numbers(tmp_path: Path) -> None:
    """CKP-01: a shard cut to half, a missing file, a flipped byte, no manifest, a manifest cut short, a file in place of
    the folder."""
    root = folder_of(tmp_path / "step_1")
    shard = root / "actor" / "__0_0.distcp"
    whole = shard.read_bytes()

    shard.write_bytes(whole[:100])
    assert verify(root) == ["actor/__0_0.distcp is truncated: 100 of 200 bytes"]
    shard.write_bytes(whole[:-1] + b"\0")
    (problem,) = verify(root)
    assert problem.startswith("actor/__0_0.distcp is damaged: sha256 ")
    shard.unlink()
    (root / "state.json").unlink()
    assert verify(root) == ["actor/__0_0.distcp is missing (200 bytes)", "state.json is missing (2 bytes)"]

    manifest = root / MANIFEST
    manifest.write_text(manifest.read_text()[:30])
    assert verify(root) == ["manifest.json is damaged: it is not JSON"]
    manifest.unlink()
    assert verify(root) == ["manifest.json cannot be read: No such file or directory"]

    assert verify(tmp_path / "step_2") == ["there is no such folder"]
    (tmp_path / "step_3").touch()
    assert verify(tmp_path / "step_3") == ["it is not a folder"]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({"format": 2, "files": {}}, "format 2; this version reads format 1"),
        ([], "format None"),
        ({"format": 1}, "no table of files"),
        ({"format": 1, "files": {"a": {"bytes": "3", "sha256": ""}}}, "a has no size and hash"),
        ({"format": 1, "files": {"../outside": {"bytes": 3, "sha256": ""}}}, "is not a file of the checkpoint"),
        ({"format": 1, "files": {"/etc/passwd": {"bytes": 3, "sha256": ""}}}, "is not a file of the checkpoint"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_a_problem_in_words(tmp_path: Path, content: object, word: str) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    (problem,) = verify(tmp_path)
    assert word in problem


def test_a_manifest_lists_exactly_the_files_that_are_there(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "step_1")
    (root / MANIFEST).unlink()
    digests = [digest_file(root, name) for name in ("state.json", "actor/__0_0.distcp")]
    for wrong, word in (
        (digests[:1], "there but not listed: actor/__0_0.distcp"),
        ([*digests, digests[0]], "listed more than once: state.json"),
        ([*digests, FileDigest("critic/x", 1, "")], "listed but not there: critic/x"),
    ):
        with pytest.raises(ValueError, match=word):
            write_manifest(Files(), root, wrong)
    assert not (root / MANIFEST).exists()
    (root / "actor" / ".nfs0000000000a1").write_bytes(b"of a file that was removed while it was read")
    write_manifest(Files(), root, digests)
    assert verify(root) == []
