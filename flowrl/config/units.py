"""How prompts become rows, mini-batches and optimizer steps, and roles lie on pools: what runs and plan share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowrl.config.layout import Pool
from flowrl.config.schema import Config, TrainLayout

APART = {"split": "critic", "standalone_rollout": "rollout"}
"""By placement, the role that has a pool of its own, which is called as the role."""


LARGEST_SCORE = 3.4028234663852886e38
"""Scores are float32."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def error_score(on_error: str) -> float | None:
    """The score of a row on which the reward function fails, or None where that ends the run. Error: `ValueError` saying what is
    legal."""
    if on_error == "raise":
        return None
    kind, _, number = on_error.partition(":")
    if kind != "score" or not _NUMBER.fullmatch(number) or abs(float(number)) > LARGEST_SCORE:
        raise ValueError(f"legal: raise, or score:<number> as in score:0, from {-LARGEST_SCORE:g} to {LARGEST_SCORE:g}")
    return float(number)


@dataclass(frozen=True)
class OptimizerSteps:
    """Optimizer steps of each role. A step of the run makes `*_per_step`; in the critic's warm-up the actor makes none."""

    actor_per_step: int
    actor_total: int
    critic_per_step: int
    critic_total: int


def optimizer_steps(config: Config) -> OptimizerSteps:
    """What `policy/optimizer_steps` and `value/optimizer_steps` add up to, counting skipped ones; 0 without a critic."""
    prompts, steps = config.data.prompts_per_step, config.trainer.total_steps
    actor = prompts // config.actor.minibatch_prompts * config.actor.epochs
    critic = prompts // config.critic.minibatch_prompts * config.critic.epochs if config.algorithm.needs_critic else 0
    learning = max(0, steps - critic_warmup_steps(config))
    return OptimizerSteps(actor, actor * learning, critic, critic * steps)


def critic_warmup_steps(config: Config) -> int:
    """Steps in which only the critic learns."""
    return config.critic.warmup_steps if config.algorithm.needs_critic else 0


def microbatch_unit(layout: TrainLayout) -> int:
    """What the number of a replica's micro-batches is a multiple of: an interleaved schedule takes them in groups of as
    many as there are pipeline stages."""
    return layout.pp if layout.vpp > 1 else 1


def pools(config: Config) -> dict[str, Pool]:
    """Every pool of the run by name, `main` first."""
    found = {"main": Pool("cluster.devices", config.cluster.devices)}
    if config.placement == "split":
        found["critic"] = Pool("cluster.critic_devices", config.cluster.critic_devices)
    if config.placement == "standalone_rollout":
        found["rollout"] = Pool("cluster.rollout_devices", config.cluster.rollout_devices)
    return found


def pool_name(config: Config, role: str) -> str:
    """The pool that a role runs on."""
    return role if APART.get(config.placement) == role else "main"


def pool_of(config: Config, role: str) -> Pool:
    """Devices of the pool that a role runs on, and the key that sets their number."""
    return pools(config)[pool_name(config, role)]


def all_devices(config: Config) -> int:
    """Devices of all pools."""
    return sum(pool.devices for pool in pools(config).values())
