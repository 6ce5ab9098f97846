"""The tokenizer of a model folder: ids of prompts, text of responses, and the ids that end one."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from flowrl.config.paths import is_folder, user_path
from flowrl.config.tree import ConfigError

log = logging.getLogger(__name__)
# A template is a program of the model's author: besides Jinja's own errors it raises what its expressions raise.
TEMPLATE_ERRORS = (TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError)


class Tokenizer:
    """A Hugging Face tokenizer with the few things that flowrl asks of it; `folder` names it in messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, folder: str, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer: Any = tokenizer
        self.folder = folder
        self.stop_token_ids = tuple(stop_token_ids)
        # Added tokens may leave gaps, so the number of ids can exceed the number of entries.
        self.num_ids = max(len(self._tokenizer), max(self._tokenizer.get_vocab().values(), default=-1) + 1)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Error: `ConfigError` where the tokenizer makes ids that the model has no rows for."""
        if self.num_ids > vocab_size:
            raise ConfigError(
                f"model.path={self.folder}: the tokenizer has {self.num_ids} ids, the model's vocabulary only {vocab_size}; "
                "use the tokenizer that belongs to the model, or resize the model's embeddings"
            )
        beyond = [token for token in self.stop_token_ids if token >= vocab_size]
        if beyond:
            raise ConfigError(
                f"model.path={self.folder}: stop ids {beyond} lie outside the model's vocabulary of {vocab_size}; "
                "correct eos_token_id in its config.json or generation_config.json"
            )

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, with the tokenizer's own special tokens at the start (BOS) but none at the end."""
        ids: list[int] = self._tokenizer(text)["input_ids"]
        end = self._tokenizer.eos_token_id
        if end is not None and ids[-1:] == [end] and not text.endswith(self._tokenizer.eos_token):
            ids = ids[:-1]
        return ids

    def apply_template(self, messages: Sequence[Any]) -> str:
        """The messages as text that ends where the assistant's turn begins.

        Errors: `ConfigError` without a chat template, naming model and remedies; `ValueError` where the template
        raises.
        """
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"model.path={self.folder} has no chat template, and prompts are messages; give one (data.chat_template=FILE) or write "
                "the prompts as plain text (with data.template_strings=false)"
            )
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template of {self.folder} fails: {type(error).__name__}: {error}") from None
        return str(text)

    def encode_templated(self, text: str) -> list[int]:
        """Ids of templated text: the template wrote the special tokens, none are added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out and spaces untouched."""
        text = self._tokenizer.decode(
            [int(token) for token in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


def load_tokenizer(folder: str | Path, chat_template: str | None = None, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model folder; `chat_template` is a file that replaces its template.

    Stop ids are the union of what tokenizer, config.json and generation_config.json name; nothing else is taken from
    the latter. Error: `ConfigError` naming the folder.
    """
    folder = user_path(folder)
    if not is_folder(folder):
        raise ConfigError(f"model.path={folder} is not a folder")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        # Whatever transformers stumbles over in files of the wrong kind: the reason is theirs, the folder is the user's.
        raise ConfigError(
            f"model.path={folder}: its tokenizer cannot be loaded: {type(error).__name__}: {error}"
        ) from None
    if chat_template is not None:
        tokenizer.chat_template = _template(chat_template)
    sources = {"tokenizer": _ids(tokenizer.eos_token_id, f"the tokenizer of {folder}")}
    for name in ("config.json", "generation_config.json"):
        sources[name] = _ids(_json(folder / name).get("eos_token_id"), str(folder / name))
    stops = sorted({token for ids in sources.values() for token in ids})
    log.info(
        "a response ends with one of the ids %s (%s)",
        stops,
        ", ".join(f"{name} {ids}" for name, ids in sources.items()),
    )
    return Tokenizer(tokenizer, str(folder), stops)


def _template(name: str) -> str:
    try:
        text = user_path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"data.chat_template={name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.chat_template={name} is not UTF-8 text (byte {error.start}); give a Jinja template"
        ) from None
    if not text.strip():
        raise ConfigError(f"data.chat_template={name} is empty; give a Jinja template, or null")
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateError as error:
        raise ConfigError(f"data.chat_template={name} is not a Jinja template: {error}") from None
    return text


def _ids(value: Any, source: str) -> list[int]:
    """Error: `ConfigError` for what is no id and no list of ids."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or token < 0:
            raise ConfigError(f"{source}: eos_token_id={value!r} is not an id, or a list of ids, from 0 on")
    return ids


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    return content if isinstance(content, dict) else {}
