"""Commands and files in docs/cluster.md: their syntax, and every key that they set."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from flowrl.config.compose import compose_all
from flowrl.config.machine import Machine
from flowrl.config.schema import Config
from flowrl.config.tree import knobs

TEXT = (Path(__file__).parent.parent / "docs" / "cluster.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def commands() -> list[str]:
    found = re.findall(r"python -m flowrl\.(?:main_ppo|doctor) (cluster\.[^`\n]*?)(?: \.\.\.|$|\n|`)", TEXT)
    return [text for text in found if "$" not in text]


def test_shell_blocks_are_shell() -> None:
    assert len(blocks("bash")) >= 4
    for block in blocks("bash"):
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


def test_the_job_for_kubernetes_is_one_with_gpus_and_shared_storage() -> None:
    (block,) = blocks("yaml")
    job = yaml.safe_load(block)
    assert job["kind"] == "RayJob"
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert f"cluster.devices={gpus * workers['replicas']} " in job["spec"]["entrypoint"]
    for group in (workers, job["spec"]["rayClusterSpec"]["headGroupSpec"]):
        assert {"/shared", "/dev/shm"} == {
            m["mountPath"] for m in group["template"]["spec"]["containers"][0]["volumeMounts"]
        }


@pytest.mark.parametrize("command", commands())
def test_every_command_is_a_configuration(command: str) -> None:
    """With the built-in model in the place of one that is on shared storage, whose sizes suit the layouts."""
    words = [
        w for w in command.split() if not w.startswith(("model.path=", "actor.layout.", "rollout.layout.", "step="))
    ]
    machine = Machine(cpus=64, memory_bytes=2**40, shared_memory_bytes=2**38, gpus=8, gpu_memory_bytes=80 * 2**30)
    assert compose_all(words, machine=machine).config.cluster.device == "cuda"


def test_every_key_that_is_named_exists() -> None:
    known = knobs(Config)
    named = set(re.findall(r"\b((?:trainer|cluster|actor|rollout|model|run)(?:\.[a-z_]+)+)\b(?!\()", TEXT))
    missing = {name for name in named if name not in known and not any(key.startswith(f"{name}.") for key in known)}
    assert len(named) > 10 and not missing, missing
