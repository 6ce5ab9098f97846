"""Prints what vLLM's own loaders keep on one rank of an engine, for each line of a request; run as a program.

The model is built without an engine: group coordinators that only know their sizes stand in for vLLM's, so one process
can be any rank of any layout.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


class Group:
    """What a model asks of a group while it is built."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank_in_group, self.world_size = rank, size
        self.rank = self.local_rank = rank
        self.ranks = list(range(size))
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = self

    def size(self) -> int:
        return self.world_size


def keeps(folder: str, tp: int, pp: int, tp_rank: int, stage: int, expert_parallel: bool) -> dict[str, Any]:
    """Tensor -> boxes of a rank."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from flowrl.config.model_shape import read_model_shape
    from flowrl.resharding import families
    from flowrl.resharding.recorder import record

    state = vars(importlib.import_module("vllm.distributed.parallel_state"))
    groups = {"_TP": (tp_rank, tp), "_PP": (stage, pp), "_EP": (tp_rank, tp), "_ETP": (tp_rank, tp)}
    groups |= dict.fromkeys(("_DP", "_DCP", "_PCP"), (0, 1)) | {"_WORLD": (stage * tp + tp_rank, tp * pp)}
    state.update({name: Group(*place) for name, place in groups.items() if name in state})
    arguments = EngineArgs(
        model=folder,
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        distributed_executor_backend="external_launcher",
        enable_expert_parallel=expert_parallel,
    )
    config = arguments.create_engine_config()
    shape = read_model_shape(folder)
    tensors = families.hf_tensors(shape)
    with set_current_vllm_config(config):
        model = initialize_model(config)
        recording = record(model.load_weights, dict(model.named_parameters()), tensors)
    return recording.needed


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write("RESULT " + json.dumps(keeps(**json.loads(line))) + "\n")
        sys.stdout.flush()
