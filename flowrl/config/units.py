"""How prompts become rows, mini-batches and optimizer steps: the arithmetic that runs and plan share."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.config.schema import Config, TrainLayout


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


def pool_devices(config: Config, role: str) -> int:
    """Devices of the pool that a role runs on."""
    return config.cluster.critic_devices if role == "critic" and config.placement == "split" else config.cluster.devices


def microbatch_unit(layout: TrainLayout) -> int:
    """What the number of a replica's micro-batches is a multiple of: an interleaved schedule takes them in groups of as
    many as there are pipeline stages."""
    return layout.pp if layout.vpp > 1 else 1
