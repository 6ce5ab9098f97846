"""The tiny model's tokenizer: one token per character, and a chat template that adds nothing to plain prompts."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flowrl.builtin.recipe import CHAT_TEMPLATE, EOS, PAD, UNKNOWN, VOCABULARY


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 50 entries: pad, eos, unknown, digits, some signs, lower-case letters. It adds no BOS."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
