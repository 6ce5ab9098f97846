"""Generation without an engine: groups, cache sizes, sampling, prompts, environment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowrl.config.model_shape import ModelShape
from flowrl.config.schema import RolloutConfig, RolloutLayout
from flowrl.resharding.layouts import rollout_places
from flowrl.resharding.ranks import ParallelSizes
from flowrl.workers.environment import process_environment
from flowrl.workers.generation import (
    check_layout,
    check_prompts,
    engine_groups,
    engine_ranks,
    kv_cache,
    resolve_sampling,
)

SHAPE = ModelShape("LlamaForCausalLM", 3, 64, 128, 4, 2, 32, 131, False, 1e-6, 1e4, None, 64, False, False, None, (2,))
CONFIG = RolloutConfig(
    layout=RolloutLayout(tp=1, pp=1),
    dtype="float32",
    max_response_tokens=8,
    max_batch_requests=16,
    kv_cache_bytes=1 << 30,
)


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (2, 4)])
def test_every_rank_is_in_one_group_of_each_kind_and_ranks_ascend(layout: tuple[int, int]) -> None:
    tp, pp = layout
    places = rollout_places(8, ParallelSizes(tp=tp, pp=pp))
    groups = engine_groups(places)
    for lists, size in ((groups.tp_groups, tp), (groups.pp_groups, pp)):
        assert sorted(rank for ranks in lists for rank in ranks) == list(range(8))
        assert all(len(ranks) == size and ranks == sorted(ranks) for ranks in lists)
    for ranks in engine_ranks(places):
        inside = [group for group in (*groups.tp_groups, *groups.pp_groups) if set(group) & set(ranks)]
        assert all(set(group) <= set(ranks) for group in inside)


def test_a_layout_that_does_not_fit_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="3 ranks cannot hold engines of rollout.layout tp=2 x pp=1 = 2 ranks"):
        rollout_places(3, ParallelSizes(tp=2))
    with pytest.raises(ValueError, match="rollout.layout: tp=3 does not divide the model's 4 attention heads"):
        check_layout(SHAPE, RolloutLayout(tp=3, pp=1))
    with pytest.raises(ValueError, match="rollout.layout.pp=4 is more than the model's 3 layers"):
        check_layout(SHAPE, RolloutLayout(tp=1, pp=4))
    six = replace(SHAPE, heads=6, kv_heads=3, ffn_size=96, vocab_size=100)
    with pytest.raises(
        ValueError, match="rollout.layout.tp=3: the vocabulary of 128 rows .* cannot be cut into 3 parts"
    ):
        check_layout(six, RolloutLayout(tp=3, pp=1))


def test_cache_holds_what_the_requests_need_and_no_more() -> None:
    """CPU-03: the cache follows from prompt and response limits, not from the model's 32768 positions."""
    cache = kv_cache(replace(SHAPE, max_positions=32768), CONFIG, device="cpu", max_prompt_tokens=30)
    block = 2 * 32 * 3 * 2 * 32 * 4
    assert (cache.block_tokens, cache.num_blocks, cache.num_bytes) == (32, 16 * 2 + 1, 33 * block)
    halves = replace(CONFIG, layout=RolloutLayout(tp=2, pp=2))
    assert kv_cache(SHAPE, halves, device="cpu", max_prompt_tokens=30).num_bytes == 33 * block // 2 // 3 * 2


def test_a_cache_that_does_not_fit_states_needed_and_available() -> None:
    """CPU-03: both numbers, in terms of flowrl's own options."""
    block = 2 * 32 * 3 * 2 * 32 * 4
    small = replace(CONFIG, kv_cache_bytes=2 * block)
    with pytest.raises(ValueError, match=rf"rollout.kv_cache_bytes={2 * block} cannot hold .* needs {3 * block} bytes"):
        kv_cache(SHAPE, small, device="cpu", max_prompt_tokens=30)
    assert kv_cache(SHAPE, small, device="cpu", max_prompt_tokens=20).num_blocks == 2
    with pytest.raises(ValueError, match=rf"needs {33 * block} bytes and this machine has {block}"):
        kv_cache(SHAPE, CONFIG, device="cpu", max_prompt_tokens=30, memory_bytes=block)


def test_stop_set_is_the_union_of_all_lists() -> None:
    """MSK-03: tokenizer's, model's and configured ids, each once."""
    sampling = resolve_sampling(replace(CONFIG, stop_token_ids=(7, 2)), [2, 3], 120)
    assert sampling.stop_token_ids == (2, 3, 7)
    with pytest.raises(ValueError, match=r"stop ids \[130\] .* outside the 120 ids"):
        resolve_sampling(CONFIG, [2, 130], 120)


def test_truncation_is_known_and_a_top_k_over_the_vocabulary_is_off() -> None:
    """ROL-02: what the configuration does not ask for is off."""
    assert not resolve_sampling(CONFIG, [2], 120).truncates
    assert not resolve_sampling(replace(CONFIG, top_k=120), [2], 120).truncates
    assert resolve_sampling(replace(CONFIG, top_k=5), [2], 120).truncates
    assert resolve_sampling(replace(CONFIG, top_p=0.9), [2], 120).truncates


def test_illegal_prompts_are_named() -> None:
    check_prompts([[1], [1, 2, 130]], ["a", "b"], 3, 131)
    for prompt, message in (
        ([], "row b has 0 tokens; legal are 1 to data.max_prompt_tokens=3"),
        ([1] * 4, "row b has 4 tokens"),
        ([1, 131], "row b has ids 1 to 131; the model knows 0 to 130"),
    ):
        with pytest.raises(ValueError, match=message):
            check_prompts([[1], prompt], ["a", "b"], 3, 131)


def test_gpus_have_streams_of_high_priority_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TORCH_NCCL_HIGH_PRIORITY", "TRITON_F32_DEFAULT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    found = process_environment("cuda", 1, cpus=1)
    assert [found[name] for name in names] == ["1", "ieee"]
    monkeypatch.setenv(names[0], "0")
    assert process_environment("cuda", 1, cpus=1)[names[0]] == "0"
    assert not set(names) & process_environment("cpu", 1, cpus=1).keys()


def test_threads_of_all_processes_fit_the_machine() -> None:
    """CPU-03: threads are CPUs over processes, at least one."""
    assert process_environment("cpu", 2, cpus=8)["OMP_NUM_THREADS"] == "4"
    assert process_environment("cpu", 16, cpus=2)["OMP_NUM_THREADS"] == "1"
    assert process_environment("cuda", 1, cpus=32)["OMP_NUM_THREADS"] == "4"
    assert process_environment("cuda", 8, cpus=16)["OMP_NUM_THREADS"] == "2"
    with pytest.raises(ValueError, match="cluster.device='tpu'"):
        process_environment("tpu", 1)
