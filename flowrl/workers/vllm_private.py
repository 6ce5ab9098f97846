"""Everything of vLLM that is not its public interface, in one place.

Read in vLLM 0.26.0 (CUDA build) and 0.32.0 (CPU build). `missing_names` lists what a newer version took away; a test
and every engine start call it. The engine runs inside a process that belongs to us: our default process group, our
random state, our garbage collector, our thread count. What vLLM would do to these is undone or kept from happening.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
import torch.distributed as dist

from flowrl.config.memory import engine_batch_tokens
from flowrl.single_controller.device_memory import note_asleep
from flowrl.workers.vllm_private_tame import CPU_EXPERTS, tame

READ_IN = ("0.26.0", "0.32.0")

PRIVATE_NAMES = (
    "vllm.distributed.parallel_state:_WORLD",
    "vllm.distributed.parallel_state:_NODE_COUNT",
    "vllm.distributed.parallel_state:_node_count",
    "vllm.distributed.parallel_state:_TP",
    "vllm.distributed.parallel_state:_PP",
    "vllm.distributed.parallel_state:_DP",
    "vllm.distributed.parallel_state:_DCP",
    "vllm.distributed.parallel_state:_PCP",
    "vllm.distributed.parallel_state:_EP",
    "vllm.distributed.parallel_state:init_world_group",
    "vllm.distributed.parallel_state:init_model_parallel_group",
    "vllm.v1.engine.core:cleanup_dist_env_and_memory",
    "vllm.v1.engine.core:freeze_gc_heap",
    "vllm.v1.worker.gpu_worker:freeze_gc_heap",
    "vllm.v1.worker.gpu_worker:Worker.sleep",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "vllm.model_executor.layers.logits_processor:LogitsProcessor.forward",
    "vllm.v1.sample.ops.topk_topp_sampler:random_sample",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState.__post_init__",
    "vllm.entrypoints.llm:LLM.collective_rpc",
    "vllm.entrypoints.llm:LLM.reset_prefix_cache",
    "torch.distributed.distributed_c10d:_set_pg_timeout",
)

CPU_NAMES = (
    f"{CPU_EXPERTS}:CPUUnquantizedExperts.apply",
    f"{CPU_EXPERTS}:CPUUnquantizedExperts.process_weights_after_loading",
)


def _find(name: str) -> bool:
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True


def missing_names() -> list[str]:
    """Those of `PRIVATE_NAMES`, and of a CPU build's own, that the installed vLLM does not have."""
    names = PRIVATE_NAMES if torch.cuda.is_available() else (*PRIVATE_NAMES, *CPU_NAMES)
    return [name for name in names if not _find(name)]


@dataclass(frozen=True)
class EngineSpec:
    """What one engine is made of. `tp * pp` ranks share one engine; sizes are tokens unless they say bytes.

    `expert_parallel`: tensor-parallel ranks hold whole experts, each its share, instead of a slice of every expert.
    """

    model_path: str
    trust_remote_code: bool
    device: str
    dtype: str
    tp: int
    pp: int
    expert_parallel: bool
    max_model_tokens: int
    max_batch_requests: int
    block_tokens: int
    num_blocks: int
    kv_cache_bytes: int
    gpu_memory_fraction: float
    cuda_graphs: bool
    seed: int


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """vLLM seeds torch, numpy and random with its own seed; the trainer's streams must not notice."""
    states = (torch.get_rng_state(), numpy.random.get_state(), random.getstate())
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        numpy.random.set_state(states[1])
        random.setstate(states[2])
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


@cache
def prepare() -> None:
    """Import vLLM and replace what `tame` names, once in a process.

    Without the garbage collector, which costs a quarter of the time and finds nothing in half a million objects; they are
    frozen, so that later collections do not go through them either. Inside the `__init__` of a role `Process` notices it, and
    knows which roles are frozen with them.

    Error: `ValueError` that names what the installed vLLM lacks.
    """
    collects = gc.isenabled()
    gc.collect()  # What roles have left in circles is not to be frozen with them.
    gc.disable()
    try:
        vllm = importlib.import_module("vllm")
        assert vllm.LLM
        if missing := missing_names():
            raise ValueError(
                f"vLLM {vllm.__version__} lacks {', '.join(missing)}; flowrl was written for {' and '.join(READ_IN)}"
            )
        tame()
        gc.freeze()
    finally:
        if collects:
            gc.enable()


class _Groups:
    """vLLM's group coordinators of this process by layout: groups cannot be freed, so a layout is made once."""

    def __init__(self) -> None:
        self.default_group: Any = None
        self.by_layout: dict[str, dict[str, Any]] = {}


_groups = _Groups()


def _make_groups(tp_groups: list[list[int]], pp_groups: list[list[int]], local_rank: int) -> dict[str, Any]:
    state = importlib.import_module("vllm.distributed.parallel_state")
    backend = dist.get_backend()
    for group in (*tp_groups, *pp_groups):
        # torch sorts the ranks of a new group and vLLM indexes the list: another order gives wrong tokens silently.
        assert group == sorted(group), f"ranks of a group must ascend: {group}"

    def make(ranks: list[list[int]], name: str) -> Any:
        return state.init_model_parallel_group(ranks, local_rank, backend, group_name=name)

    alone = [[rank] for rank in range(dist.get_world_size())]
    world = state.init_world_group(list(range(dist.get_world_size())), local_rank, backend)
    groups = {"_WORLD": world, "_NODE_COUNT": state._node_count(world.cpu_group), "_TP": make(tp_groups, "tp")}
    groups |= {"_PP": make(pp_groups, "pp"), "_DP": make(alone, "dp")}
    groups |= {"_DCP": make(alone, "dcp"), "_PCP": make(alone, "pcp")}
    # Experts are spread over tensor-parallel ranks; layers with experts ask for the group in any case.
    groups["_EP"] = make(tp_groups, "ep")
    if "_ETP" in vars(state):  # from 0.32 on
        groups["_ETP"] = groups["_TP"]
    return groups


def install_groups(
    tp_groups: list[list[int]], pp_groups: list[list[int]], *, run_name: str, device: torch.device
) -> None:
    """Give vLLM its process groups, over the default group that exists. Collective over all ranks.

    They wait no longer than the default group does; vLLM's own would wait half an hour.
    """
    prepare()
    state = vars(importlib.import_module("vllm.distributed.parallel_state"))
    rank, local_rank = dist.get_rank(), device.index or 0
    # One engine process per rank: without this vLLM would start its own and refuses the external launcher.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(dist.get_world_size()))
    # Different on every rank: vLLM then refuses its shared-memory transport, which spins for ever when a peer dies.
    os.environ["VLLM_DIST_IDENT"] = f"{run_name}-r{rank}"
    if _groups.default_group is not dist.group.WORLD:
        _groups.default_group, _groups.by_layout = dist.group.WORLD, {}
    layout = f"{tp_groups} {pp_groups}"
    if layout not in _groups.by_layout:
        _groups.by_layout[layout] = _make_groups(tp_groups, pp_groups, local_rank)
    groups = _groups.by_layout[layout]
    state.update(groups)
    default = dist.group.WORLD
    assert default is not None
    timeout = default._get_backend(device).options._timeout
    for coordinator in (groups[name] for name in ("_WORLD", "_TP", "_PP", "_DP", "_DCP", "_PCP", "_EP")):
        for group in {coordinator.cpu_group, coordinator.device_group}:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


class Engine:
    """One rank of a vLLM engine in SPMD form. Make it on all ranks at once, after `install_groups`."""

    def __init__(self, spec: EngineSpec) -> None:
        prepare()
        set_num_threads = torch.set_num_threads
        with _random_state_kept():
            self.llm: Any = importlib.import_module("vllm").LLM(**_arguments(spec))
        torch.set_num_threads = set_num_threads
        self.spec = spec
        self._asleep: dict[str, int] = {}
        runner = self.llm.collective_rpc(lambda worker: worker.model_runner)[0]
        self.model: torch.nn.Module = runner.model
        if spec.device == "cpu" and spec.pp > 1:
            _give_intermediate_tensors(runner, getattr(torch, spec.dtype))

    def limit_vocabulary(self, num_ids: int) -> None:
        """Never sample an id >= `num_ids`: their logits become -inf, so they leave the log-softmax too.

        The logits are whole on every tensor-parallel rank where this acts; only the last pipeline stage has them.
        """

        def mask(module: torch.nn.Module, arguments: Any, logits: torch.Tensor | None) -> None:
            if logits is not None:
                logits[..., num_ids:] = float("-inf")

        for name, module in self.model.named_modules():
            if name.rpartition(".")[2] == "logits_processor":
                module.register_forward_hook(mask)

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
        """One `CompletionOutput` per prompt, in order. Same arguments on all ranks of the engine."""
        if not prompts:
            return []
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, list(params), use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """vLLM's own loader of this model, for tensors of the Hugging Face folder."""
        return self.model.load_weights(weights)  # type: ignore[operator]

    def sleep(self) -> None:
        """Drop weights and cache (level 2) on a GPU; vLLM's CPU build has no sleep."""
        if self.spec.device == "cuda":
            self.llm.sleep(level=2)
            self._asleep = _pool_bytes()
            note_asleep(sum(self._asleep.values()))

    def wake(self, tags: list[str]) -> None:
        """Take the memory of `tags` (`weights`, `kv_cache`), which is asleep, again."""
        if self.spec.device == "cuda":
            self.llm.wake_up(tags=tags)
            self._asleep = {tag: size for tag, size in self._asleep.items() if tag not in tags}
            note_asleep(sum(self._asleep.values()))

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier prompts: they belong to older weights."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM's prefix cache could not be reset: requests are still running")

    def close(self) -> None:
        """Free the engine; its groups stay for the next one."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.model
        note_asleep(0)
        if self.spec.device == "cuda":
            # What vLLM froze, see `tame`. Also before communicators are destroyed: captured graphs hold them.
            gc.unfreeze()
        gc.collect()


def _pool_bytes() -> dict[str, int]:
    """Bytes in the allocator whose memory can sleep, by tag. There is one in a process."""
    allocator = importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()
    found: dict[str, int] = {}
    for data in allocator.pointer_to_data.values():
        found[data.tag] = found.get(data.tag, 0) + data.handle[1]
    return found


def _arguments(spec: EngineSpec) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "trust_remote_code": spec.trust_remote_code,
        # Other weight formats are pickles, which run code when they are read.
        "load_format": "safetensors",
        "dtype": spec.dtype,
        "tensor_parallel_size": spec.tp,
        "pipeline_parallel_size": spec.pp,
        "enable_expert_parallel": spec.expert_parallel,
        "distributed_executor_backend": "external_launcher",
        "max_model_len": spec.max_model_tokens,
        "max_num_seqs": spec.max_batch_requests,
        "max_num_batched_tokens": engine_batch_tokens(spec.max_model_tokens, spec.max_batch_requests),
        "block_size": spec.block_tokens,
        "num_gpu_blocks_override": spec.num_blocks,
        "kv_cache_memory_bytes": spec.kv_cache_bytes,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": spec.seed,
    }
    if spec.device == "cuda":
        # Other kernels for experts would repack their weights, and what a move writes later would be read in the wrong layout.
        arguments |= {
            "enable_sleep_mode": True,
            "gpu_memory_utilization": spec.gpu_memory_fraction,
            "moe_backend": "triton",
        }
    return arguments | {"enforce_eager": spec.device == "cpu" or not spec.cuda_graphs}


def plain_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Those of vLLM alone with the settings of an engine of one rank: vLLM starts its processes, and does not sleep."""
    assert spec.tp == spec.pp == 1
    ours = ("distributed_executor_backend", "enable_sleep_mode")
    return {name: value for name, value in _arguments(spec).items() if name not in ours}


def _give_intermediate_tensors(runner: Any, dtype: torch.dtype) -> None:
    """The CPU runner skips the warm-up in which later pipeline stages make the buffers they receive into."""
    group = importlib.import_module("vllm.distributed.parallel_state").get_pp_group()
    if not group.is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=dtype, device=torch.device("cpu")
        )
