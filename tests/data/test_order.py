from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.order import StepOrder

SIZES = st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(SIZES, st.integers(0, 3), st.booleans())
def test_steps_have_no_prompt_twice_and_epochs_have_each_once(sizes: tuple[int, int], seed: int, shuffle: bool) -> None:
    size, per_step = sizes
    order = StepOrder(size, per_step, seed, shuffle)
    steps = [order.step(step).tolist() for step in range(1, 4 * size + 1)]
    assert all(len(set(step)) == per_step for step in steps)
    stream = [i for step in steps for i in step]
    for epoch in range(len(stream) // size):
        assert Counter(stream[epoch * size : (epoch + 1) * size]) == Counter(range(size))


@given(SIZES, st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_a_step_depends_on_its_number_alone(sizes: tuple[int, int], wanted: list[int]) -> None:
    used = StepOrder(*sizes, 5, True)
    for step in wanted:
        assert used.step(step).tolist() == StepOrder(*sizes, 5, True).step(step).tolist()


def test_order_follows_seed_and_epoch() -> None:
    steps = [StepOrder(50, 50, seed, True).step(step).tolist() for seed, step in ((0, 1), (0, 2), (1, 1))]
    assert len({tuple(step) for step in steps}) == 3
    assert StepOrder(5, 2, 0, False).step(3).tolist() == [4, 0]


def test_fewer_prompts_than_a_step_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="3 prompts are fewer than prompts_per_step=4"):
        StepOrder(3, 4, 0, True)
