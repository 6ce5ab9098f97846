"""What must not be written: secrets in a configuration; and what must not be run: code of a model folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.builtin.model import resolve_model
from flowrl.config.cli import message
from flowrl.config.command import resume_command
from flowrl.config.compose import ConfigError, Recipe, compose, from_yaml, to_tree, to_yaml
from flowrl.config.model_code import custom_code
from flowrl.config.redact import HIDDEN, redact, redact_text
from flowrl.config.schema import Algorithm, Config, knob
from flowrl.config.tree import knobs
from flowrl.data.tokenizer import load_tokenizer

SECRETS = ("hunter2", "s3cr3t")


@dataclass(frozen=True)
class Judged(Algorithm):
    """A recipe's algorithm that asks a service."""

    api_key: str | None = knob(None, "key of the service")
    endpoint: str = knob("https://judge.example/v1", "address of the service")


JUDGED = Recipe(algorithm={"judged": Judged})


def test_no_dump_of_a_configuration_holds_a_secret() -> None:
    argv = ["algorithm.api_key=hunter2", "algorithm.endpoint='https://me:s3cr3t@judge.example/v1'"]
    config = compose(argv, recipe=JUDGED)
    text = to_yaml(config, recipe=JUDGED) + json.dumps(to_tree(config, recipe=JUDGED))
    assert not any(secret in text for secret in SECRETS)
    assert f"https://{HIDDEN}@judge.example/v1" in text
    assert to_tree(compose([], recipe=JUDGED), recipe=JUDGED)["algorithm"]["api_key"] is None


def test_a_configuration_without_secrets_is_dumped_as_it_is() -> None:
    config = compose(["trainer.total_steps=3"])
    assert from_yaml(to_yaml(config)) == config
    assert HIDDEN not in to_yaml(config)


def test_no_knob_of_flowrl_itself_looks_like_a_secret() -> None:
    """Else its value would be missing in every dump, and a resumed run could not compare it."""
    assert [key for key in knobs(Config) if redact(1, key) == HIDDEN] == []


def test_no_message_about_a_configuration_shows_a_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["algorithm.api_key=[hunter2]"], recipe=JUDGED)
    assert "algorithm.api_key" in str(caught.value) and "hunter2" not in str(caught.value)
    assert "s3cr3t" not in message(ConfigError("no file at ftp://me:s3cr3t@host/x"))
    assert "s3cr3t" not in message(ConfigError("ftp://me:s3cr3t@host/x", "and another"))


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("api_key", True), ("HF_TOKEN", True), ("db.password", True), ("clientSecret", True), ("Authorization", True),
        ("max_prompt_tokens", False), ("key_frames", False), ("path", False),
    ],
)  # fmt: skip
def test_secrets_are_told_by_the_end_of_their_name(name: str, hidden: bool) -> None:
    assert (redact("value", name) == HIDDEN) is hidden
    assert (redact({"a": [{name: "value"}]})["a"][0][name] == HIDDEN) is hidden


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://me:s3/cr3t@bucket/x", f"s3://{HIDDEN}@bucket/x"),
        ("http://host:8000/v1/models@main", "http://host:8000/v1/models@main"),
        ("https://host/models@main", "https://host/models@main"),
    ],
)
def test_a_slash_in_a_password_does_not_show_it(text: str, shown: str) -> None:
    assert redact_text(text) == shown


@given(st.text(alphabet="ab:/@. ", max_size=30))
def test_hiding_twice_changes_nothing(text: str) -> None:
    assert redact_text(redact_text(text)) == redact_text(text)
    if "://" not in text:
        assert redact_text(text) == text


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_model_folder_with_code_is_refused_unless_allowed(make_model: Callable[..., Path], file: str) -> None:
    folder = make_model()
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, "auto_map": {"AutoAnything": ["code.Mine", None]}}))
    with pytest.raises(ConfigError) as caught:
        compose([f"model.path={folder}"])
    text = str(caught.value)
    assert text.count("model.trust_remote_code") == 1, "the same folder is told once"
    assert f"model.path={folder}" in text and file in text and "code.Mine" in text
    compose([f"model.path={folder}", "model.trust_remote_code=true"])


def test_the_folders_of_critic_and_reference_are_looked_at_where_they_are_used(make_model: Callable[..., Path]) -> None:
    plain, coded = make_model(), make_model("coded", auto_map={"AutoConfig": "code.Mine"})
    for role, unused in (("critic", "algorithm=grpo"), ("reference", "kl=none")):
        argv = [f"model.path={plain}", f"{role}.path={coded}"]
        with pytest.raises(ConfigError, match=rf"{role}.path=.*code.Mine"):
            compose(argv)
        with pytest.raises(ConfigError, match=f"{role}.path") as caught:
            compose([*argv, unused])
        assert "code.Mine" not in str(caught.value), "a key without effect is refused for that alone"


def test_files_without_code_or_without_sense_name_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    (tmp_path / "generation_config.json").write_text("no json")
    assert custom_code(tmp_path) == []
    assert custom_code(tmp_path / "absent") == []


@pytest.mark.parametrize("trusted", [False, True])
def test_the_tokenizers_own_code_runs_only_when_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """The loader itself keeps to it, whoever calls it: the code of this folder would leave a file."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    folder.mkdir()
    for file in resolve_model("builtin:tiny", "~/.cache/flowrl").iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    trace = tmp_path / "trace"
    (folder / "mine.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nfrom transformers import PreTrainedTokenizerFast\n\n\n"
        "class Mine(PreTrainedTokenizerFast):\n    pass  # transformers marks the class that it loads\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    try:
        load_tokenizer(folder, trust_remote_code=trusted)
    except ConfigError as error:
        assert not trusted, error
    assert trace.exists() is trusted


def test_the_command_to_go_on_shows_no_secret_and_is_read_as_it_was_meant(tmp_path: Path) -> None:
    words = ["python", "-m", "flowrl.main_ppo", "algorithm.api_key=hunter2", "trainer.resume=never", "run.dir=old"]
    words.append("algorithm.endpoint='https://me:p@ss@judge.example/v1?token=abc&n=1'")
    for name in ("plain", "r ü n", "it's", "a=b,{c}(d)#e[f`", 'say "x"', "~x"):
        shown = shlex.split(resume_command(words, tmp_path / name))
        assert not {
            secret for secret in ("hunter2", "p@ss", "abc", "never", "run.dir=old") if secret in " ".join(shown)
        }
        assert compose([shown[-1]]).run.dir == str(tmp_path / name)
    assert "n=1" in shown[-2] and "judge.example" in shown[-2]
