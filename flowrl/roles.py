"""Which role runs where: pools of processes by `placement`, and one worker group per role."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from flowrl.config.model_shape import ModelShape, read_model_shape
from flowrl.config.schema import Config
from flowrl.config.units import optimizer_steps, pool_devices
from flowrl.data.tokenizer import Tokenizer
from flowrl.resharding.layouts import rollout_sizes, train_sizes
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

    def __init__(
        self, config: Config, cluster: Cluster, model: Path, shape: ModelShape, tokenizer: Tokenizer, stack: ExitStack
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._model = str(model)
        self._shape = shape
        self._tokenizer = tokenizer
        self._stack = stack
        self._steps = optimizer_steps(config)
        self._main = self._pool("main", config.cluster.devices)

    def _pool(self, name: str, devices: int) -> ResourcePool:
        cluster = self._config.cluster
        pool = ResourcePool(
            self._cluster, name=name, devices=devices, device=cluster.device,
            env=process_environment(cluster.device, self._all_devices), cpus_per_device=self._cpus_per_device(),
            placement_timeout_seconds=cluster.placement_timeout_seconds,
            collective_timeout_seconds=cluster.collective_timeout_seconds,
        )  # fmt: skip
        return self._stack.enter_context(pool)

    @property
    def _all_devices(self) -> int:
        config = self._config
        return config.cluster.devices + (config.cluster.critic_devices if config.placement == "split" else 0)

    def _cpus_per_device(self) -> float | None:
        """At most one CPU for a device, so that other runs fit beside this one on a larger cluster; less where there
        are fewer CPUs than devices: pools that live side by side share them evenly, a pool alone takes them all."""
        if self._config.cluster.device == "cuda":
            return None
        share = int(self._cluster.num_cpus * 100 / self._all_devices) / 100
        if share >= 1:
            return 1.0
        return share if self._config.placement == "split" else None

    def actor(self) -> ActorWorker:
        config = self._config
        return WorkerGroup.spawn(
            self._main, ActorWorker, self._model, self._shape, config.actor, name="actor", kl=config.kl,
            temperature=config.rollout.temperature, num_tokenizer_ids=self._tokenizer.num_ids,
            total_optimizer_steps=self._steps.actor_total, seed=config.trainer.seed,
            beside=rollout_sizes(config.rollout),
        )  # fmt: skip

    def critic(self) -> CriticWorker | None:
        """The critic, or None for an algorithm without one."""
        config = self._config
        if not config.algorithm.needs_critic:
            return None
        split = config.placement == "split"
        pool = self._pool("critic", pool_devices(config, "critic")) if split else self._main
        path, shape = self._model_of(config.critic.path)
        return WorkerGroup.spawn(
            pool, CriticWorker, path, shape, config.critic, name="critic",
            total_optimizer_steps=self._steps.critic_total, seed=config.trainer.seed,
        )  # fmt: skip

    def reference(self) -> ReferenceWorker | None:
        """The frozen policy, or None without a KL term."""
        config = self._config
        if not config.kl.needs_reference:
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
            beside=train_sizes(config.actor.layout),
        )  # fmt: skip

    def _model_of(self, path: str) -> tuple[str, ModelShape]:
        if path == self._config.model.path:
            return self._model, self._shape
        return path, read_model_shape(path)
