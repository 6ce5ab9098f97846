"""What the doctor makes of measurements, and one visit to this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.checks import judgement
from flowrl.checks.node import NodeFacts, folder_digest
from flowrl.doctor import _existing, _pairs

ROOT = Path(__file__).parent.parent
GIB = 2**30
NODE = NodeFacts("3.11.7", {"ray": "2.60.0", "torch": "2.13.0"}, "CPU device", 64 * GIB, 8 * GIB, 65536, {}, "abc")


def test_versions_are_compared_with_the_lock_or_else_with_the_first_node():
    """RAY-06: nodes that differ fail; nodes that agree with each other but not with the lock are a warning."""
    older = replace(NODE, versions={"ray": "2.9.0", "torch": "2.13.0"})
    locked = judgement.locked_versions("# a comment\nray==2.60.0 \\\n    --hash=sha256:ab\ntorch==2.13.0\n")
    assert locked == {"ray": "2.60.0", "torch": "2.13.0"}
    (found,) = judgement.versions({"a": NODE, "b": NODE}, locked, "cpu.lock")
    assert found.level == "ok" and "2 packages as in cpu.lock on 2 node(s)" in found.text
    (found,) = judgement.versions({"a": NODE, "b": older}, {}, "cpu.lock")
    assert found.level == "fail" and found.text == "node b has ray 2.9.0, not 2.60.0"
    (found,) = judgement.versions({"a": older, "b": older}, locked, "cpu.lock")
    assert found.level == "warn"
    found, _ = judgement.versions({"a": NODE, "b": replace(NODE, python="3.12.1")}, {}, "cpu.lock")
    assert (found.level, found.name) == ("fail", "python")


def test_what_is_short_is_named_with_the_remedy():
    facts = {"a": NODE, "b": replace(NODE, free_shared_memory=64 << 20, open_files=1024)}
    memory, shared, files = judgement.memory(facts)
    assert [memory.level, shared.level, files.level] == ["ok", "warn", "warn"]
    assert shared.text == "node b: 0.0625 GiB free is under 1 GiB free" and "--shm-size" in shared.remedy
    assert files.text == "node b: 1024 is under 4096" and "ulimit -n" in files.remedy
    assert judgement.disk(10 * GIB, weights=GIB).level == "warn"
    assert judgement.disk(100 * GIB, weights=GIB).level == "ok"
    assert judgement.exit_code([shared, files]) == 0


def test_a_folder_that_one_node_does_not_share_fails():
    nodes = ["a", "a", "b"]
    good = judgement.shared("/runs", nodes, [True] * 3, [[0, 1, 2]] * 3, [0, 1, 2])
    assert good.level == "ok"
    alone = judgement.shared("/runs", nodes, [True] * 3, [[0, 1], [0, 1], [2]], [0, 1])
    assert alone.level == "fail" and "b" in alone.text and judgement.exit_code([good, alone]) == 1
    one = judgement.shared("/runs", nodes, [True, True, False], [[0, 1]] * 3, [0, 1])
    assert one.level == "fail"


def test_clocks_models_sums_and_speeds_are_judged():
    assert judgement.skew({"a": 0.01, "b": -30.0}, 0.002).level == "warn"
    assert "node b is -30.000 s off" in judgement.skew({"a": 0.01, "b": -30.0}, 0.002).text
    assert judgement.model({"a": NODE, "b": replace(NODE, digest="other"), "c": NODE}, "/m").level == "fail"
    assert judgement.model({"a": replace(NODE, digest=judgement.ABSENT)}, "/m").level == "fail"
    assert judgement.model({"a": NODE, "b": NODE}, "/m").level == "ok"
    assert judgement.rendezvous([6.0, 6.0, 6.0], 0.1, "nccl").level == "ok"
    assert judgement.rendezvous([6.0, 6.0, 5.0], 0.1, "nccl").level == "fail"
    speeds = {"a -> b": 40.0, "b -> c": 10.0, "c -> a": 42.0}
    slow = judgement.bandwidth(speeds, "cuda")
    assert slow.level == "warn" and slow.text.startswith("b -> c: 10 GB/s (median of 3 pairs: 40)")
    assert judgement.bandwidth({"a -> b": 0.9}, "cuda").level == "warn"
    assert judgement.bandwidth({"a -> b": 0.9}, "cpu").level == "ok"
    assert judgement.devices({"a": ["H100"] * 8, "b": ["A100"] * 8}).level == "warn"


def test_variables_that_differ_between_nodes_are_a_warning_but_for_the_name_of_gloos_interface():
    set_here = {"a": replace(NODE, environment={"NCCL_IB_HCA": "mlx5"}), "b": NODE}
    assert judgement.environment(set_here).level == "warn"
    named = {n: replace(NODE, environment={"GLOO_SOCKET_IFNAME": n}) for n in ("eth0", "ens3")}
    assert judgement.environment(named).level == "ok"


def test_pairs_are_a_ring_of_nodes_and_one_inside_each():
    assert _pairs(["a"]) == []
    assert _pairs(["a", "a", "b", "b", "c"]) == [(0, 2), (2, 4), (4, 0), (0, 1), (2, 3)]


def test_the_digest_of_a_folder_sees_names_sizes_and_ends(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(3 << 20))
    before = folder_digest(tmp_path)
    assert folder_digest(tmp_path) == before and folder_digest(tmp_path / "none") == judgement.ABSENT
    file.write_bytes(bytes((3 << 20) - 1) + b"x")
    assert folder_digest(tmp_path) != before
    assert _existing(tmp_path / "not" / "there") == tmp_path


def test_a_wrong_argument_of_the_doctor_is_one_message():
    done = subprocess.run(
        [sys.executable, "-m", "flowrl.doctor", "step=maybe"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "step=true | step=false" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_the_doctor_finds_nothing_wrong_here_and_leaves_nothing(tmp_path: Path):
    """With the step of the built-in model."""
    done = subprocess.run(
        [sys.executable, "-m", "flowrl.doctor", f"run.dir={tmp_path / 'run'}"],
        cwd=ROOT, capture_output=True, text=True, timeout=500, env={**os.environ, "RAY_ADDRESS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [line for line in done.stdout.splitlines() if line.startswith("fail")]
    assert "made a step" in done.stdout.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
