"""Actor, critic and reference as a driver sees them: worker groups on one pool, each with its own layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scenarios import OPTIM, Cell, engine_settings

from flowrl.config.model_shape import read_model_shape
from flowrl.config.schema import ActorConfig, CriticConfig, LossKL, ReferenceConfig
from flowrl.protocol import DataProto, merge_metrics
from flowrl.single_controller import ResourcePool, WorkerError, WorkerGroup
from flowrl.workers.actor import ActorWorker
from flowrl.workers.critic import CriticWorker
from flowrl.workers.reference import ReferenceWorker

ACTOR_KEYS = {
    "policy/loss", "policy/grad_norm", "policy/clip_fraction", "policy/entropy", "policy/ratio_min", "policy/ratio_max",
    "policy/skipped_steps", "policy/optimizer_steps", "policy/lr", "kl/approx", "kl/loss",
}  # fmt: skip
CRITIC_KEYS = {
    "value/loss",
    "value/grad_norm",
    "value/clip_fraction",
    "value/skipped_steps",
    "value/optimizer_steps",
    "value/lr",
}


@pytest.fixture()
def roles(
    pool: Callable[[int], ResourcePool], model_folder: dict[str, Path]
) -> tuple[ActorWorker, CriticWorker, ReferenceWorker]:
    folder = model_folder["Llama"]
    shape, two = read_model_shape(folder), pool(2)
    actor = WorkerGroup.spawn(
        two, ActorWorker, str(folder), shape, ActorConfig(optim=OPTIM, **engine_settings(Cell(tp=2))),
        name="actor", kl=LossKL(coefficient=0.01), temperature=0.7, num_tokenizer_ids=131, total_optimizer_steps=2, seed=0,
    )  # fmt: skip
    settings = engine_settings(Cell(pp=2, budget=24))
    critic_config = CriticConfig(optim=OPTIM, aggregation="token-mean", minibatch_prompts=1, epochs=1, **settings)
    critic = WorkerGroup.spawn(
        two, CriticWorker, str(folder), shape, critic_config, name="critic", total_optimizer_steps=2, seed=0
    )
    reference = WorkerGroup.spawn(
        two, ReferenceWorker, str(folder), shape, ReferenceConfig(**engine_settings(Cell())),
        name="reference", temperature=0.7, num_tokenizer_ids=131, seed=0,
    )  # fmt: skip
    return actor, critic, reference


def test_roles_of_different_layouts_share_processes_and_a_batch(
    roles: tuple[ActorWorker, CriticWorker, ReferenceWorker], batch: DataProto
) -> None:
    """PAR-03: every output comes back in input order. MSK-01: over response tokens only. API-02: a lost column is named."""
    actor, critic, reference = roles
    ready = batch.union(actor.log_probs(batch), reference.log_probs(batch), critic.values(batch))
    lengths = batch.lengths("response_ids").tolist()
    for name in ("old_log_probs", "entropy", "reference_log_probs", "old_values"):
        assert ready.lengths(name).tolist() == lengths, name
    difference = ready["old_log_probs"].values - ready["reference_log_probs"].values
    assert difference.abs().max() <= 1e-5
    ready = ready.with_columns(returns=ready["advantages"])
    updates = [actor.update(ready), critic.update(ready)]
    metrics = merge_metrics(update.metrics for update in updates)
    assert set(metrics) == ACTOR_KEYS | CRITIC_KEYS
    assert metrics["policy/optimizer_steps"].value == 1 and metrics["value/optimizer_steps"].value == 1
    again = actor.log_probs(batch)
    assert (again["old_log_probs"].values - ready["old_log_probs"].values).abs().max() > 1e-4


def test_update_without_a_column_names_it_and_the_phase_that_makes_it(
    roles: tuple[ActorWorker, CriticWorker, ReferenceWorker], batch: DataProto
) -> None:
    """API-02."""
    with pytest.raises(WorkerError, match="needs column 'old_log_probs', which actor.log_probs makes"):
        len(roles[0].update(batch))
