"""What the training benchmark counts."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from flowrl.resharding.shapes import SHAPES
from flowrl.workers.attention import prepare
from flowrl.workers.measured_training import (
    CASES,
    TrainingJob,
    active_parameters,
    forward_flops,
    make_rows,
    row_lengths,
)

TINY = SHAPES["llama-tiny"]
JOB = TrainingJob("", TINY, "float32", "cpu", tokens=64, rows=4, microbatches=2, repeat=1, recompute=False, seed=0)


@given(st.integers(2, 200), st.integers(1, 8), st.integers(1, 4), st.integers(0, 50))
def test_every_case_has_the_same_number_of_tokens(tokens: int, rows: int, microbatches: int, seed: int) -> None:
    job = replace(JOB, tokens=tokens, rows=rows, microbatches=microbatches, seed=seed)
    for case in CASES:
        lengths = row_lengths(job, case)
        assert sum(lengths) == tokens * rows * microbatches and min(lengths) >= 2
    assert len(set(row_lengths(job, CASES[0]))) == 1


def test_rows_are_one_prompt_token_and_a_response_each() -> None:
    batch = make_rows([5, 2, 9], TINY.vocab_size, 0)
    assert batch.lengths("prompt_ids").tolist() == [1, 1, 1]
    assert batch.lengths("response_ids").tolist() == batch.lengths("advantages").tolist() == [4, 1, 8]


def test_an_embedding_counts_only_where_it_is_the_head_and_idle_experts_do_not() -> None:
    assert active_parameters(TINY) == TINY.num_parameters - TINY.vocab_size * TINY.hidden_size
    tied = replace(TINY, tied=True)
    assert active_parameters(tied) == tied.num_parameters
    mixture = SHAPES["qwen3-moe-tiny"]
    one, two = (active_parameters(replace(mixture, experts_per_token=count)) for count in (1, 2))
    assert two - one == mixture.num_layers * 3 * mixture.hidden_size * mixture.expert_ffn_size


def test_flops_are_those_that_torch_counts_in_a_layer() -> None:
    """Matrix products of projections, feed-forward part, head and, half of it being masked, attention."""
    tokens, one = 32, replace(TINY, num_layers=1)
    wide, inner = one.heads * one.head_dim, one.kv_heads * one.head_dim
    hidden = torch.randn(tokens, one.hidden_size)
    with FlopCounterMode(display=False) as counted:
        q = (hidden @ torch.randn(one.hidden_size, wide)).view(tokens, one.heads, one.head_dim)
        k, v = ((hidden @ torch.randn(one.hidden_size, inner)).view(tokens, one.kv_heads, -1) for _ in range(2))
        q, k, v = prepare(q, k, v, torch.ones(tokens, 1, one.head_dim // 2), torch.zeros(tokens, 1, one.head_dim // 2))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        whole = counted.get_total_flops()
        out = torch.bmm(torch.bmm(q, k.transpose(1, 2)), v).transpose(0, 1).reshape(tokens, wide)
        masked = (counted.get_total_flops() - whole) // 2
        out = out @ torch.randn(wide, one.hidden_size)
        inside = (out @ torch.randn(one.hidden_size, 2 * one.ffn_size))[:, : one.ffn_size]
        inside @ torch.randn(one.ffn_size, one.hidden_size) @ torch.randn(one.hidden_size, one.vocab_size)
    norms = 2 * 3 * one.hidden_size * tokens
    assert forward_flops(one, [tokens]) == counted.get_total_flops() - masked + norms
