"""ReMax: REINFORCE with the greedy answer's reward as baseline, no critic (Li et al. 2024, algorithm 1).

    python -m recipes.remax [overrides]

Its dataflow differs from PPO's: each step generates twice, and the baseline is one greedy answer per prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flowrl import DataProto
from flowrl.config.compose import Recipe
from flowrl.config.schema import KL, Algorithm
from flowrl.estimate import estimate, per_sequence, scores, shaped_rewards
from flowrl.launch import launch
from flowrl.protocol import Metric

if TYPE_CHECKING:
    from flowrl.run import Run


@dataclass(frozen=True)
class ReMax(Algorithm):
    """No knobs: the baseline has none."""


RECIPE = Recipe(algorithm={"remax": ReMax}, defaults=("algorithm=remax", "kl=none", "rollout.samples_per_prompt=8"))


@estimate.register
def _remax(algorithm: ReMax, batch: DataProto, kl_coefficient: float, kl: KL) -> DataProto:
    lengths = batch.lengths("response_ids")
    mask = torch.arange(int(lengths.max()))[None, :] < lengths[:, None]
    totals = shaped_rewards(batch, mask, kl_coefficient, kl, "remax").sum(-1)
    baseline = torch.tensor(batch.values["baseline"])
    return per_sequence(batch, totals - baseline).with_metrics(
        {"baseline/mean": Metric.mean(float(baseline.sum()), len(batch))}
    )


def train(run: Run) -> None:
    """Sample, answer greedily, reward both, update with the difference."""
    actor, rollout, reference = run.actor(), run.rollout(), run.reference()
    rollout.receive_weights(actor)
    run.offload(actor, reference)
    run.evaluate(rollout)
    for prompts in run.steps():
        batch = prompts.union(rollout.generate(prompts))
        one_each = first_samples(prompts)
        greedy = one_each.union(rollout.generate(one_each, greedy=True))
        rollout.sleep()
        run.reload(actor, reference)

        answers = [actor.log_probs(batch)]
        if reference is not None:
            answers.append(reference.log_probs(batch))
        baseline = dict(zip(greedy.values["prompt_id"], scores(run.rewards(greedy), "remax").tolist(), strict=True))
        answers.append(run.rewards(batch))
        batch = batch.with_values(baseline=[baseline[prompt] for prompt in batch.values["prompt_id"]])
        batch = run.advantages(batch.union(*answers))

        run.log(*[actor.update(part) for part in run.minibatches(batch, run.config.actor)])
        run.save(actor)
        run.offload(reference)
        rollout.wake(what="weights")
        run.log(rollout.receive_weights(actor))
        run.offload(actor)
        rollout.wake(what="kv_cache")
        run.evaluate(rollout)


def first_samples(batch: DataProto) -> DataProto:
    """One row per prompt: the first of its samples."""
    seen: set[str] = set()
    first = [i for i, prompt in enumerate(batch.values["prompt_id"]) if not (prompt in seen or seen.add(prompt))]
    return batch.rows(first)


if __name__ == "__main__":
    launch(train, RECIPE)
