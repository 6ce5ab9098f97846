from __future__ import annotations

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.config.compose import ConfigError, Recipe, compose, from_yaml, to_tree, to_yaml
from flowrl.config.schema import GAE, GRPO, AdaptiveKL, Algorithm, Config, LossKL, NoKL, RewardKL, knob
from flowrl.config.tree import Knob, checked, flatten, knobs, nested, table


def refusal(*argv: str, recipe: Recipe | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(argv, recipe=recipe)
    return str(caught.value)


def test_defaults_compose_without_auto_left() -> None:
    config = compose([])
    assert isinstance(config.algorithm, GAE) and isinstance(config.kl, RewardKL)
    assert [key for key, value in table(config).items() if value == "auto"] == ["trainer.resume"]
    assert (config.cluster.device, config.actor.dtype, config.rollout.dtype) == ("cpu", "float32", "float32")


def test_the_tree_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        compose([]).actor.optim.lr = 1.0  # type: ignore[misc]


def test_values_groups_lists_and_sections_are_set() -> None:
    config = compose(
        [
            "algorithm=grpo",
            "algorithm.eps=0.5",
            "kl=loss",
            "trainer.profile_steps=[1,2]",
            "actor.optim={lr: 1e-3, eps: 1e-5}",
            "++trainer.seed=3",
        ]
    )
    assert config.algorithm == GRPO(eps=0.5) and config.kl == LossKL()
    assert config.trainer.profile_steps == (1, 2) and config.trainer.seed == 3
    assert (config.actor.optim.lr, config.actor.optim.eps, config.actor.optim.beta1) == (1e-3, 1e-5, 0.9)


def test_a_single_value_is_a_list_of_one(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    config = compose(
        [f"data.train_files={file}", f"data.eval_files=[{file}]", "reward.function=m:f", "rollout.stop_token_ids=5"]
    )
    assert config.data.train_files == config.data.eval_files == (str(file),)
    assert config.rollout.stop_token_ids == (5,)


def test_an_integer_is_a_number_and_interpolations_resolve() -> None:
    config = compose(["actor.optim.lr=0", "data.max_prompt_tokens=${rollout.max_response_tokens}"])
    assert type(config.actor.optim.lr) is float
    assert config.data.max_prompt_tokens == 8


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.prompts_per_step=8.0", ["data.prompts_per_step=8.0", "an integer >= 1", "write 8"]),
        ("data.prompts_per_step='8'", ["data.prompts_per_step='8'", "an integer"]),
        ("data.prompts_per_step=-1", ["data.prompts_per_step=-1", ">= 1"]),
        ("data.prompts_per_step=null", ["data.prompts_per_step=null", "an integer"]),
        ("data.prompts_per_step=true", ["data.prompts_per_step=true", "an integer"]),
        ("data.prompts_per_step=auto", ["data.prompts_per_step='auto'", "an integer"]),
        ("data.prompts_per_step=[1]", ["[1]", "an integer"]),
        ("data.prompts_per_step=", ["data.prompts_per_step=''"]),
        ("data.prompts_per_step=???", ["???"]),
        ("data.shuffle=1", ["data.shuffle=1", "true or false"]),
        ("data.shuffle=yes", ["data.shuffle='yes'", "true or false"]),
        ("actor.optim.lr=nan", ["actor.optim.lr=nan", "a number >= 0"]),
        ("actor.optim.lr=inf", ["actor.optim.lr=inf"]),
        ("actor.optim.lr=true", ["actor.optim.lr=true"]),
        ("rollout.top_p=1.5", ["rollout.top_p=1.5", "from 0.01 to 1"]),
        ("actor.aggregation=token-meen", ["token-mean | seq-mean-token-mean", "did you mean token-mean?"]),
        ("trainer.loggers=[tensorbord]", ["tensorboard | wandb", "did you mean tensorboard?"]),
        ("trainer.profile_steps=[1,2.5]", ["trainer.profile_steps=[1,2.5]", "a list [a,b] of an integer"]),
        ("data.train_files={a:b}", ["data.train_files", "a list"]),
        ("model.path=null", ["model.path=null", "text"]),
        ("model.path=3", ["model.path=3", """model.path="'3'\""""]),
        ("cluster.device=gpu", ["cluster.device=gpu", "cpu | cuda", "or auto"]),
        ("algorithm=grop", ["algorithm=grop", "gae | grpo", "did you mean grpo?"]),
        ("algorithm=null", ["algorithm=null", "gae | grpo"]),
        ("algorithm=gae,grpo", ["algorithm=gae,grpo", "gae | grpo"]),
        ("algorithm={eps:1}", ["gae | grpo"]),
        ("data.overlong=${nothing}", ["nothing"]),
        ("data.overlong=${oc.env:FLOWRL_NOT_SET}", ["FLOWRL_NOT_SET"]),
    ],
)
def test_values_are_checked_strictly(override: str, expected: list[str]) -> None:
    """CFG-02: int as float or text, null, negative, misspelt choice; the message says key, value and what is legal."""
    message = refusal(override)
    for text in expected:
        assert text in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_batch_sizes=4", "unknown key data.train_batch_sizes"),
        ("+data.train_batch_sizes=4", "unknown key data.train_batch_sizes"),
        ("++data.train_batch_sizes=4", "unknown key data.train_batch_sizes"),
        ("+trainer.total_stepz=3", "did you mean trainer.total_steps?"),
        ("trainer.total_stepz=3", "did you mean trainer.total_steps?"),
        ("algorithm.adv_estimator=grop", "unknown key algorithm.adv_estimator"),
        ("actor.kl_loss_coef=1", "unknown key actor.kl_loss_coef"),
        ("lr=1e-3", "did you mean actor.optim.lr?"),
        ("data.train_files.0=a", "unknown key data.train_files.0"),
        ("actor.layout={tp:1,xp:2}", "unknown key actor.layout.xp; did you mean actor.layout.tp?"),
        ("hydra.run.dir=x", "unknown key hydra.run.dir"),
        ("+trainer.total_steps=3", "exists; write it without the +"),
        ("~trainer.total_steps", "no key can be removed"),
        ("~algorithm", "no key can be removed"),
        ("algorithm@x=grpo", "packages (@)"),
        ("critic=null", "critic is a section"),
        ("data=3", "data is a section"),
        ("data.train_files=a,b", "data.train_files=[a,b]"),
        ("--multirun", "is not an option"),
        ("-m", "is not an option"),
        ("data.overlong", "cannot read 'data.overlong'"),
        ("trainer.total_steps==3", "cannot read"),
        ("data.chat_template={", "cannot read"),
        ("", "cannot read ''"),
    ],
)
def test_unknown_keys_and_foreign_grammar_are_refused(override: str, expected: str) -> None:
    """CFG-02: also with `+`; one message each, with the nearest name, never a traceback of Hydra's."""
    assert expected in refusal(override)


def test_all_problems_are_told_at_once() -> None:
    message = refusal("data.prompts_per_step=8.0", "trainer.total_steps=0", "data.overlong=cut")
    assert len(message.splitlines()) == 3


def test_a_knob_of_another_variant_names_the_variant() -> None:
    assert "algorithm.lam belongs to algorithm=gae; this run has algorithm=grpo" in refusal(
        "algorithm=grpo", "algorithm.lam=.9"
    )
    assert "kl.target belongs to kl=adaptive" in refusal("kl.target=1")
    assert "kl.estimator belongs to kl=reward and kl=adaptive and kl=loss" in refusal("kl=none", "kl.estimator=k1")
    assert compose(["kl=adaptive", "kl.target=0.2"]).kl == AdaptiveKL(target=0.2)


@dataclass(frozen=True)
class Toy(Algorithm):
    """A recipe's own variant."""

    strength: float = knob(1.0, "how strong", minimum=0)


TOY = Recipe(algorithm={"toy": Toy}, defaults=("algorithm.strength=2", "kl=none", "trainer.total_steps=7"))


def test_a_recipe_brings_its_variant_and_defaults() -> None:
    config = compose(["trainer.seed=5"], recipe=TOY)
    assert config.algorithm == Toy(strength=2.0) and config.kl == NoKL()
    assert (config.trainer.total_steps, config.trainer.seed) == (7, 5)
    assert from_yaml(to_yaml(config), recipe=TOY) == config
    assert to_tree(config)["algorithm"] == {"variant": "toy", "strength": 2.0}


def test_the_user_overrides_a_recipe() -> None:
    config = compose(["algorithm.strength=3", "kl=adaptive", "trainer.total_steps=8"], recipe=TOY)
    assert (config.algorithm, config.kl, config.trainer.total_steps) == (Toy(3.0), AdaptiveKL(), 8)


def test_a_recipe_serves_only_its_algorithms() -> None:
    assert "algorithm=gae is not legal; legal: toy" in refusal("algorithm=gae", recipe=TOY)
    both = Recipe(algorithm={"toy": Toy, "grpo": GRPO}, defaults=("algorithm=toy", "algorithm.strength=2"))
    assert compose(["algorithm=grpo"], recipe=both).algorithm == GRPO()
    assert compose([]).algorithm == GAE()


@pytest.mark.parametrize(
    "argv", [[], ["algorithm=grpo", "kl=none"], ["kl=loss", "placement=split", "trainer.profile_steps=[2,3]"]]
)
def test_the_resolved_tree_survives_yaml(argv: list[str]) -> None:
    config = compose(argv)
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [("- 1", "no mapping"), ("{", "not a configuration"), ("a: 1", "variant"), ("", "variant")],
)
def test_other_yaml_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        from_yaml(text)


def test_a_damaged_yaml_names_the_key() -> None:
    text = to_yaml(compose([]))
    with pytest.raises(ConfigError, match="trainer.seed=x|trainer.seed='x'"):
        from_yaml(text.replace("seed: 0", "seed: x"))
    with pytest.raises(ConfigError, match="trainer.seed is missing"):
        from_yaml(text.replace("  seed: 0\n", ""))
    with pytest.raises(ConfigError, match="unknown key trainer.sead"):
        from_yaml(text.replace("seed: 0", "seed: 0\n  sead: 1"))


def test_composing_leaves_no_trace_in_hydra() -> None:
    from hydra.core.global_hydra import GlobalHydra

    compose([])
    refusal("algorithm=grop")
    assert not GlobalHydra.instance().is_initialized()


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.just({"a": 1}),
)
KNOBS = list(knobs(Config).values())


@given(st.sampled_from(KNOBS), PLAIN)
def test_a_checked_value_has_the_type_of_its_knob(knob: Knob, value: object) -> None:
    try:
        result = checked(knob, value)
    except ValueError as error:
        assert str(error).startswith(f"{knob.key}=") and "legal: " in str(error)
        return
    if result is None or result == "auto":
        assert knob.optional or knob.auto or knob.scalar is str or knob.many
        return
    for element in result if knob.many else [result]:
        assert type(element) is knob.scalar
        if not isinstance(element, str):
            assert knob.minimum is None or element >= knob.minimum
            assert knob.maximum is None or element <= knob.maximum


def test_flatten_and_nested_are_opposites() -> None:
    flat = table(compose([]))
    assert flatten(nested(flat), {}) == {
        key: list(value) if isinstance(value, tuple) else value for key, value in flat.items()
    }


@pytest.mark.parametrize(
    ("what", "without"),
    [
        (
            "from flowrl.config.cli import run_main; from flowrl.config.compose import compose; compose([])",
            ("torch", "ray", "transformers", "vllm", "megatron"),
        ),
        ("import flowrl.main_ppo, flowrl.recovery", ("vllm", "megatron")),
    ],
    ids=["configuration", "driver"],
)
def test_what_only_processes_need_is_not_imported_before_them(what: str, without: tuple[str, ...]) -> None:
    code = f"import sys; {what}; print([m for m in {without} if m in sys.modules])"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
