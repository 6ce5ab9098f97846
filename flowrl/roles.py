"""Which role runs where: pools of processes by `placement`, and one worker group per role."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

from flowrl.config.model_shape import ModelShape, read_model_shape
from flowrl.config.paths import user_path
from flowrl.config.schema import Config, EngineConfig
from flowrl.config.units import all_devices, optimizer_steps, pool_name, pools
from flowrl.data.tokenizer import Tokenizer
from flowrl.resharding.layouts import rollout_sizes, train_sizes
from flowrl.session import Session
from flowrl.single_controller import Cluster, ResourcePool, WorkerGroup
from flowrl.workers.actor import ActorWorker
from flowrl.workers.critic import CriticWorker
from flowrl.workers.environment import process_environment
from flowrl.workers.reference import ReferenceWorker
from flowrl.workers.rollout import RolloutWorker

Section = TypeVar("Section", bound=EngineConfig)


class Roles:
    """Makes the worker groups of a run on the pools that the configuration asks for.

    `colocate`: every role in the processes of one pool. `split`: the critic in a pool of its own, of
    `cluster.critic_devices`. `standalone_rollout`: generation in one of its own, of `cluster.rollout_devices`.
    """

    def __init__(
        self, config: Config, cluster: Cluster, model: Path, shape: ModelShape, tokenizer: Tokenizer, session: Session
    ) -> None:
        self._config = config
        self._cluster = cluster
        self._model = str(model)
        self._shape = shape
        self._tokenizer = tokenizer
        self._session = session
        self._steps = optimizer_steps(config)
        self._pool("actor")

    def _pool(self, role: str) -> ResourcePool:
        """The pool of a role, started for the first of its roles."""
        name = pool_name(self._config, role)
        return self._session.pool(name, partial(self._start, name, pools(self._config)[name].devices))

    def _start(self, name: str, devices: int) -> ResourcePool:
        cluster = self._config.cluster
        # A new name, which nobody sees who does not see this very folder.
        with NamedTemporaryFile(dir=user_path(self._config.run.dir), prefix=".seen-by-all-") as made:
            return ResourcePool(
                self._cluster, name=name, devices=devices, device=cluster.device, shared=self._shared(made.name),
                env=process_environment(cluster.device, all_devices(self._config)), cpus_per_device=self._cpus_per_device(),
                placement_timeout_seconds=cluster.placement_timeout_seconds,
                collective_timeout_seconds=cluster.collective_timeout_seconds,
            )  # fmt: skip

    def _shared(self, file_of_run: str) -> dict[str, str]:
        """What all nodes must see: the run's folder, and the models in the place where the driver has them."""
        config = self._config
        shared = {"run.dir": file_of_run, "model.path": self._model}
        if config.algorithm.needs_critic:
            shared["critic.path"] = self._model_of(config.critic.path)[0]
        if config.kl.needs_reference:
            shared["reference.path"] = self._model_of(config.reference.path)[0]
        return shared

    def _cpus_per_device(self) -> float | None:
        """At most one CPU for a device, so that other runs fit beside this one on a larger cluster; less where there
        are fewer CPUs than devices: pools that live side by side share them evenly, a pool alone takes them all."""
        if self._config.cluster.device == "cuda":
            return None
        share = int(self._cluster.num_cpus * 100 / all_devices(self._config)) / 100
        if share >= 1:
            return 1.0
        return share if len(pools(self._config)) > 1 else None

    @property
    def _together(self) -> bool:
        """Whether trainer and engine share processes, and so an order of ranks and the memory of their devices."""
        return pool_name(self._config, "actor") == pool_name(self._config, "rollout")

    def actor(self) -> ActorWorker:
        config = self._config
        return WorkerGroup.spawn(
            self._pool("actor"), ActorWorker, self._model, self._shape, self._section(config.actor, "actor"),
            name="actor", kl=config.kl, temperature=config.rollout.temperature, num_tokenizer_ids=self._tokenizer.num_ids,
            total_optimizer_steps=self._steps.actor_total, seed=config.trainer.seed,
            beside=rollout_sizes(config.rollout) if self._together else None,
        )  # fmt: skip

    def critic(self) -> CriticWorker | None:
        """The critic, or None for an algorithm without one."""
        config = self._config
        if not config.algorithm.needs_critic:
            return None
        path, shape = self._model_of(config.critic.path)
        return WorkerGroup.spawn(
            self._pool("critic"), CriticWorker, path, shape, self._section(config.critic, "critic"),
            name="critic", total_optimizer_steps=self._steps.critic_total, seed=config.trainer.seed,
        )  # fmt: skip

    def reference(self) -> ReferenceWorker | None:
        """The frozen policy, or None without a KL term."""
        config = self._config
        if not config.kl.needs_reference:
            return None
        path, shape = self._model_of(config.reference.path)
        return WorkerGroup.spawn(
            self._pool("reference"), ReferenceWorker, path, shape, self._section(config.reference, "reference"),
            name="reference", temperature=config.rollout.temperature, num_tokenizer_ids=self._tokenizer.num_ids,
            seed=config.trainer.seed,
        )  # fmt: skip

    def rollout(self, weights_version: int) -> RolloutWorker:
        """`weights_version`: steps that the weights have been trained for, so that the version after a step is the same
        in a run that was resumed."""
        config = self._config
        return WorkerGroup.spawn(
            self._pool("rollout"), RolloutWorker, self._model, self._shape, config.rollout, name="rollout",
            num_tokenizer_ids=self._tokenizer.num_ids, stop_token_ids=self._tokenizer.stop_token_ids,
            max_prompt_tokens=config.data.max_prompt_tokens, seed=config.trainer.seed, weights_version=weights_version,
            trust_remote_code=config.model.trust_remote_code,
            beside=train_sizes(config.actor.layout) if self._together else None,
        )  # fmt: skip

    def _section(self, section: Section, role: str) -> Section:
        """A role's configuration; one that shares no device with the engine has nobody to make room for."""
        shares = pool_name(self._config, role) == pool_name(self._config, "rollout")
        return replace(section, offload=section.offload and shares)

    def _model_of(self, path: str) -> tuple[str, ModelShape]:
        if path == self._config.model.path:
            return self._model, self._shape
        return str(user_path(path)), read_model_shape(path)
