"""Input that is odd in kind: each is one message that names the key or the file, before anything starts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.config.compose import compose_all
from flowrl.config.layout import divisors
from flowrl.config.model_shape import read_model_shape
from flowrl.config.tree import ConfigError
from flowrl.config.units import error_score
from flowrl.resharding.shapes import planned_shape

MakeModel = Callable[..., Path]
LONG = "/" + "x" * 300


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.prompts_per_step=999999999999", "at most 4294967295"),
        ("trainer.total_steps=9223372036854775807", "at most 4294967295"),
        ("trainer.grace_seconds=1" + "0" * 400, "is not legal"),
        ("algorithm.gamma=1" + "0" * 400, "is not legal"),
        ("reward.timeout_seconds=3000000", "from 0.01 to 1e+06"),
        ("cluster.collective_timeout_seconds=1e300", "from 5 to 1e+06"),
        ("trainer.grace_seconds=1e300", "from 0 to 1e+06"),
        ("cluster.call_timeout_seconds=1e300", "from 5 to 1e+06"),
        ("reward.on_error='score:1e39'", "from -3.40282e+38 to 3.40282e+38"),
        ("reward.memory_bytes=1", "at least 67108864"),
        (f"data.chat_template={LONG}", "data.chat_template="),
        (f"data.train_files=[{LONG}.jsonl]", "data.train_files"),
        (f"model.path={LONG}", "File name too long"),
        (f"reward.function={LONG}.py:f", "there is no file"),
    ],
)
def test_one_message_names_the_key(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_all([word])
    assert message in str(caught.value) and word.partition("=")[0] in str(caught.value)


def test_a_run_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run.dir=.* lies below .*file, which is a file"):
        compose_all([f"run.dir={tmp_path / 'file' / 'x' / 'y'}"])


def test_the_largest_numbers_that_are_legal_take_no_time() -> None:
    with pytest.raises(ConfigError, match="cannot be cut into mini-batches"):
        compose_all(["data.prompts_per_step=4294967291"])
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36] and divisors(1) == [1] and divisors(97) == [1, 97]


@pytest.mark.parametrize(
    "text", ["score:1_0", "score:٣", "score:inf", "score:nan", "score:", "score:1e39", "score: 1", "0"]
)
def test_what_is_no_score_for_errors(text: str) -> None:
    with pytest.raises(ValueError, match="legal: raise, or score:<number>"):
        error_score(text)


def test_scores_for_errors() -> None:
    assert [error_score(text) for text in ("raise", "score:0", "score:-1.5", "score:1e3", "score:.5")] == [
        None, 0.0, -1.5, 1000.0, 0.5,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tie_word_embeddings", "false"), ("tie_word_embeddings", 1), ("num_key_value_heads", -2), ("num_key_value_heads", "2"),
        ("num_key_value_heads", 2.5), ("head_dim", "x"), ("head_dim", 0), ("rms_norm_eps", float("nan")), ("rms_norm_eps", "x"),
        ("rms_norm_eps", 0), ("rope_theta", "x"), ("rope_theta", -1.0), ("rope_parameters", "x"), ("rope_scaling", 5),
        ("eos_token_id", -1), ("eos_token_id", "x"), ("eos_token_id", [1, -1]), ("eos_token_id", {}), ("architectures", 5),
        ("use_sliding_window", "false"), ("hidden_size", True),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_kind_is_named(make_model: MakeModel, field: str, value: Any) -> None:
    folder = make_model(**{field: value})
    with pytest.raises(ValueError, match="architecture 5" if field == "architectures" else f"config.json: {field}="):
        read_model_shape(folder)


@pytest.mark.parametrize(
    ("scaling", "field"),
    [
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": "x"}, "factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": -4.0,
          "original_max_position_embeddings": 64}, "high_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    ],
)  # fmt: skip
def test_numbers_of_rope_scaling_are_checked(make_model: MakeModel, scaling: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        read_model_shape(make_model(rope_scaling=scaling))
    good = {"rope_type": "linear", "factor": 2.0}
    shape = read_model_shape(make_model("good", rope_scaling=good))
    assert shape.rope_scaling == good


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [("moe_intermediate_size", 0), ("moe_intermediate_size", -32), ("num_experts", 2.5), ("num_experts_per_tok", "2"),
     ("norm_topk_prob", "false"), ("num_experts_per_tok", 0)],
)  # fmt: skip
def test_experts_are_counted_in_whole_numbers(make_model: MakeModel, field: str, value: Any) -> None:
    assert read_model_shape(make_model("good", **EXPERTS)).num_experts == 4
    with pytest.raises(ValueError, match=f"config.json: {field}="):
        read_model_shape(make_model(**EXPERTS | {field: value}))


@pytest.mark.parametrize("content", ["[]", "null", "3", '"x"'])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    for read in (read_model_shape, planned_shape):
        with pytest.raises(ValueError, match="is not an object of settings"):
            read(str(tmp_path))


def test_a_model_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    file, folder, loop = tmp_path / "file", tmp_path / "folder", tmp_path / "loop"
    file.write_text(json.dumps({}))
    (folder / "config.json").mkdir(parents=True)
    os.symlink(loop, loop)
    for path in (file, folder, loop):
        with pytest.raises(ValueError, match="config.json cannot be read"):
            read_model_shape(path)
    with pytest.raises(ValueError, match="neither a folder nor a named shape"):
        planned_shape(LONG)
