"""Copies between buckets and memory: few, and none where a bucket is a slice of the trainer's continuous buffer."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import DENSE, MOE, needed_by, trained_by
from test_plan import WIDE, plan
from test_steps import keys_of

from flowrl.config.model_shape import ModelShape
from flowrl.resharding import families, prepare
from flowrl.resharding.buffer import hold_together
from flowrl.resharding.copies import Pair, copy_all, in_place, pair_up, shares
from flowrl.resharding.layouts import Layouts
from flowrl.resharding.ranks import ParallelSizes, numbering
from flowrl.resharding.steps import Regions, Slot, Step, make_steps


def test_held_together_parameters_keep_their_values_and_lie_in_reverse_order_experts_apart() -> None:
    names = ("embedding", "mlp.router", "mlp.experts.0.up", "mlp.experts.1.up", "norm")
    values = {name: torch.randn(number + 2, 3) for number, name in enumerate(names)}
    values["norm"] = values["norm"].to(torch.bfloat16)
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
    buffers = hold_together(parameters)
    assert all(torch.equal(parameters[name], value) for name, value in values.items())
    expected = [["norm"], ["mlp.experts.1.up", "mlp.experts.0.up"], ["mlp.router", "embedding"]]
    assert [len(buffer) for buffer in buffers] == [sum(values[name].numel() for name in there) for there in expected]
    for buffer, there in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, torch.cat([values[name].flatten() for name in there]))
        buffer.zero_()
    assert not any(parameter.any() for parameter in parameters.values()), "parameters are views of the buffers"


@st.composite
def cut_memory(draw: st.DrawFn) -> tuple[list[Slot], list[torch.Tensor], int]:
    """Regions of rows of a few matrices, wanted one after another in a buffer, in any order."""
    width, memory = draw(st.integers(1, 3)), torch.arange(1, 200)
    places = [memory[start : start + 12 * width].view(12, width) for start in draw(st.permutations((0, 36, 72)))]
    slots, offset = [], 0
    for _ in range(draw(st.integers(1, 8))):
        region, first = draw(st.integers(0, 2)), draw(st.integers(0, 11))
        last, column = draw(st.integers(first + 1, 12)), draw(st.integers(0, width - 1))
        rows, columns = last - first, slice(draw(st.sampled_from((0, column))), width)
        shape = (rows, width - columns.start)
        inside = tuple(slice(0, length) for length in shape)
        slots.append(Slot(offset, shape, inside, region, (slice(first, last), columns)))
        offset += shape[0] * shape[1]
    return slots, places, offset


@given(cut_memory())
@settings(max_examples=150, deadline=None)
def test_merged_copies_do_what_slot_by_slot_would_in_the_fewest_runs(
    case: tuple[list[Slot], list[torch.Tensor], int],
) -> None:
    slots, places, size = case
    expected = torch.cat([places[slot.region][slot.there].flatten() for slot in slots])
    pairs, buffer = pair_up(slots, places), torch.zeros(size, dtype=torch.int64)
    copy_all([pair.of(buffer) for pair in pairs], [pair.view for pair in pairs])
    assert torch.equal(buffer, expected)
    linear = [pair for pair in pairs if pair.view.is_contiguous()]
    assert not any(goes_on(a, b) for a, b in pairwise(pairs) if a in linear and b in linear)
    one_run = bool((expected.diff() == 1).all())
    memory = in_place(pairs, 0, size, torch.int64)
    assert (memory is not None) == (one_run and len(pairs) == 1)
    assert memory is None or torch.equal(memory, expected)
    assert in_place(pairs, 0, size, torch.float32) is None and in_place(pairs, 0, size + 1, torch.int64) is None


def goes_on(a: Pair, b: Pair) -> bool:
    there = a.view.storage_offset() + a.view.numel() == b.view.storage_offset()
    return there and a.offset + a.view.numel() == b.offset


EVEN_MOE = replace(MOE, vocab_size=640, num_layers=4, kv_heads=8)


def sends(
    shape: ModelShape, world: int, train: ParallelSizes, rollout: ParallelSizes, bucket_bytes: int
) -> list[tuple[Step, tuple[Pair, ...]]]:
    """Every step in which a rank sends something, with the copies that packing it takes."""
    made = plan(shape, world, train, rollout, bucket_bytes=bucket_bytes)
    tensors = {tensor.name: torch.ones(tensor.shape) for tensor in families.hf_tensors(shape)}
    found = []
    for place in made.places:
        keys, views = trained_by(shape, train, place, tensors)
        steps = make_steps(made, place.rank, Regions(keys), Regions(keys_of(needed_by(shape, rollout, place)))).steps
        found += [(step, pair_up(step.packs, views)) for step in steps if step.packs and not step.relays]
    return found


@pytest.mark.parametrize("bucket_bytes", [4000, 10**9])
@pytest.mark.parametrize(
    ("shape", "world", "train", "rollout"),
    [
        (WIDE, 4, ParallelSizes(pp=4), ParallelSizes()),
        (WIDE, 8, ParallelSizes(tp=2, pp=4), ParallelSizes(tp=2, pp=2)),
        (replace(WIDE, qkv_bias=True), 2, ParallelSizes(pp=2), ParallelSizes()),
        (replace(WIDE, kv_heads=4), 8, ParallelSizes(tp=4, pp=2), ParallelSizes(tp=4)),
        (EVEN_MOE, 4, ParallelSizes(ep=4), ParallelSizes()),
        (EVEN_MOE, 8, ParallelSizes(ep=2, pp=4), ParallelSizes(tp=1, pp=4)),
    ],
    ids=["pp4", "tp2pp4", "biases", "heads", "ep4", "ep2pp4"],
)
def test_whole_parameters_are_sent_from_the_buffer_itself(
    shape: ModelShape, world: int, train: ParallelSizes, rollout: ParallelSizes, bucket_bytes: int
) -> None:
    """Pipeline stages at equal tensor-parallel size, and whole experts: nothing is packed, wherever buckets are cut."""
    found = sends(shape, world, train, rollout, bucket_bytes)
    assert found
    for step, pairs in found:
        assert in_place(pairs, step.first_sent, step.sent, torch.float32) is not None, step


def test_slices_of_several_layers_are_packed_in_two_runs_a_layer() -> None:
    """Between them lie norms, which all tensor-parallel ranks hold and nobody sends; head and embedding are two more."""
    found = sends(WIDE, 2, ParallelSizes(tp=2), ParallelSizes(), 10**9)
    assert [len(pairs) for _, pairs in found] == [2 * WIDE.num_layers + 2] * 2


def test_padding_of_the_vocabulary_is_not_sent() -> None:
    """Head and final norm have padding between them: two copies, and every element of them is real."""
    (last,) = [pairs for step, pairs in sends(DENSE, 2, ParallelSizes(pp=2), ParallelSizes(), 10**9) if step.place == 1]
    assert last[0].size == (131, DENSE.hidden_size) and len(last) == 2


def test_a_second_transfer_of_the_same_layouts_plans_nothing() -> None:
    train, rollout = ParallelSizes(tp=2), ParallelSizes()
    layouts = Layouts(train, rollout, tuple(numbering(2, train, rollout)))
    shape = replace(DENSE, rope_scaling={"rope_type": "linear", "factor": 2.0})
    tensors = {tensor.name: torch.ones(tensor.shape) for tensor in families.hf_tensors(shape)}
    keys, _ = trained_by(shape, train, layouts.places[0], tensors)
    kept = tuple(keys_of(needed_by(shape, rollout, layouts.places[0])))

    def prepared(bucket_bytes: int) -> prepare.Prepared:
        return prepare.prepare(shape, layouts, 0, tuple(keys), kept, element_bytes=2, bucket_bytes=bucket_bytes)

    before = prepare._prepare.cache_info()
    first = prepared(1 << 20)
    assert prepared(1 << 20) is first and prepared(1 << 21) is not first
    after = prepare._prepare.cache_info()
    assert (after.misses - before.misses, after.hits - before.hits) == (2, 1)


@pytest.mark.parametrize(
    ("sizes", "number", "expected"),
    [
        ((4, 4, 4, 4), 2, [2, 2]),
        ((8, 1, 1, 1, 1, 4), 2, [1, 5]),
        ((1, 1), 4, [1, 0, 1, 0]),
        ((), 3, [0, 0, 0]),
        ((0, 5, 0), 2, [2, 1]),
        ((0,), 1, [1]),
    ],
)
def test_copies_are_shared_out_by_bytes_in_their_order(
    sizes: tuple[int, ...], number: int, expected: list[int]
) -> None:
    pairs = [(torch.empty(size), torch.empty(size)) for size in sizes]
    found = shares(pairs, number)
    assert [len(share) for share in found] == expected
    assert [id(target) for share in found for target, _ in share] == [id(target) for target, _ in pairs]
