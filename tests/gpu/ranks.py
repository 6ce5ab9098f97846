"""Groups of processes on GPUs: a GPU each over NCCL where there are enough, else all on the first one over gloo."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flowrl.resharding.measure.processes import run_ranks

SCENARIOS = str(Path(__file__).parent.parent / "workers")


def run(world: int, function: str, *args: Any, device: str = "cuda") -> list[Any]:
    """Results of `module:function` of `args` by rank. Nothing is imported before the processes are forked: CUDA does not
    survive a fork."""
    own_gpus = device == "cuda" and torch.cuda.device_count() >= world
    return run_ranks(
        world, "nccl" if own_gpus else "gloo", (), "tests.gpu.ranks:enter", device, function, pickle.dumps(args)
    )


def enter(device: str, function: str, packed: bytes) -> Any:
    """In a process: choose its device before anything of flowrl's workers is imported, arguments among them, and run the
    function."""
    if device == "cpu":
        # Before anything asks whether there is a GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        vars(torch.cuda)["is_available"] = lambda: False
    os.environ.update(importlib.import_module("flowrl.workers.environment").process_environment(device, 1))
    through_host = device == "cuda" and dist.get_backend() == "gloo"
    os.environ["FLOWRL_TEST_DEVICE"] = device if device == "cpu" else f"cuda:{0 if through_host else dist.get_rank()}"
    sys.path.insert(0, SCENARIOS)
    if through_host:
        importlib.import_module("tests.gpu.through_host").install()
    module, _, name = function.partition(":")
    return _on_cpu(vars(importlib.import_module(module))[name](*pickle.loads(packed)))


def _on_cpu(value: Any) -> Any:
    """Tensors in lists, tuples and dictionaries, as the test can read them."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(item) for item in value)
    return value
