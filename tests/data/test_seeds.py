from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.seeds import expand, sample_seeds
from flowrl.protocol import DataProto, Ragged

GOLDEN = [564816720, 430770353, 878665030]
NAMES = st.text(min_size=0, max_size=5)


@given(st.integers(0, 2**40), st.integers(0, 10**6), st.lists(st.tuples(NAMES, st.integers(0, 64)), max_size=5))
def test_seeds_are_int64_below_two_to_31(run_seed: int, step: int, rows: list[tuple[str, int]]) -> None:
    seeds = sample_seeds(run_seed, step, [name for name, _ in rows], [index for _, index in rows])
    assert seeds.dtype == torch.int64 and seeds.shape == (len(rows),)
    assert all(0 <= int(seed) < 2**31 for seed in seeds)


def test_seeds_are_the_same_on_every_machine() -> None:
    # A golden value: recorded runs can only be repeated while this hash stays as it is.
    assert sample_seeds(0, 1, ["a", "a", "b"], [0, 1, 0]).tolist() == GOLDEN


def test_every_part_of_the_name_changes_the_seed() -> None:
    names = [(s, t, p, i) for s in (0, 1, 11) for t in (0, 1, 11) for p in ("", "1", "11", "1/1") for i in (0, 1, 11)]
    seeds = {int(sample_seeds(s, t, [p], [i])) for s, t, p, i in names}
    assert len(seeds) == len(names)


def test_expanding_repeats_each_prompt_with_seeds_of_its_own() -> None:
    prompts = DataProto(
        {"prompt_ids": Ragged.from_rows([[1], [2, 3]], dtype=torch.int64)},
        values={"prompt_id": ["x", "y"]},
        row_ids=["4:x", "4:y"],
    )
    rows = expand(prompts, 3, run_seed=7, step=4)
    assert rows.values["prompt_id"] == ["x"] * 3 + ["y"] * 3
    assert rows.row_ids == ("4:x/0", "4:x/1", "4:x/2", "4:y/0", "4:y/1", "4:y/2")
    assert len(set(rows["seeds"].tolist())) == 6
    # A sample's seed does not depend on the other prompts of the batch.
    assert (
        expand(prompts.reorder([1, 0]), 3, 7, 4)["seeds"].tolist()
        == rows["seeds"].tolist()[3:] + rows["seeds"].tolist()[:3]
    )
