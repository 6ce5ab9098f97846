from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.config.compose import compose
from flowrl.config.schema import DataConfig
from flowrl.config.tree import ConfigError
from flowrl.data.prompts import PromptTable, load_prompts
from flowrl.data.tokenizer import load_tokenizer

MakeFolder = Callable[..., Path]
Write = Callable[..., str]
DEFAULTS = DataConfig(prompts_per_step=1, max_prompt_tokens=16)


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in range(count))


def message(count: int) -> list[dict[str, str]]:
    """One user turn that has `count` tokens once templated: five of them are the template's."""
    return [{"role": "user", "content": words(count - 5)}]


def load(
    folder: Path, files: list[str], config: DataConfig = DEFAULTS, held_out: bool = False, template: str | None = None
) -> PromptTable:
    return load_prompts(files, config, load_tokenizer(folder, template), seed=0, held_out=held_out)


def refusal(folder: Path, files: list[str], config: DataConfig = DEFAULTS) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, files, config)
    return str(caught.value)


def test_overlong_prompts_are_an_error_with_line_length_and_limit(make_folder: MakeFolder, write: Write) -> None:
    """DAT-01: measured on the templated ids; exactly the limit is fine."""
    file = write(*[{"prompt": message(n)} for n in (15, 16, 17, 100)])
    text = refusal(make_folder(), [file])
    assert text.splitlines()[0] == (
        f"{file}, line 3: the prompt has 17 tokens, data.max_prompt_tokens=16; raise the limit or choose data.overlong=drop or truncate_left"
    )
    assert "line 4: the prompt has 100 tokens" in text and len(text.splitlines()) == 2


def test_dropping_says_what_is_kept(make_folder: MakeFolder, write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """DAT-01: counts are logged, and an empty set is refused."""
    folder, config = make_folder(), replace(DEFAULTS, overlong="drop")
    table = load(folder, [write(*[{"prompt": message(n)} for n in (15, 16, 17, 100)])], config)
    assert [len(prompt.ids) for prompt in table.prompts] == [15, 16]
    assert "kept 2 prompts, dropped 2 over 16 tokens" in caplog.text
    text = refusal(folder, [write({"prompt": message(17)}, name="long.jsonl")], config)
    assert "leaves none of 1 prompts" in text and "the shortest has 17 tokens" in text


def test_truncation_keeps_the_generation_suffix(make_folder: MakeFolder, write: Write) -> None:
    """DAT-01: the result has exactly the limit and ends with the opening of the assistant's turn."""
    config = replace(DEFAULTS, overlong="truncate_left")
    short, exact, long, longest = load(
        make_folder(), [write(*[{"prompt": message(n)} for n in (15, 16, 17, 100)])], config
    ).prompts
    assert [len(prompt.ids) for prompt in (short, exact, long, longest)] == [15, 16, 16, 16]
    assert {prompt.ids[-3:] for prompt in (short, exact, long, longest)} == {(3, 4, 7)}
    assert short.ids[:2] == exact.ids[:2] == (4, 6) and long.ids[0] == 6


def test_a_failing_template_is_never_too_long(make_folder: MakeFolder, write: Write) -> None:
    """TOK-02: the row is named, whatever the policy for long prompts."""
    system = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}]
    file = write({"prompt": message(9)}, {"prompt": system})
    for overlong in ("error", "drop", "truncate_left"):
        text = refusal(make_folder(f"model-{overlong}"), [file], replace(DEFAULTS, overlong=overlong))
        assert text.startswith(f"{file}, line 2: the chat template of ") and "no system turns" in text


def test_messages_without_a_template_are_refused(make_folder: MakeFolder, write: Write) -> None:
    """TOK-02: one error for the model, not one for each row; plain text needs no template."""
    folder = make_folder(template=None)
    text = refusal(folder, [write({"prompt": message(9)}, {"prompt": message(9)})])
    assert "has no chat template" in text and len(text.splitlines()) == 1
    assert len(load(folder, [write({"prompt": "w1"}, name="plain.jsonl")])) == 1
    assert "has no chat template" in refusal(
        folder, [write({"prompt": "w1"})], replace(DEFAULTS, template_strings=True)
    )


def test_the_reward_gets_the_rows_own_string_or_the_templated_text(make_folder: MakeFolder, write: Write) -> None:
    folder, file = make_folder(), write({"prompt": "w1 w2"}, {"prompt": message(6)})
    plain, chat = load(folder, [file]).prompts
    assert (plain.text, plain.ids) == ("w1 w2", (9, 10))
    assert (chat.text, chat.ids) == ("<turn> user w0 <end> <turn> assistant", (4, 6, 8, 3, 4, 7))
    wrapped = load(folder, [file], replace(DEFAULTS, template_strings=True)).prompts[0]
    assert (wrapped.text, wrapped.ids) == ("w1 w2", (4, 6, 9, 10, 3, 4, 7))


def test_a_template_that_nothing_uses_is_noted(
    make_folder: MakeFolder, write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0]['content'] }} <turn>")
    config, folder, file = replace(DEFAULTS, chat_template=str(template)), make_folder(), write({"prompt": "w1"})
    assert load(folder, [file], config, template=str(template)).prompts[0].ids == (9,)
    assert "data.chat_template has no effect" in caplog.text
    wrapped = load(folder, [file], replace(config, template_strings=True), template=str(template))
    assert wrapped.prompts[0].ids == (9, 4)


def test_a_prompt_without_tokens_is_refused(make_folder: MakeFolder, write: Write) -> None:
    folder = make_folder(template="{{ '' }}")
    assert "line 1: the prompt has no tokens" in refusal(folder, [write({"prompt": message(6)})])


def test_a_step_is_a_batch_of_prompts(make_folder: MakeFolder, write: Write) -> None:
    file = write(*[{"prompt": f"w{i}", "id": f"p{i}", "answer": i} for i in range(7)])
    config = replace(DEFAULTS, prompts_per_step=3, shuffle=False)
    table = load(make_folder(), [file], config)
    batch = table.step(3)
    assert batch.row_ids == ("3:p6", "3:p0", "3:p1")
    assert batch.values["prompt_id"] == ["p6", "p0", "p1"] and batch.values["prompt"] == ["w6", "w0", "w1"]
    assert [row["answer"] for row in batch.values["row"]] == [6, 0, 1]
    assert [row.tolist() for row in batch["prompt_ids"].rows()] == [[14], [8], [9]]  # type: ignore[union-attr]


def test_steps_can_be_taken_up_anywhere(make_folder: MakeFolder, write: Write) -> None:
    folder, file = make_folder(), write(*[{"prompt": f"w{i}"} for i in range(7)])
    config = replace(DEFAULTS, prompts_per_step=3)
    table = load(folder, [file], config)
    seen = {step: table.step(step).row_ids for step in range(1, 12)}
    resumed = load(folder, [file], config)
    assert all(resumed.step(step).row_ids == seen[step] for step in (9, 10, 4))


def test_fewer_prompts_than_a_step_takes_are_refused(make_folder: MakeFolder, write: Write) -> None:
    folder, file = make_folder(), write({"prompt": "w1"}, {"prompt": "w2"})
    config = replace(DEFAULTS, prompts_per_step=3)
    text = refusal(folder, [file], config)
    assert "2 prompts are fewer than data.prompts_per_step=3" in text and "data.prompts_per_step<=2" in text
    assert len(load(folder, [file], config, held_out=True)) == 2


def test_held_out_prompts_come_in_file_order(make_folder: MakeFolder, write: Write) -> None:
    table = load(make_folder(), [write(*[{"prompt": f"w{i}"} for i in range(4)])], held_out=True)
    assert table.eval_batch(2).row_ids == ("eval:0:1", "eval:0:2")
    assert len(table.eval_batch(None)) == len(table.eval_batch(99)) == 4


def test_the_built_in_task_fits_its_defaults() -> None:
    from flowrl.builtin.tokenizer import make_tokenizer
    from flowrl.data.tokenizer import Tokenizer

    config = compose([]).data
    tokenizer = Tokenizer(make_tokenizer(), "builtin:tiny", [1])
    train = load_prompts(config.train_files, config, tokenizer, seed=0)
    held_out = load_prompts(config.eval_files, config, tokenizer, seed=0, held_out=True)
    assert len(train.step(1)) == 64 and len(held_out.eval_batch(config.eval_prompts)) == 128
    assert not {prompt.text for prompt in train.prompts} & {prompt.text for prompt in held_out.prompts}


def test_each_file_has_a_digest_of_all_that_its_prompts_say(make_folder: MakeFolder, write: Write) -> None:
    folder, rows = make_folder(), [{"prompt": f"w{i}", "id": f"p{i}", "answer": i} for i in range(3)]

    def digest(*changed: dict[str, object]) -> str:
        (found,) = load(folder, [write(*changed)], DEFAULTS).digests().values()
        return found

    same = digest(*rows)
    assert digest(*rows) == same
    other_answer, other_order = [*rows[:2], {**rows[2], "answer": 7}], rows[::-1]
    assert len({same, digest(*other_answer), digest(*other_order), digest(*rows[:2])}) == 4
    whole = load(folder, [write(*rows)], DEFAULTS)
    assert set(whole.digests()) == {whole.prompts[0].place.rpartition(", ")[0]}
