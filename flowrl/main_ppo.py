"""PPO (`algorithm=gae`, with a critic) and GRPO (`algorithm=grpo`, without): `python -m flowrl.main_ppo [overrides]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.launch import launch

if TYPE_CHECKING:
    from flowrl.run import Run


def train(run: Run) -> None:
    """The algorithm: generate, score, estimate, update, move the weights."""
    actor, critic, reference, rollout = run.actor(), run.critic(), run.reference(), run.rollout()
    rollout.receive_weights(actor)
    run.offload(actor, critic, reference)
    run.evaluate(rollout)
    for prompts in run.steps():
        batch = prompts.union(rollout.generate(prompts))
        rollout.sleep()
        run.reload(actor, critic, reference)

        answers = [actor.log_probs(batch)]
        if reference is not None:
            answers.append(reference.log_probs(batch))
        if critic is not None:
            answers.append(critic.values(batch))
        answers.append(run.rewards(batch))
        batch = run.advantages(batch.union(*answers))

        if critic is not None:
            run.log(*[critic.update(part) for part in run.minibatches(batch, run.config.critic)])
        if run.policy_learns:
            run.log(*[actor.update(part) for part in run.minibatches(batch, run.config.actor)])

        run.save(actor, critic)
        run.offload(critic, reference)
        rollout.wake(what="weights")
        run.log(rollout.receive_weights(actor))
        run.offload(actor)
        rollout.wake(what="kv_cache")
        run.evaluate(rollout)


if __name__ == "__main__":
    launch(train)
