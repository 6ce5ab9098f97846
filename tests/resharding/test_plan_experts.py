"""Tables of models with experts: every element of the folder once, every element of a parameter once."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from plan_cases import MIXTRAL, MOE, held_by, needed_by
from test_plan import plan
from test_steps import keys_of

from flowrl.config.model_shape import ModelShape
from flowrl.resharding import families, latent
from flowrl.resharding.ranks import ParallelSizes
from flowrl.resharding.regions import disjoint, num_elements
from flowrl.resharding.shapes import SHAPES, LatentShape
from flowrl.resharding.steps import Regions, make_counts, make_steps

LAYOUTS = [(1, 1, 1), (2, 4, 1), (4, 2, 2), (1, 8, 1), (2, 1, 4)]


def stage(shape: ModelShape, tp: int, tp_rank: int, ep: int, ep_rank: int, etp: int, etp_rank: int):  # type: ignore[no-untyped-def]
    shard = families.ExpertShard(ep=ep, ep_rank=ep_rank, etp=etp, etp_rank=etp_rank)
    layers = range(shape.num_layers)
    return families.stage_parameters(shape, tp=tp, tp_rank=tp_rank, layers=layers, first=True, last=True, shard=shard)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [MOE, MIXTRAL])
def test_training_ranks_hold_every_element_of_the_folder(shape: ModelShape, layout: tuple[int, int, int]) -> None:
    tp, ep, etp = layout
    boxes: dict[str, list[tuple[tuple[int, int], ...]]] = {}
    for tp_rank, ep_rank, etp_rank in product(range(tp), range(ep), range(etp)):
        for parameter in stage(shape, tp, tp_rank, ep, ep_rank, etp, etp_rank):
            for piece in parameter.pieces:
                boxes.setdefault(piece.tensor, []).append(piece.source)
    sizes = {tensor.name: prod(tensor.shape) for tensor in families.hf_tensors(shape)}
    assert {name: sum(map(num_elements, disjoint(there))) for name, there in boxes.items()} == sizes
    assert sum(sizes.values()) == shape.num_parameters


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_fill_every_parameter_of_experts_once(layout: tuple[int, int, int]) -> None:
    tp, ep, etp = layout
    for parameter in stage(MOE, tp, tp - 1, ep, ep - 1, etp, etp - 1):
        if "word_embeddings" in parameter.name or "output_layer" in parameter.name:
            continue  # padded
        targets = [piece.target for piece in parameter.pieces]
        assert sum(map(num_elements, targets)) == sum(map(num_elements, disjoint(targets))) == prod(parameter.shape)
        assert all(num_elements(piece.source) == num_elements(piece.target) for piece in parameter.pieces)


def test_experts_are_numbered_over_the_whole_model() -> None:
    parameters = {parameter.name: parameter for parameter in stage(MOE, 1, 0, 4, 2, 1, 0)}
    first = parameters["decoder.layers.1.mlp.experts.local_experts.5.linear_fc1.weight"]
    assert [piece.tensor for piece in first.pieces] == [
        "model.layers.1.mlp.experts.5.gate_proj.weight",
        "model.layers.1.mlp.experts.5.up_proj.weight",
    ]
    assert parameters["decoder.layers.1.mlp.router.weight"].replicated
    mixtral = {parameter.name: parameter for parameter in stage(MIXTRAL, 1, 0, 1, 0, 1, 0)}
    second = mixtral["decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight"]
    assert second.pieces[0].tensor == "model.layers.0.block_sparse_moe.experts.3.w2.weight"


@pytest.mark.parametrize("layer", [0, 60])
def test_latent_attention_is_cut_by_heads_and_its_latents_are_everywhere(layer: int) -> None:
    shape = SHAPES["deepseek-v3"]
    assert isinstance(shape, LatentShape)
    found: dict[str, list[tuple[tuple[int, int], ...]]] = {}
    for rank in range(8):
        for parameter in latent.layer_parameters(shape, layer, tp=8, tp_rank=rank):
            found.setdefault(parameter.name, []).append(parameter.pieces[0].source)
    for tensor in latent.layer_tensors(shape, layer):
        cut = any(tensor.name.endswith(name) for name in latent.CUT)
        assert sum(map(num_elements, found[tensor.name])) == prod(tensor.shape) * (1 if cut else 8)
        assert sum(map(num_elements, disjoint(found[tensor.name]))) == prod(tensor.shape)


@pytest.mark.parametrize(
    ("train", "rollout"),
    [
        (ParallelSizes(ep=4), ParallelSizes(tp=2)),
        (ParallelSizes(tp=2, ep=4), ParallelSizes()),
        (ParallelSizes(ep=2, etp=2), ParallelSizes(tp=4, ep=4)),
    ],
)
def test_work_of_a_move_grows_in_proportion_to_the_number_of_experts(
    train: ParallelSizes, rollout: ParallelSizes
) -> None:
    """PAR-08: pieces of a plan, reads and writes of a rank and checksums, from 8 to 64 to 128 experts."""
    counted = []
    for experts in (8, 64, 128):
        shape = replace(MOE, num_experts=experts)
        made = plan(shape, 4, train, rollout)
        work = [0, 0, 0]
        for place in made.places:
            held = Regions(keys_of(held_by(shape, train, place)))
            kept = keys_of(needed_by(shape, rollout, place))
            steps = make_steps(made, place.rank, held, Regions(kept))
            slots = [len(step.packs) + len(step.relays) + len(step.installs) for step in steps.steps]
            work[0] += len(steps.copies) + sum(slots)
            work[1] += len(steps.steps)
            work[2] += len(make_counts(made, place.rank, held, kept).mine)
        assert sum(len(tuple(unit.pieces())) for unit in made.units) == work[2]
        counted.append(work)
    few, many, most = counted
    for small, middle, large in zip(few, many, most, strict=True):
        # The same number more for every further expert.
        assert (large - middle) * 56 == (middle - small) * 64
    assert few[1] == most[1] > 0, "buckets follow from bytes, not from tensors"
    assert most[0] < 16 * few[0]
