"""Which role runs where: pools of processes by `placement`, and one worker group per role."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from flowrl.config.model_shape import ModelShape, read_model_shape
from flowrl.config.schema import GAE, Config
from flowrl.data.tokenizer import Tokenizer
from flowrl.estimate import needs_reference
from flowrl.single_controller import Cluster, ResourcePool, WorkerGroup
from flowrl.workers.actor import ActorWorker
from flowrl.workers.critic import CriticWorker
from flowrl.workers.environment import process_environment
from flowrl.workers.reference import ReferenceWorker
from flowrl.workers.rollout import RolloutWorker


class Roles:
    """Makes the worker groups of a run on the pools that the configuration asks for.

    `colocate`: every role in the processes of one pool. `split`: the critic in a pool of its own.
    """

    def __init__(self, config: Config, cluster: Cluster, model: Path, shape: ModelShape, tokenizer: Tokenizer, stack: ExitStack) -> None:
        self._config = config
        self._cluster = cluster
        self._model = str(model)
        self._shape = shape
        self._tokenizer = tokenizer
        self._stack = stack
        self._main = self._pool("main", config.cluster.devices)

    def _pool(self, name: str, devices: int) -> ResourcePool:
        cluster = self._config.cluster
        pool = ResourcePool(
            self._cluster, name=name, devices=devices, device=cluster.device, env=process_environment(cluster.device, devices),
            placement_timeout_seconds=cluster.placement_timeout_seconds, collective_timeout_seconds=cluster.collective_timeout_seconds,
        )  # fmt: skip
        return self._stack.enter_context(pool)

    def actor(self) -> ActorWorker:
        config = self._config
        steps = config.trainer.total_steps - (config.critic.warmup_steps if has_critic(config) else 0)
        return WorkerGroup.spawn(
            self._main, ActorWorker, self._model, self._shape, config.actor, name="actor", kl=config.kl,
            temperature=config.rollout.temperature, num_tokenizer_ids=self._tokenizer.num_ids, seed=config.trainer.seed,
            total_optimizer_steps=max(steps, 0) * optimizer_steps_per_step(config.actor.minibatch_prompts, config.actor.epochs, config),
            max_response_tokens=config.rollout.max_response_tokens,
        )  # fmt: skip

    def critic(self) -> CriticWorker | None:
        """The critic, or None for an algorithm without one."""
        config = self._config
        if not has_critic(config):
            return None
        pool = self._pool("critic", config.cluster.critic_devices) if config.placement == "split" else self._main
        path, shape = self._model_of(config.critic.path)
        return WorkerGroup.spawn(
            pool, CriticWorker, path, shape, config.critic, name="critic", seed=config.trainer.seed,
            total_optimizer_steps=config.trainer.total_steps
            * optimizer_steps_per_step(config.critic.minibatch_prompts, config.critic.epochs, config),
            max_response_tokens=config.rollout.max_response_tokens,
        )  # fmt: skip

    def reference(self) -> ReferenceWorker | None:
        """The frozen policy, or None without a KL term."""
        config = self._config
        if not needs_reference(config.kl):
            return None
        path, shape = self._model_of(config.reference.path)
        return WorkerGroup.spawn(
            self._main, ReferenceWorker, path, shape, config.reference, name="reference",
            temperature=config.rollout.temperature, num_tokenizer_ids=self._tokenizer.num_ids, seed=config.trainer.seed,
        )  # fmt: skip

    def rollout(self) -> RolloutWorker:
        config = self._config
        return WorkerGroup.spawn(
            self._main, RolloutWorker, self._model, self._shape, config.rollout, name="rollout",
            num_tokenizer_ids=self._tokenizer.num_ids, stop_token_ids=self._tokenizer.stop_token_ids,
            max_prompt_tokens=config.data.max_prompt_tokens, seed=config.trainer.seed,
        )  # fmt: skip

    def _model_of(self, path: str) -> tuple[str, ModelShape]:
        if path == self._config.model.path:
            return self._model, self._shape
        return path, read_model_shape(path)


def has_critic(config: Config) -> bool:
    """Whether the algorithm learns values."""
    return isinstance(config.algorithm, GAE)


def optimizer_steps_per_step(minibatch_prompts: int, epochs: int, config: Config) -> int:
    """Optimizer steps of one training step: mini-batches times epochs."""
    return config.data.prompts_per_step // minibatch_prompts * epochs
