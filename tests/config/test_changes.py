from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from flowrl.config.changes import ABSENT, Change, changes
from flowrl.config.compose import compose, to_yaml
from flowrl.config.schema import AUTO, Config
from flowrl.config.tree import ConfigError, Knob, knobs, show

BASE = (
    "run.dir=runs/one", "cluster.device=cpu", "cluster.devices=2", "actor.layout.tp=1", "trainer.save_every=4",
    "critic.epochs=1", "critic.minibatch_prompts=32", "critic.aggregation=token-mean",
)  # fmt: skip

FREE_SECTIONS = ("cluster", "run", "actor.layout", "critic.layout", "reference.layout", "rollout.layout")
FREE = {
    "model.trust_remote_code", "model.cache_dir", "placement", "dry_run", "reward.num_processes", "reward.timeout_seconds",
    "reward.memory_bytes", "rollout.expert_parallel", "rollout.max_batch_requests", "rollout.kv_cache_bytes", "rollout.cuda_graphs",
    "rollout.gpu_memory_fraction", "rollout.fingerprint_every", "rollout.logprob_diff_warn",
    *(f"{role}.{name}" for role in ("actor", "critic", "reference")
      for name in ("tokens_per_microbatch", "distributed_optimizer", "recompute", "offload")),
}  # fmt: skip
BOUND_IN_TRAINER = {"trainer.seed"}


def test_the_free_keys_are_these() -> None:
    """A new knob is refused on resume until its author says that it changes no result."""
    found = {key for key, knob in knobs(Config).items() if knob.free}
    expected = {
        key
        for key in knobs(Config)
        if key in FREE
        or key.startswith(tuple(f"{section}." for section in FREE_SECTIONS))
        or (key.startswith("trainer.") and key not in BOUND_IN_TRAINER)
    }
    assert found == expected


@cache
def base() -> tuple[Config, str]:
    config = compose(BASE)
    return config, to_yaml(config)


def other(knob: Knob, value: Any) -> Any:
    """A value of the knob's type that is not `value`."""
    if knob.choices:
        return next(choice for choice in knob.choices if choice != value)
    if knob.many:
        return ["another"]
    if knob.scalar is bool:
        return not value
    if value is None:
        return 7 if knob.scalar in (int, float) else "another"
    return "another" if knob.scalar is str else value + 1


@pytest.mark.parametrize("key", knobs(Config))
def test_every_key_that_is_read_is_either_free_or_compared(key: str) -> None:
    """Changing the text of one key is found exactly where the key is not free."""
    config, text = base()
    knob = knobs(Config)[key]
    value: Any = config
    for name in key.split("."):
        value = value.__dict__[name]
    changed = other(knob, list(value) if isinstance(value, tuple) else value)
    found = changes(edited(text, key, changed), config)
    # Nothing reads the exact end of a constant schedule.
    unread = key in ("actor.optim.min_lr", "critic.optim.min_lr")
    assert found == (() if knob.free or unread else (Change(key, show(changed), show(value)),))


def edited(text: str, key: str, value: Any) -> str:
    from omegaconf import OmegaConf

    tree = OmegaConf.create(text)
    OmegaConf.update(tree, key, value)
    return OmegaConf.to_yaml(tree)


def test_the_same_configuration_has_no_changes() -> None:
    for extra in ((), ("algorithm=grpo", "kl=none"), ("kl=adaptive", "actor.optim.lr=1e-8")):
        config = compose((*BASE[:5], *extra))
        assert changes(to_yaml(config), config) == ()


def test_the_number_of_steps_binds_where_a_learning_rate_ends_with_it() -> None:
    longer = ("trainer.total_steps=60",)
    assert changes(to_yaml(compose(BASE)), compose((*BASE, *longer))) == ()
    linear = (*BASE, "critic.optim.schedule=linear")
    assert changes(to_yaml(compose(linear)), compose((*linear, *longer))) == (
        Change("trainer.total_steps", "40", "60"),
    )


def test_another_variant_is_one_change_and_a_field_of_the_same_one_another() -> None:
    before = to_yaml(compose((*BASE, "kl=adaptive", "algorithm.lam=0.9")))
    assert changes(before, compose((*BASE, "kl=none"))) == (
        Change("algorithm.lam", "0.9", "1.0"),
        Change("kl", "adaptive", "none"),
    )


def test_a_key_that_only_one_version_knows_is_asked_about() -> None:
    config = compose(BASE)
    old = "\n".join(line for line in to_yaml(config).splitlines() if "dual_clip" not in line)
    assert changes(old, config) == (Change("actor.dual_clip", ABSENT, "3.0"),)
    assert changes(to_yaml(config) + "further: 3\n", config) == (Change("further", "3", ABSENT),)


def test_text_that_is_no_configuration_is_refused() -> None:
    for text in ("- a\n- b\n", "a: [", "a: b: c"):
        with pytest.raises(ConfigError, match="not a configuration"):
            changes(text, compose(BASE))
    assert AUTO not in to_yaml(compose(BASE)).replace("resume: auto", "")
