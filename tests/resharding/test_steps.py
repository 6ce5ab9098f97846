"""Reads and writes of a move, carried out on numbered elements without processes, against both sides' tables."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import DENSE, TIED, held_by, index, needed_by, trained_by
from test_plan import MODELS, SHAPE_OF_TENSORS, cases, plan

from flowrl.resharding.copies import copy_all, in_place, pair_up
from flowrl.resharding.families import Box
from flowrl.resharding.plan import MovePlan
from flowrl.resharding.ranks import ParallelSizes
from flowrl.resharding.regions import num_elements
from flowrl.resharding.steps import Regions, Steps, check_sides, make_counts, make_steps

Keys = list[tuple[str, Box]]


def keys_of(boxes: dict[str, list[Box]]) -> Keys:
    return [(name, box) for name, there in boxes.items() for box in there]


def numbered(name: str) -> dict[str, torch.Tensor]:
    """Tensors of a model with a value of its own in every element."""
    tensors, first = {}, 1
    for tensor, shape in SHAPE_OF_TENSORS[name].items():
        count = torch.Size(shape).numel()
        tensors[tensor] = torch.arange(first, first + count).view(shape)
        first += count
    return tensors


def carry_out(
    made: MovePlan, steps: list[Steps], held: Sequence[list[torch.Tensor]], kept: list[list[torch.Tensor]]
) -> None:
    """Bucket after bucket, with lists in place of a transport."""
    for rank, there in enumerate(steps):
        for copy in there.copies:
            kept[rank][copy.region][copy.target] = held[rank][copy.held][copy.source]
    for stage in made.stages:
        sent: dict[tuple[int, int, int], torch.Tensor] = {}
        buffers: dict[tuple[int, int], torch.Tensor] = {}
        mine = [(rank, step) for rank, there in enumerate(steps) for step in there.steps if step.stage == stage.name]
        for rank, step in mine:
            assert step.group[step.place] == rank
            incoming = buffers[rank, step.number] = torch.zeros(sum(step.incoming), dtype=torch.int64)
            buffer = incoming if step.to_all else torch.zeros(sum(step.outgoing), dtype=torch.int64)
            packs = (*pair_up(step.packs, held[rank]), *pair_up(step.relays, kept[rank]))
            copy_all([pair.of(buffer) for pair in packs], [pair.view for pair in packs])
            own = buffer[step.first_sent : step.first_sent + step.sent]
            assert (own > 0).all(), "a part of the buffer was not packed"
            if (memory := in_place(packs, step.first_sent, step.sent, torch.int64)) is not None:
                assert torch.equal(memory, own)
            parts = [own] * len(step.group) if step.to_all else own.split(step.outgoing)
            for peer, values in zip(step.group, parts, strict=True):
                sent[rank, peer, step.number] = values
        for rank, step in mine:
            parts = [sent[peer, rank, step.number] for peer in step.group]
            assert tuple(map(len, parts)) == step.incoming
            buffers[rank, step.number].copy_(torch.cat(parts))
            installs = pair_up(step.installs, kept[rank])
            copy_all([pair.view for pair in installs], [pair.of(buffers[rank, step.number]) for pair in installs])


@given(cases(), st.sampled_from((200, 2000, 10**9)))
@settings(max_examples=25, deadline=None)
def test_every_element_arrives_at_its_place(
    case: tuple[str, int, ParallelSizes, ParallelSizes], bucket_bytes: int
) -> None:
    """PAR-04, PAR-05, PAR-07, PAR-08: layouts of up to 48 ranks, dense, tied and with experts."""
    name, world, train, rollout = case
    shape, tensors = MODELS[name], numbered(name)
    made = plan(shape, world, train, rollout, bucket_bytes=bucket_bytes)
    held_keys, held = zip(*(trained_by(shape, train, place, tensors) for place in made.places), strict=True)
    kept_keys = [keys_of(needed_by(shape, rollout, place)) for place in made.places]
    sides = [(Regions(here), Regions(there)) for here, there in zip(held_keys, kept_keys, strict=True)]
    for rank, (here, there) in enumerate(sides):
        check_sides(made, rank, here, there)
    kept = [[torch.zeros_like(tensors[tensor][index(box)]) for tensor, box in keys] for keys in kept_keys]
    carry_out(made, [make_steps(made, rank, *there) for rank, there in enumerate(sides)], held, kept)
    for keys, found in zip(kept_keys, kept, strict=True):
        for (tensor, box), values in zip(keys, found, strict=True):
            assert torch.equal(values, tensors[tensor][index(box)]), (tensor, box)


@given(cases())
@settings(max_examples=20, deadline=None)
def test_every_element_is_counted_once_and_every_region_is_compared(
    case: tuple[str, int, ParallelSizes, ParallelSizes],
) -> None:
    """SYN-01: sums stand in for checksums."""
    name, world, train, rollout = case
    shape, tensors = MODELS[name], numbered(name)
    made = plan(shape, world, train, rollout)
    kept_keys = [keys_of(needed_by(shape, rollout, place)) for place in made.places]
    counts = []
    for place, keys in zip(made.places, kept_keys, strict=True):
        here = Regions(keys_of(held_by(shape, train, place)))
        counts.append(make_counts(made, place.rank, here, keys))
    cells = torch.zeros(counts[0].cells, dtype=torch.int64)
    names = [tensor for unit in made.units for _, tensor, _ in unit.pieces()]
    for count in (count for there in counts for count in there.mine):
        cells[count.cell] += tensors[names[count.cell]][index(count.box)].sum()
    assert cells.sum() == sum(tensor.sum() for tensor in tensors.values())
    for keys, there in zip(kept_keys, counts, strict=True):
        for (tensor, box), found in zip(keys, there.sums, strict=True):
            assert cells[list(found)].sum() == tensors[tensor][index(box)].sum()


def test_sides_that_differ_from_the_plan_are_an_error_that_names_tensor_and_rank() -> None:
    train, rollout = ParallelSizes(tp=2), ParallelSizes()
    made = plan(DENSE, 2, train, rollout)
    held, kept = held_by(DENSE, train, made.places[1]), needed_by(DENSE, rollout, made.places[1])
    check_sides(made, 1, Regions(keys_of(held)), Regions(keys_of(kept)))
    name = "model.layers.3.mlp.up_proj.weight"
    for side in (held, kept):
        whole, side[name] = side[name], [((0, 1), (0, 6))]
        with pytest.raises(ValueError, match=rf"no move can be planned .* rank 1's .* of {name}, where"):
            check_sides(made, 1, Regions(keys_of(held)), Regions(keys_of(kept)))
        side[name] = whole


def test_a_piece_held_twice_is_read_once() -> None:
    twice = Regions([("w", ((0, 3),)), ("w", ((2, 5),)), ("w", ((0, 3),))])
    found = [common for _, _, common in twice.once_in("w", ((1, 5),))]
    assert sum(map(num_elements, found)) == 4 and found == [((1, 3),), ((3, 5),)]
    assert [number for number, _, _ in twice.all_in("w", ((0, 1),))] == [0, 2]


def test_a_region_smaller_than_what_moves_as_one_cannot_be_proven() -> None:
    made = plan(TIED, 2, ParallelSizes(), ParallelSizes())
    here = Regions(keys_of(held_by(TIED, ParallelSizes(), made.places[0])))
    with pytest.raises(ValueError, match="model.norm.weight apart"):
        make_counts(made, 0, here, [("model.norm.weight", ((0, 1),))])
