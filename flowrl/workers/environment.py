"""The environment variables that worker processes need before they import torch, Megatron-core or vLLM."""

from __future__ import annotations

import os

from flowrl.config.machine import find_machine

UNLESS_GIVEN = {"TORCH_NCCL_HIGH_PRIORITY": "1", "TRITON_F32_DEFAULT": "ieee"}
"""On a GPU, where the driver's environment does not say otherwise. Collectives get streams of high priority: copies that are
launched while an exchange waits for its turn would take the GPU first. And Triton's products of float32, which attention of engines
in float32 is made of, keep their mantissas whole."""
GPU_PROCESS_THREADS = 4
"""What a host computes beside a GPU is small: to wake 32 threads for it took 7 ms where one takes 0.1."""


def process_environment(device: str, devices: int, *, cpus: int | None = None) -> dict[str, str]:
    """Variables for each of `devices` processes that share this machine; pass them to the processes' start.

    `cpus` is the number of CPUs that the processes share; None: those of this machine, or of its control group. Threads are cpus / devices, at least 1, so that n processes on a small machine do not oversubscribe it; beside a GPU at
    most `GPU_PROCESS_THREADS`. Those of `UNLESS_GIVEN` are this process' own where it has them.

    Errors: `ValueError` for a device other than `cpu` or `cuda`.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"cluster.device={device!r} is not one of cpu, cuda")
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if cpus is None:
        cpus = find_machine().cpus
    threads = max(1, cpus // devices)
    if device == "cuda":
        # Every process sees all GPUs of its node: vLLM's peer-to-peer probe looks up the device with the index `rank`.
        # FlashInfer's sampler compiles at first use and draws from generators of its own.
        chosen = {name: os.environ.get(name, value) for name, value in UNLESS_GIVEN.items()}
        return {
            **variables,
            **chosen,
            "OMP_NUM_THREADS": str(min(GPU_PROCESS_THREADS, threads)),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
    return variables | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
