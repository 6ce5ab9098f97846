"""What every driver shares: set-up, steps, rewards, updates, evaluation, reports, shutdown.

A driver gets a `Run` and says only what its algorithm does with it; `main_ppo.py` is the example.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from flowrl.algorithms.kl import adaptive_coefficient
from flowrl.builtin.model import resolve_model
from flowrl.checkpointing import Checkpointing
from flowrl.checkpoints.start import StartPoint, check_data, trained_roles, versions
from flowrl.checkpoints.state import RunState
from flowrl.config.compose import to_tree, to_yaml
from flowrl.config.model_shape import ModelShape, read_model_shape
from flowrl.config.paths import run_lock, user_path
from flowrl.config.schema import ActorConfig, AdaptiveKL, Config, CriticConfig
from flowrl.config.units import all_devices, critic_warmup_steps
from flowrl.console import StepConsole
from flowrl.data.prompts import load_prompts
from flowrl.data.seeds import expand
from flowrl.data.tokenizer import load_tokenizer
from flowrl.estimate import batch_metrics, estimate, ragged, reward_kl_coefficient, scores
from flowrl.protocol import DataProto
from flowrl.report import SKIPPED, StepReport
from flowrl.rewards.runner import RewardResult, RewardRunner
from flowrl.roles import Roles
from flowrl.session import Session
from flowrl.single_controller import Cluster
from flowrl.timing import PhaseClock
from flowrl.tracking import Tracker
from flowrl.workers.actor import ActorWorker
from flowrl.workers.critic import CriticWorker
from flowrl.workers.hf_weights import HFFolder
from flowrl.workers.reference import ReferenceWorker
from flowrl.workers.rollout import RolloutWorker


class Run:
    """One attempt at a training run; a context manager that leaves nothing behind but what belongs to its `session`.

    `start` says what the run goes on from. `step` is 1-based while training; before, it is the last step that the
    checkpoint has, or 0. `opened` says that set-up is over, `stop` what signals ask for.
    """

    def __init__(self, config: Config, start: StartPoint, session: Session) -> None:
        self.config = config
        self.step = start.step
        self.opened = False
        self.stop = session.stop
        self._session = session
        self.folder = user_path(config.run.dir)
        self.console = StepConsole(config.trainer.total_steps)
        self._start = start
        before = start.checkpoint.state if start.checkpoint else None
        self.report = StepReport(config.trainer.max_skipped_steps, before.skipped_in_a_row if before else None)
        self._kl_coefficient = before.kl_coefficient if before else reward_kl_coefficient(config.kl)
        self._run_id = before.run_id if before and start.in_place else uuid.uuid4().hex
        self._checkpoints = Checkpointing(config, self.folder, start, self.console)
        self._batch = DataProto()
        self._rollout: RolloutWorker | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Run:
        with ExitStack() as stack:  # if anything below fails, what was opened is closed again
            self._open(stack)
            self._stack = stack.pop_all()
        self.opened = True
        return self

    def _open(self, stack: ExitStack) -> None:
        config = self.config
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        stack.callback(self.console.close)
        for warning in self._start.warnings:
            self.console.warn(warning)
        with self.console.progress("making the built-in model") as progress:
            model = resolve_model(config.model.path, config.model.cache_dir, progress)
        shape = read_model_shape(model)
        self._check_weights(model, shape)
        self.tokenizer = load_tokenizer(model, config.data.chat_template, config.model.trust_remote_code)
        self._open_data(stack, shape.vocab_size)
        self._checkpoints.prepare(model)
        (self.folder / "config.yaml").write_text(to_yaml(config))
        done = self._start.step if self._start.in_place else 0
        self.tracker = Tracker(self.folder, config, to_tree(config), run_id=self._run_id, done=done)
        stack.callback(self.tracker.close)
        self.cluster = self._session.cluster(
            lambda: Cluster(
                address=config.cluster.address, object_store_bytes=config.cluster.object_store_bytes,
                log_dir=logs, run_name=config.run.name, call_timeout_seconds=config.cluster.call_timeout_seconds,
                lock=run_lock(self.folder),
            )
        )  # fmt: skip
        self.console.message(self.cluster.banner)
        self.console.message(
            f"starting {all_devices(config)} processes on {config.cluster.device}: imports take most of the time"
        )
        self.clock = PhaseClock(self.cluster)
        self._roles = Roles(config, self.cluster, model, shape, self.tokenizer, self._session)

    def _check_weights(self, model: Path, shape: ModelShape) -> None:
        """Headers of the weights of every role: what does not fit is told before anything is started."""
        config = self.config
        HFFolder(model).check(shape)
        for path, used, head in (
            (config.reference.path, config.kl.needs_reference, True),
            (config.critic.path, config.algorithm.needs_critic, False),
        ):
            if used and path != config.model.path:
                HFFolder(path).check(read_model_shape(path), head=head)

    def _open_data(self, stack: ExitStack, vocab_size: int) -> None:
        config = self.config
        self.tokenizer.check_vocabulary(vocab_size)
        self._train = load_prompts(config.data.train_files, config.data, self.tokenizer, seed=config.trainer.seed)
        self._data_digests = self._train.digests()
        if self._start.checkpoint is not None:
            check_data(config, self._start.checkpoint, self._data_digests)
        self._held_out: DataProto | None = None
        if config.data.eval_files and config.trainer.eval_every:
            table = load_prompts(
                config.data.eval_files, config.data, self.tokenizer, seed=config.trainer.seed, held_out=True
            )
            self._held_out = expand(table.eval_batch(config.data.eval_prompts), 1, config.trainer.seed, step=0)
        self._rewards = stack.enter_context(RewardRunner(config.reward, self.folder / "logs" / "rewards.log"))
        first = self._train.step(1).values
        self._rewards.check(first["row"][0], first["prompt"][0])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    # The roles

    def actor(self) -> ActorWorker:
        return self._checkpoints.restored("actor", self._roles.actor())

    def critic(self) -> CriticWorker | None:
        critic = self._roles.critic()
        return None if critic is None else self._checkpoints.restored("critic", critic)

    def reference(self) -> ReferenceWorker | None:
        return self._roles.reference()

    def rollout(self) -> RolloutWorker:
        """The rollout role; says what responses are sampled with, and warns where that cuts the distribution."""
        rollout = self._rollout = self._roles.rollout(weights_version=self.step)
        sampling = rollout.sampling()
        self.console.message(f"sampling: {sampling}")
        if sampling.truncates:
            self.console.warn(
                f"rollout.top_p={sampling.top_p:g}, rollout.top_k={sampling.top_k} cut tokens off: the engine's log-probs are of the "
                "truncated distribution, the trainer's of the whole, so ratios are off by the mass that was kept"
            )
        return rollout

    def offload(self, *roles: ActorWorker | CriticWorker | ReferenceWorker | None) -> None:
        """The memory of these roles goes to the host where that is another one, so that the engine can have it."""
        for role in roles:
            if role is not None:
                role.offload()

    def reload(self, *roles: ActorWorker | CriticWorker | ReferenceWorker | None) -> None:
        """And comes back, before they are used again. A checkpoint that was written meanwhile becomes complete."""
        for role in roles:
            if role is not None:
                role.reload()
        self._checkpoints.complete()

    # The loop

    def steps(self) -> Iterator[DataProto]:
        """The prompts of each step, each repeated `rollout.samples_per_prompt` times with a seed per sample.

        When the body of the driver's loop is done with a step, the step is reported. After a signal that asks the run to
        stop, the step under way is the last one, and is saved.
        """
        config, trainer = self.config, self.config.trainer
        self.console.started(self.step)
        with self.stop.grace(trainer.grace_seconds if trainer.save_every else 0.0):
            for step in range(self.step + 1, trainer.total_steps + 1):
                self.step = step
                self.clock.start()
                with self.cluster.phase("", self.step):
                    prompts = self._train.step(self.step)
                    yield expand(prompts, config.rollout.samples_per_prompt, trainer.seed, self.step)
                    self._finish_step()
                if self.stop.requested and step < trainer.total_steps:
                    self.save_now()
                    self.stop.stop()
        with self.cluster.phase("save", self.step):
            self._checkpoints.complete()

    def rewards(self, batch: DataProto) -> DataProto:
        """Grades the responses: column `score` [N] float32, value `response` (the text that was graded)."""
        with self.clock.phase("reward", self.step):
            texts, result = self._grade(batch)
            return DataProto(
                {"score": torch.from_numpy(result.scores)},
                values={"response": texts},
                metrics=result.metrics,
                row_ids=batch.row_ids,
            )

    def advantages(self, batch: DataProto) -> DataProto:
        """`batch` with `advantages` (and `returns`), by the configured algorithm."""
        with self.clock.phase("advantage", self.step):
            estimated = estimate(self.config.algorithm, batch, self._kl_coefficient, self.config.kl)
            metrics = batch_metrics(estimated)
            self.report.add(metrics)
            self.report.note(estimated)
            self._batch = estimated
            if isinstance(self.config.kl, AdaptiveKL):
                self.report.add({"kl/coefficient": self._kl_coefficient})
                self._kl_coefficient = adaptive_coefficient(
                    self._kl_coefficient,
                    metrics["kl/reference"],
                    self.config.kl.target,
                    self.config.kl.horizon,
                    len(batch),
                )
            return estimated

    def minibatches(self, batch: DataProto, config: ActorConfig | CriticConfig) -> Iterator[DataProto]:
        """The batch cut into mini-batches of `config.minibatch_prompts` prompts, anew for each of `config.epochs`."""
        for epoch in range(config.epochs):
            for part in batch.minibatches(config.minibatch_prompts, seed=(self.config.trainer.seed, self.step, epoch)):
                yield part.with_meta(max_response_tokens=self.config.rollout.max_response_tokens)

    @property
    def policy_learns(self) -> bool:
        """False while only the critic learns (`critic.warmup_steps`)."""
        return self.step > critic_warmup_steps(self.config)

    def log(self, *tables: DataProto) -> None:
        """Adds the metrics of these answers, which may still be pending, to the step's report."""
        for table in tables:
            self.report.note(table)

    def due(self, every: int) -> bool:
        """Whether something done every `every` steps, and after the last step, is done in this step."""
        return every > 0 and (self.step % every == 0 or self.step == self.config.trainer.total_steps)

    def evaluate(self, rollout: RolloutWorker) -> None:
        """Mean reward of one sample per held-out prompt at the training temperature, when due and before step 1."""
        if self._held_out is None or (self.step and not self._evaluation_is_due()):
            return
        with self.clock.phase("eval", self.step):
            batch = self._held_out.union(rollout.generate(self._held_out))
            # A run that is resumed here has not seen these prompts: its next step must not find them either.
            rollout.reset_prefix_cache()
            score = float(np.mean(self._grade(batch)[1].scores))
        self.report.add({"eval/reward/mean": score})
        if self.step == 0:
            self.tracker.log(0, self.report.take(0))
            self.console.message(f"before training: held-out reward {score:.3f} over {len(batch)} prompts")

    def _evaluation_is_due(self) -> bool:
        """Not before the first step of a resumed run: the one before has been evaluated."""
        return self.step > self._start.step and self.due(self.config.trainer.eval_every)

    def save(self, actor: ActorWorker, critic: CriticWorker | None = None) -> None:
        """When due, begins a checkpoint of the roles that are trained, after their updates and while they are reloaded
        (`trainer.save_every`), and writes the policy as a Hugging Face folder `run.dir/export/step_N`
        (`trainer.export_every`)."""
        if self.due(self.config.trainer.save_every):
            self._checkpoints.begin(self.step, {"actor": actor, "critic": critic})
        if self.due(self.config.trainer.export_every):
            actor.export(str(self.folder / "export" / f"step_{self.step}"))

    def save_now(self) -> None:
        """Writes a checkpoint of the step that has just ended, if it has none. For a run that is about to stop: the engine
        loses its weights, so that the trained roles find their memory."""
        with self.cluster.phase("save", self.step):
            if self._rollout is not None:
                self._rollout.sleep()
            self._checkpoints.save_now(self._state())

    def _grade(self, batch: DataProto) -> tuple[list[str], RewardResult]:
        texts = [self.tokenizer.decode(ids.tolist()) for ids in ragged(batch, "response_ids", "grading").rows()]
        result = self._rewards.score(batch.values["prompt"], texts, batch.values["row"], batch.row_ids)
        if result.num_errors:
            self.console.warn(
                f"{result.num_errors} of {len(batch)} rows could not be graded; the first: {result.first_error}"
            )
        return texts, result

    # The end of a step and of the run

    def _finish_step(self) -> None:
        trainer = self.config.trainer
        metrics = self.report.take(self.step)
        self.cluster.wait()
        seconds, spans = self.clock.finish()
        tokens = sum(int(self._batch.lengths(name).sum()) for name in ("prompt_ids", "response_ids"))
        metrics |= seconds | {"tokens_per_second": tokens / seconds["seconds/total"]}
        if self.step in trainer.profile_steps:
            self.tracker.timeline(self.step, spans)
        self.tracker.samples(self.step, self._samples(trainer.samples_per_step))
        self.tracker.log(self.step, metrics)
        self.console.step(self.step, metrics)
        self._checkpoints.settle(self._state())
        self._warn(metrics)

    def _state(self) -> RunState:
        """Of the run at the end of a step."""
        return RunState(
            step=self.step, run_id=self._run_id, total_steps=self.config.trainer.total_steps,
            kl_coefficient=self._kl_coefficient, data=self._data_digests, skipped_in_a_row=dict(self.report.skipped_in_a_row),
            roles=trained_roles(self.config), versions=versions(),
        )  # fmt: skip

    def _warn(self, metrics: Mapping[str, float]) -> None:
        """What a user should not have to find in a file."""
        for name, value in metrics.items():
            if name.endswith(SKIPPED) and value:
                self.console.warn(
                    f"{value:g} optimizer steps were skipped, their gradients were not finite ({name}); the logs name the tensor"
                )
        limit = self.config.rollout.logprob_diff_warn
        if metrics.get("rollout/logprob_diff_mean", 0.0) > limit:
            difference = metrics["rollout/logprob_diff_mean"]
            self.console.warn(
                f"mean |trainer - rollout| log-prob {difference:.3g} is over rollout.logprob_diff_warn={limit:g}"
            )

    def _samples(self, count: int) -> Iterator[dict[str, object]]:
        values = self._batch.values
        rewards = scores(self._batch, "writing samples").tolist()
        for i, row_id in enumerate(self._batch.row_ids[:count]):
            yield {
                "id": row_id,
                "prompt": values["prompt"][i],
                "response": values["response"][i],
                "reward": rewards[i],
                "finish_reason": values["finish_reason"][i],
            }

    def finish(self) -> None:
        """Says where everything is, first and last reward, and draws the curve."""
        self.console.close()
        picture = self.tracker.picture()
        for name, title in (("reward/mean", "training reward"), ("eval/reward/mean", "held-out reward")):
            series = self.tracker.series(name)
            if series:
                last = [value for _, value in series[-5:]] if name == "reward/mean" else [series[-1][1]]
                over = f" (mean of the last {len(last)} steps)" if len(last) > 1 else ""
                self.console.message(
                    f"{title}: {series[0][1]:.3f} at step {series[0][0]}, {np.mean(last):.3f} at the end{over}"
                )
        self.console.message(
            f"run: {self.folder} (metrics.jsonl, samples/, logs/, config.yaml, {picture.name if picture else ''})"
        )
