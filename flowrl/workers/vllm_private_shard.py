"""One rank's part of a vLLM model by itself: its parameters and its loader, without an engine, a cache or a group.

Read in vLLM 0.26.0 and 0.32.0, as `vllm_private`.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_STATE = "vllm.distributed.parallel_state"


@dataclass(frozen=True)
class ShardSpec:
    """Which part: tensor-parallel place `tp_rank` of `tp` on pipeline stage `pp_rank` of `pp`.

    `expert_parallel`: whole experts, spread over the tensor-parallel places, instead of slices of all.
    """

    model_path: str
    dtype: str
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    expert_parallel: bool


class _Group:
    """What a model asks of a group while it is built: sizes and places, no communication."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank_in_group, self.world_size = rank, size
        self.rank = self.local_rank = rank
        self.ranks: Sequence[int] = list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = self

    def size(self) -> int:
        return self.world_size


@contextmanager
def _groups(spec: ShardSpec) -> Any:
    """vLLM's groups replaced for as long as the model is built."""
    state = vars(importlib.import_module(_STATE))
    places = {"_TP": (spec.tp_rank, spec.tp), "_PP": (spec.pp_rank, spec.pp)}
    places |= {"_EP": places["_TP"], "_ETP": places["_TP"]} | dict.fromkeys(("_DP", "_DCP", "_PCP"), (0, 1))
    places["_WORLD"] = (spec.pp_rank * spec.tp + spec.tp_rank, spec.tp * spec.pp)
    before = {name: state[name] for name in places if name in state}
    state.update({name: _Group(*places[name]) for name in before})
    try:
        yield
    finally:
        state.update(before)


def build_shard(spec: ShardSpec, device: torch.device) -> torch.nn.Module:
    """The model's part on `device`, weights undefined. It has vLLM's own `load_weights`; it cannot run."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs(
        model=spec.model_path,
        dtype=spec.dtype,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=spec.tp,
        pipeline_parallel_size=spec.pp,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel=spec.expert_parallel,
    )
    loaded = importlib.import_module("vllm.model_executor.model_loader.utils").initialize_model
    use = importlib.import_module("vllm.config").set_current_vllm_config
    with _groups(spec):
        config = arguments.create_engine_config()
        default = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, spec.dtype))
        try:
            with use(config), device, torch.no_grad():
                model: torch.nn.Module = loaded(config)
        finally:
            torch.set_default_dtype(default)
    return model.requires_grad_(False)
