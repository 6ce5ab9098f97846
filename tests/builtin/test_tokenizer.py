from __future__ import annotations

from flowrl.builtin.recipe import EOS_ID, PAD_ID, VOCABULARY
from flowrl.builtin.tokenizer import make_tokenizer


def test_one_token_per_character_and_back() -> None:
    tokenizer = make_tokenizer()
    text = "37+5=042 so, it is right.\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode([*ids, EOS_ID, PAD_ID], skip_special_tokens=True) == text
    assert len(tokenizer) == len(VOCABULARY) < 64
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_ID, PAD_ID)


def test_unknown_characters_become_one_unknown_token() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer("aÄ<eos>b")["input_ids"] == [
        VOCABULARY.index("a"),
        VOCABULARY.index("<unk>"),
        EOS_ID,
        VOCABULARY.index("b"),
    ]


def test_chat_template_leaves_a_single_user_message_as_it_is() -> None:
    tokenizer = make_tokenizer()
    user = [{"role": "user", "content": "37+5="}]
    assert tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True) == "37+5="
    messages = [{"role": "system", "content": "add"}, *user, {"role": "assistant", "content": "042"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "add\n37+5=042<eos>"
