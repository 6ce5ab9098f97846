"""Knobs that the user set although the rest of the configuration leaves them without effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from flowrl.config.schema import Config


def without_effect(config: Config, given: Set[str]) -> Iterator[str]:
    """One problem for every key of `given` that nothing would read."""
    for prefix, reason in _idle(config):
        for key in sorted(given):
            if key == prefix or key.startswith(prefix + "."):
                yield f"{key} has no effect: {reason}"


def effective(config: Config, keys: Iterable[str]) -> set[str]:
    """Those of the keys that something reads."""
    idle = [prefix for prefix, _ in _idle(config)]
    return {key for key in keys if not any(key == prefix or key.startswith(prefix + ".") for prefix in idle)}


def _idle(config: Config) -> Iterator[tuple[str, str]]:
    """(key or section, why nothing reads it, and what to change)."""
    if not config.algorithm.needs_critic:
        yield "critic", f"{type(config.algorithm).__name__} has no critic; remove it or choose algorithm=gae"
    if not config.kl.needs_reference:
        yield "reference", "kl=none has no reference model; remove it or choose kl=reward, adaptive or loss"
    else:
        for name in ("distributed_optimizer", "recompute"):
            yield f"reference.{name}", "the reference is frozen, it has no optimizer and no backward pass; remove it"
    if config.placement != "split":
        yield (
            "cluster.critic_devices",
            f"placement={config.placement} puts the critic on the main pool; remove it or choose placement=split",
        )
    elif not config.algorithm.needs_critic:
        yield (
            "placement",
            f"split places a critic apart and {type(config.algorithm).__name__} has none; choose colocate",
        )
        yield "cluster.critic_devices", f"{type(config.algorithm).__name__} has no critic; remove it"
    if config.placement != "standalone_rollout":
        yield (
            "cluster.rollout_devices",
            f"placement={config.placement} generates on the main pool; remove it or choose placement=standalone_rollout",
        )
    for role, section in (("actor", config.actor), ("critic", config.critic)):
        if section.optim.schedule == "constant":
            yield (
                f"{role}.optim.min_lr",
                f"{role}.optim.schedule=constant keeps the learning rate; choose linear or cosine",
            )
    if config.cluster.device == "cpu":
        yield "rollout.gpu_memory_fraction", "cluster.device=cpu; remove it (rollout.kv_cache_bytes sizes the cache)"
        for key in ("rollout.cuda_graphs", "actor.offload", "critic.offload", "reference.offload"):
            yield key, "it is about GPUs, and cluster.device=cpu; remove it"
    if not config.trainer.save_every:
        yield "trainer.keep_checkpoints", "trainer.save_every=0 writes no checkpoints; remove it or choose a number"
    if config.trainer.resume == "never":
        yield "trainer.resume_allow", "trainer.resume=never compares with no checkpoint; remove it"
    if not config.data.eval_files:
        yield "data.eval_prompts", "data.eval_files is empty; remove it or give files"
