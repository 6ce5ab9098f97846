"""The roles: actor, critic and reference (Megatron-core) and rollout (vLLM)."""

from flowrl.workers import cuda_on_cpu

# Before any module of this package imports Megatron-core.
cuda_on_cpu.install()
