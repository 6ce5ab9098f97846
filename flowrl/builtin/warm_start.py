"""Makes the tiny model's folder: new weights, the supervised warm start, and a Hugging Face export."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flowrl.builtin.arithmetic import ANSWER_DIGITS, PROMPT_TOKENS, eval_rows, train_rows
from flowrl.builtin.recipe import EOS_ID, PAD_ID, VOCABULARY, TinyRecipe
from flowrl.builtin.tokenizer import make_tokenizer

Progress = Callable[[float, str], None]


def make_tiny(folder: Path, recipe: TinyRecipe, progress: Progress) -> None:
    """Writes model, tokenizer, generation config and `warm_start.json` (how often it is right) into `folder`.

    The same recipe gives the same weights on one kind of processor: every random number comes from a generator of its
    own, and one thread computes, so that the number of cores does not change the order of sums.
    """
    with _single_thread():
        model = _new_model(recipe)
        generator = torch.Generator().manual_seed(recipe.seed)
        _train(model, recipe, generator, progress)
        facts = {
            "greedy": accuracy(model, encode(eval_rows()), None),
            "sampled": accuracy(model, encode(eval_rows()).repeat(16, 1), generator),
        }
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "warm_start.json").write_text(json.dumps(facts) + "\n")


def encode(rows: list[dict[str, str]]) -> torch.Tensor:
    """Token ids [N, 9] int64 of prompt, answer and end."""
    texts = [row["prompt"] + row["answer"] for row in rows]
    return torch.tensor([[VOCABULARY.index(character) for character in text] + [EOS_ID] for text in texts])


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, ids: torch.Tensor, generator: torch.Generator | None) -> float:
    """Share of right answers to the problems `ids` [N, 9], the end token included: sampled at temperature 1 with
    `generator`, greedy without."""
    sequence = ids[:, :PROMPT_TOKENS]
    while sequence.shape[1] < ids.shape[1]:
        logits = model(input_ids=sequence, use_cache=False).logits[:, -1]
        if generator is None:
            following = logits.argmax(dim=-1, keepdim=True)
        else:
            following = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        sequence = torch.cat([sequence, following], dim=1)
    return float((sequence == ids).all(dim=1).float().mean())


def spoil(ids: torch.Tensor, recipe: TinyRecipe, generator: torch.Generator) -> torch.Tensor:
    """`ids` [N, 9] with, on average, `recipe.wrong_share` of the answers replaced by a near miss of three digits."""
    rows = ids.shape[0]
    wrong = torch.rand(rows, generator=generator) < recipe.wrong_share
    offset = torch.randint(1, recipe.max_offset + 1, (rows,), generator=generator)
    sign = torch.randint(0, 2, (rows,), generator=generator) * 2 - 1
    zero = VOCABULARY.index("0")
    place = torch.tensor([10**i for i in reversed(range(ANSWER_DIGITS))])
    answer = slice(PROMPT_TOKENS, PROMPT_TOKENS + ANSWER_DIGITS)
    missed = ((ids[:, answer] - zero) * place).sum(dim=1) + offset * sign
    spoilt = ids.clone()
    spoilt[:, answer] = torch.where(wrong[:, None], missed[:, None] // place % 10 + zero, ids[:, answer])
    return spoilt


def _train(model: LlamaForCausalLM, recipe: TinyRecipe, generator: torch.Generator, progress: Progress) -> None:
    problems = encode(train_rows())
    total = recipe.clean_steps + recipe.spoilt_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.clean_lr, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.clean_lr, total_steps=recipe.clean_steps)
    for step in range(recipe.clean_steps):
        _step(model, optimizer, _draw(problems, recipe, generator))
        schedule.step()
        _report(progress, step, total, "learning to add")
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.spoilt_lr, weight_decay=0.0, fused=True)
    for step in range(recipe.clean_steps, total):
        _step(model, optimizer, spoil(_draw(problems, recipe, generator), recipe, generator))
        _report(progress, step, total, "unlearning to be sure")
    progress(1.0, "builtin:tiny is made")


def _draw(problems: torch.Tensor, recipe: TinyRecipe, generator: torch.Generator) -> torch.Tensor:
    return problems[torch.randint(len(problems), (recipe.rows_per_step,), generator=generator)]


def _step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    """One optimizer step on `ids` [N, 9]; the loss is the mean over answer and end tokens."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, PROMPT_TOKENS - 1 :]
    targets = ids[:, PROMPT_TOKENS:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _report(progress: Progress, step: int, total: int, phase: str) -> None:
    if step % 10 == 0:
        progress(step / total, f"builtin:tiny, made once: {phase}")


def _new_model(recipe: TinyRecipe) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.ffn_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        dtype="float32",
    )
    generator = torch.Generator().manual_seed(recipe.seed)
    # The constructor draws from the global generator, whose state belongs to the caller.
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config).float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, recipe.init_std, generator=generator)
    return model


@contextmanager
def _single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
