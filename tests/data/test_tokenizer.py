from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.config.tree import ConfigError
from flowrl.data.tokenizer import load_tokenizer

from .conftest import WORDS

MakeFolder = Callable[..., Path]
MESSAGES = [{"role": "user", "content": "w1 w2"}]


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(None, None, (2,)), (3, None, (2, 3)), (None, [2, 3], (2, 3)), ([4, 3], 5, (2, 3, 4, 5)), (2, [2], (2,))],
)
def test_stop_ids_are_the_union_of_all_sources(
    make_folder: MakeFolder,
    caplog: pytest.LogCaptureFixture,
    config_eos: object,
    generation_eos: object,
    expected: tuple[int, ...],
) -> None:
    """MSK-03: tokenizer, config.json and generation_config.json; logged."""
    caplog.set_level("INFO")
    tokenizer = load_tokenizer(make_folder(config_eos=config_eos, generation_eos=generation_eos))
    assert tokenizer.stop_token_ids == expected
    assert str(list(expected)) in caplog.text


def test_more_ids_than_the_model_has_are_refused(make_folder: MakeFolder) -> None:
    """TOK-01: a tokenizer of 140 ids on a vocabulary of 131 names both numbers; 120 on 131 are fine."""
    load_tokenizer(make_folder()).check_vocabulary(131)
    larger = load_tokenizer(make_folder("larger", words=(*WORDS, *(f"x{i}" for i in range(20)))))
    assert larger.num_ids == 140
    with pytest.raises(ConfigError, match="the tokenizer has 140 ids, the model's vocabulary only 131"):
        larger.check_vocabulary(131)
    with pytest.raises(ConfigError, match=r"stop ids \[131\]"):
        load_tokenizer(make_folder("stops", config_eos=131)).check_vocabulary(131)


def test_ids_with_gaps_are_counted_to_the_last(make_folder: MakeFolder) -> None:
    """TOK-01: an id that the tokenizer makes is never taken for a phantom."""
    folder = make_folder()
    text = (folder / "tokenizer.json").read_text().replace('"w111": 119', '"w111": 125')
    (folder / "tokenizer.json").write_text(text)
    assert load_tokenizer(folder).num_ids == 126


def test_plain_text_has_bos_and_no_eos(make_folder: MakeFolder) -> None:
    assert load_tokenizer(make_folder("plain")).encode_text("w1 w2") == [9, 10]
    tokenizer = load_tokenizer(make_folder("both", bos=True, eos=True))
    assert tokenizer.encode_text("w1 w2") == [1, 9, 10]
    assert tokenizer.encode_text("w1 <eos>") == [1, 9, 2, 2], "an EOS that the text itself has is the user's"


def test_templated_text_gets_no_second_bos(make_folder: MakeFolder) -> None:
    tokenizer = load_tokenizer(
        make_folder(bos=True, template="<bos> {% for m in messages %}{{ m['content'] }} {% endfor %}<turn>")
    )
    text = tokenizer.apply_template(MESSAGES)
    assert tokenizer.encode_templated(text) == [1, 9, 10, 4]


def test_the_template_opens_the_assistants_turn(make_folder: MakeFolder) -> None:
    tokenizer = load_tokenizer(make_folder())
    assert tokenizer.apply_template(MESSAGES) == "<turn> user w1 w2 <end> <turn> assistant"


def test_without_a_template_both_remedies_are_named(make_folder: MakeFolder) -> None:
    """TOK-02: the error names the model and the two fixes."""
    folder = make_folder(template=None)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(folder).apply_template(MESSAGES)
    for part in (str(folder), "data.chat_template=FILE", "plain text"):
        assert part in str(caught.value)


def test_a_template_of_ones_own_replaces_the_models(make_folder: MakeFolder, tmp_path: Path) -> None:
    """TOK-02: given once, used everywhere."""
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0]['content'] }} <turn>")
    assert load_tokenizer(make_folder(template=None), str(file)).apply_template(MESSAGES) == "w1 w2 <turn>"
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        load_tokenizer(make_folder("other"), str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(make_folder("third"), str(tmp_path / "none.jinja"))


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('refused') }}", "{{ messages[9]['content'] }}", "{% for", "{{ 1 + 'a' }}"]
)
def test_a_template_that_fails_says_so(make_folder: MakeFolder, template: str) -> None:
    with pytest.raises(ValueError, match="the chat template of .* fails"):
        load_tokenizer(make_folder(template=template)).apply_template(MESSAGES)


def test_decoding_leaves_special_tokens_out(make_folder: MakeFolder) -> None:
    tokenizer = load_tokenizer(make_folder())
    assert tokenizer.decode([9, 10, 3, 2]) == "w1 w2"
    assert tokenizer.decode([]) == tokenizer.decode([2]) == ""
    assert "w1" in tokenizer.decode([9, 130]), "an id without text does not break decoding"


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path, make_folder: MakeFolder) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        load_tokenizer(tmp_path / "empty")
    folder = make_folder("broken")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="generation_config.json is not JSON"):
        load_tokenizer(folder)


@pytest.mark.parametrize("eos", ["x", ["x"], {}, [[1]], [None], -1, [2, -1], True])
def test_stop_ids_that_are_none_are_named(make_folder: MakeFolder, eos: object) -> None:
    with pytest.raises(ConfigError, match="generation_config.json: eos_token_id=.* is not an id"):
        load_tokenizer(make_folder(generation_eos=eos))


@pytest.mark.parametrize("content", ["[]", "null", '{"added_tokens": 5}', "[" * 100000])
def test_tokenizer_files_of_another_kind_name_the_folder(make_folder: MakeFolder, content: str) -> None:
    folder = make_folder()
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_a_generation_config_that_cannot_be_read_is_named(make_folder: MakeFolder) -> None:
    folder, deep = make_folder("folder"), make_folder("deep")
    for one in (folder, deep):
        (one / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").mkdir()
    (deep / "generation_config.json").write_text("[" * 100000)
    for one, message in ((folder, "cannot be read"), (deep, "is not JSON")):
        with pytest.raises(ConfigError, match=f"generation_config.json {message}"):
            load_tokenizer(one)
