"""The table of prompts of a run, tokenised once, and the batch of prompts of each step."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from flowrl.config.schema import DataConfig
from flowrl.config.tree import ConfigError
from flowrl.data.order import StepOrder
from flowrl.data.rows import PromptRow, read_rows, refuse
from flowrl.data.tokenizer import Tokenizer
from flowrl.protocol import DataProto, Ragged

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is what the reward function gets: the row's own string, or the templated text of messages."""

    prompt_id: str
    text: str
    ids: tuple[int, ...]
    row: Mapping[str, Any]
    place: str


class PromptTable:
    """All prompts of a run in file order; `step` gives the batch of a step by its number alone."""

    def __init__(self, prompts: Sequence[Prompt], prompts_per_step: int, *, seed: int, shuffle: bool) -> None:
        self.prompts = tuple(prompts)
        self._per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._order: StepOrder | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def step(self, step: int) -> DataProto:
        """`prompts_per_step` different prompts, step counted from 1.

        Column `prompt_ids` (ragged int64); values `prompt_id`, `prompt` (text for the reward), `row`; row ids
        "STEP:PROMPT_ID". Error: `ValueError` where the table has fewer prompts.
        """
        if self._order is None:
            self._order = StepOrder(len(self), self._per_step, self._seed, self._shuffle)
        return _batch([self.prompts[i] for i in self._order.step(step)], str(step))

    def digests(self) -> dict[str, str]:
        """For each file, by the name that it was given, a sha256 over its prompts: ids, texts, tokens, rows, in order."""
        hashes: dict[str, Any] = {}
        for prompt in self.prompts:
            content = (prompt.prompt_id, prompt.text, prompt.ids, prompt.row)
            found = hashes.setdefault(prompt.place.rpartition(", ")[0], hashlib.sha256())
            found.update(json.dumps(content, sort_keys=True, default=str).encode())
        return {name: found.hexdigest() for name, found in hashes.items()}

    def eval_batch(self, limit: int | None) -> DataProto:
        """The first `limit` prompts in file order (None: all), as `step`; row ids "eval:PROMPT_ID"."""
        return _batch(self.prompts[:limit], "eval")


def _batch(prompts: Sequence[Prompt], prefix: str) -> DataProto:
    return DataProto(
        {"prompt_ids": Ragged.from_rows([prompt.ids for prompt in prompts], dtype=torch.int64)},
        values={
            "prompt_id": [prompt.prompt_id for prompt in prompts],
            "prompt": [prompt.text for prompt in prompts],
            "row": [dict(prompt.row) for prompt in prompts],
        },
        row_ids=[f"{prefix}:{prompt.prompt_id}" for prompt in prompts],
    )


def load_prompts(
    files: Sequence[str], config: DataConfig, tokenizer: Tokenizer, *, seed: int, held_out: bool = False
) -> PromptTable:
    """Reads, checks, templates and tokenises all rows; applies `data.overlong` to the templated ids.

    `held_out`: `builtin:arithmetic` means its held-out problems, and fewer prompts than a step takes are no error.
    Error: `ConfigError` naming file, line and remedy.
    """
    if held_out:
        files = [f"{name}/eval" if name.startswith("builtin:") else name for name in files]
    rows = read_rows(files)
    if (
        config.chat_template is not None
        and not config.template_strings
        and all(isinstance(row.prompt, str) for row in rows)
    ):
        log.warning(
            "data.chat_template has no effect on %s: every prompt is plain text and data.template_strings=false",
            ", ".join(files),
        )
    prompts = _tokenised(rows, config, tokenizer)
    prompts = _limited(prompts, config, ", ".join(files))
    if not held_out and len(prompts) < config.prompts_per_step:
        raise ConfigError(
            f"{', '.join(files)}: {len(prompts)} prompts are fewer than data.prompts_per_step={config.prompts_per_step}, and a step "
            f"takes no prompt twice; give more prompts or data.prompts_per_step<={len(prompts)}"
        )
    return PromptTable(prompts, config.prompts_per_step, seed=seed, shuffle=config.shuffle)


def _tokenised(rows: Sequence[PromptRow], config: DataConfig, tokenizer: Tokenizer) -> list[Prompt]:
    prompts, wrong = [], []
    for row in rows:
        try:
            prompt = _prompt(row, config, tokenizer)
        except ConfigError:
            raise
        except ValueError as error:
            wrong.append(f"{row.place}: {error}")
            continue
        if prompt.ids:
            prompts.append(prompt)
        else:
            wrong.append(f"{row.place}: the prompt has no tokens")
    refuse(wrong, "prompts cannot be tokenised")
    return prompts


def _prompt(row: PromptRow, config: DataConfig, tokenizer: Tokenizer) -> Prompt:
    if not isinstance(row.prompt, str):
        text = tokenizer.apply_template(row.prompt)
        return Prompt(row.prompt_id, text, tuple(tokenizer.encode_templated(text)), row.row, row.place)
    if config.template_strings:
        ids = tokenizer.encode_templated(tokenizer.apply_template([{"role": "user", "content": row.prompt}]))
    else:
        ids = tokenizer.encode_text(row.prompt)
    return Prompt(row.prompt_id, row.prompt, tuple(ids), row.row, row.place)


def _limited(prompts: list[Prompt], config: DataConfig, files: str) -> list[Prompt]:
    """`data.overlong` applied to prompts over `data.max_prompt_tokens`."""
    limit = config.max_prompt_tokens
    longer = [prompt for prompt in prompts if len(prompt.ids) > limit]
    if not longer:
        return prompts
    if config.overlong == "error":
        refuse(
            [
                f"{prompt.place}: the prompt has {len(prompt.ids)} tokens, data.max_prompt_tokens={limit}; raise the limit or choose "
                "data.overlong=drop or truncate_left"
                for prompt in longer
            ],
            "prompts are too long",
        )
    if config.overlong == "drop":
        kept = [prompt for prompt in prompts if len(prompt.ids) <= limit]
        log.warning("%s: kept %d prompts, dropped %d over %d tokens", files, len(kept), len(longer), limit)
        if not kept:
            raise ConfigError(
                f"{files}: data.overlong=drop leaves none of {len(prompts)} prompts, all are over data.max_prompt_tokens={limit}; the "
                f"shortest has {min(len(prompt.ids) for prompt in prompts)} tokens"
            )
        return kept
    log.warning("%s: cut %d of %d prompts on the left to %d tokens", files, len(longer), len(prompts), limit)
    # Cutting on the left keeps the end, where the template opens the assistant's turn.
    return [replace(prompt, ids=prompt.ids[-limit:]) for prompt in prompts]
