"""Functions of vLLM that flowrl replaces, since they would act on the whole process, or take it for the whole GPU.

Read in vLLM 0.26.0 and 0.32.0, as `vllm_private`, whose `PRIVATE_NAMES` and `CPU_NAMES` list them, but for `gc` of `COLLECTING`,
which a module may also not have.
"""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from flowrl.workers.mixture import mixture

logger = logging.getLogger(__name__)
CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
COLLECTING = ("vllm.v1.engine.core", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner")
TAKEN_MEANWHILE = "Memory usage increased after sleeping"


def beside_others(sleep: Callable[..., None]) -> Callable[..., None]:
    """`Worker.sleep` that does not mind memory which other processes of the GPU take meanwhile.

    vLLM compares what is free on the whole GPU before and after, and raises when the memory of its own is given back already.
    """

    @wraps(sleep)
    def sleeps(self: Any, level: int = 1) -> None:
        try:
            sleep(self, level)
        except AssertionError as error:
            if TAKEN_MEANWHILE not in str(error):
                raise
            logger.info(
                "the GPU has less free memory than before the engine went to sleep: another process must have taken it"
            )

    return sleeps


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    """Multiply with the parameter itself: vLLM's packed copies would not see weights that are written later."""
    layer.cpu_linear = torch.nn.functional.linear


def _keep_as_loaded(self: Any, layer: torch.nn.Module) -> None:
    """vLLM would repack expert weights in place, and read whatever is written later in the wrong layout."""


def _plain_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    *_: Any,
    **__: Any,
) -> None:
    """In place of a kernel that needs repacked weights and knows nothing of experts on other ranks."""
    assert activation.value == "silu", f"experts with activation {activation.value} are not known"
    output.copy_(mixture(hidden_states, w1, w2, topk_weights, topk_ids, expert_map))


def tame() -> None:
    """Replace the functions of vLLM that would act on the whole process or hide the weights. Once in a process."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    for module in ("layers.utils", "layers.linear", "layers.vocab_parallel_embedding"):
        loaded = importlib.import_module(f"vllm.model_executor.{module}")
        if "dispatch_cpu_unquantized_gemm" in vars(loaded):
            vars(loaded)["dispatch_cpu_unquantized_gemm"] = _plain_linear
    if not torch.cuda.is_available():
        experts = importlib.import_module(CPU_EXPERTS).CPUUnquantizedExperts
        experts.process_weights_after_loading, experts.apply = _keep_as_loaded, _plain_experts
    else:
        from flowrl.workers import sampling_gpu

        sampling_gpu.install()
        worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
        worker.sleep = beside_others(worker.sleep)
    core = vars(importlib.import_module("vllm.v1.engine.core"))
    # Without this, dropping an engine destroys the default process group, which the trainer uses too.
    core["cleanup_dist_env_and_memory"] = lambda *args, **kwargs: None
    if not torch.cuda.is_available():
        # vLLM freezes all objects that exist, other roles' too, so that no collection goes through them in a generation or
        # a sleep. Beside a GPU that is a quarter of a generation's time; on a CPU what it costs at start and end is more.
        core["freeze_gc_heap"] = lambda: None
        vars(importlib.import_module("vllm.v1.worker.gpu_worker"))["freeze_gc_heap"] = lambda: None
        # Nor shall it bring back to the collector what was frozen after the imports, and look through all of it.
        quiet = {"collect": lambda *_: 0, "freeze": lambda: None, "unfreeze": lambda: None}
        for name in COLLECTING:
            theirs = vars(importlib.import_module(name))
            if "gc" in theirs:
                theirs["gc"] = SimpleNamespace(**{**vars(gc), **quiet})
