"""Plans of moves: every rank receives exactly what it lacks, each byte enters a node once, buckets stay small."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import DENSE, MIXTRAL, MOE, TIED, held_by, masks, needed_by, replay

from flowrl.config.model_shape import ModelShape
from flowrl.resharding import families
from flowrl.resharding.needs import rank_needs, stage_layers
from flowrl.resharding.plan import MovePlan, choose_order, plan_move
from flowrl.resharding.plan.tables import train_stage_layers
from flowrl.resharding.ranks import ParallelSizes, disaggregated, groups, numbering
from flowrl.resharding.regions import bound_bytes, disjoint, num_elements
from flowrl.resharding.shapes import SHAPES

SHAPE_OF_TENSORS = {
    name: {tensor.name: tensor.shape for tensor in families.hf_tensors(shape)}
    for name, shape in (("dense", DENSE), ("tied", TIED), ("moe", MOE), ("mixtral", MIXTRAL))
}
MODELS = {"dense": DENSE, "tied": TIED, "moe": MOE, "mixtral": MIXTRAL}


def plan(shape: ModelShape, world: int, train: ParallelSizes, rollout: ParallelSizes, **options: int) -> MovePlan:
    order = choose_order(shape, world, train, rollout, gpus_per_node=options.get("gpus_per_node", 8)).chosen.order
    return plan_move(shape, train, rollout, numbering(world, train, rollout, order), **options)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, ParallelSizes, ParallelSizes]:
    name = draw(st.sampled_from(list(MODELS)))
    shape, size = MODELS[name], st.sampled_from((1, 2, 4))
    train = ParallelSizes(tp=draw(size), pp=draw(st.sampled_from((1, 2, 3))), cp=draw(st.sampled_from((1, 1, 2))))
    rollout = ParallelSizes(tp=draw(size), pp=draw(st.sampled_from((1, 2, 3))))
    if shape.num_experts:
        train = replace(train, ep=draw(size), etp=draw(st.sampled_from((1, 1, 2))))
        rollout = replace(rollout, ep=draw(st.sampled_from((1, rollout.tp))))
    elif name == "tied":
        train = replace(train, first_stage_layers=draw(st.sampled_from((None, 1))) if train.pp == 3 else None)
    elif train.pp == 2:
        train = replace(train, vpp=draw(st.sampled_from((1, 2))))
    world = draw(st.sampled_from([world for world in (4, 6, 8, 12, 16, 24) if divides(world, train, rollout)] or [48]))
    return name, world, train, rollout


def divides(world: int, train: ParallelSizes, rollout: ParallelSizes) -> bool:
    parts = (train.tp * train.cp * train.pp, train.ep * train.etp * train.pp, rollout.tp * rollout.pp)
    return all(world % part == 0 for part in parts)


@given(cases(), st.sampled_from((2, 3, 8)), st.sampled_from((200, 2000, 10**9)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_element_that_a_rank_lacks_arrives_once_and_nothing_else_does(
    case: tuple[str, int, ParallelSizes, ParallelSizes], gpus_per_node: int, bucket_bytes: int, apart: bool
) -> None:
    """Replayed element by element, against boxes taken straight from both sides' tables."""
    name, world, train, rollout = case
    shape = MODELS[name]
    options = dict(gpus_per_node=gpus_per_node, bucket_bytes=bucket_bytes, element_bytes=4)
    if apart:
        places = disaggregated(world, rollout.tp * rollout.pp, train, rollout)
        made = plan_move(shape, train, rollout, places, **options)
    else:
        made = plan(shape, world, train, rollout, **options)
    held = [held_by(shape, train, place) for place in made.places]
    needed = [needed_by(shape, rollout, place) for place in made.places]
    received = replay(made, SHAPE_OF_TENSORS[name], held, needed)
    exact = [bound_bytes(need, have, 4) for need, have in zip(needed, held, strict=True)]
    assert list(made.bound) == exact == [4 * elements for elements in received] == list(made.received)
    assert made.imported == sum(made.import_bound) == node_imports(name, made, held, needed)
    for rank in range(made.world):
        assert sizes(made.needed(rank)) == sizes(needed[rank])


def sizes(boxes: dict[str, list[families.Box]]) -> dict[str, int]:
    return {name: sum(map(num_elements, disjoint(there))) for name, there in boxes.items()}


def node_imports(
    name: str, made: MovePlan, held: list[dict[str, list[families.Box]]], needed: list[dict[str, list[families.Box]]]
) -> int:
    """Bytes of what the ranks of a node need together and do not hold together, over all nodes."""
    total = 0
    for first in range(0, made.world, made.gpus_per_node):
        there = range(first, min(first + made.gpus_per_node, made.world))
        have, need = ([masks(boxes[rank], SHAPE_OF_TENSORS[name]) for rank in there] for boxes in (held, needed))
        for tensor in SHAPE_OF_TENSORS[name]:
            lacks = sum(mask[tensor] for mask in need).astype(bool) & ~sum(mask[tensor] for mask in have).astype(bool)
            total += int(lacks.sum()) * made.element_bytes
    return total


WIDE = replace(
    DENSE, num_layers=8, hidden_size=16, ffn_size=64, heads=16, kv_heads=16, head_dim=2, vocab_size=640, qkv_bias=False
)
"""As many key/value heads as ranks, a vocabulary without padding, layers that divide: formulas are exact."""


def formula_layouts() -> list[tuple[int, ParallelSizes, ParallelSizes]]:
    sizes = [ParallelSizes(tp=tp, pp=pp) for tp, pp in product((1, 2, 4, 8, 16), (1, 2, 4, 8))]
    return [
        (world, train, rollout)
        for world in (1, 2, 4, 8, 16, 32, 64)
        for train, rollout in product(sizes, sizes)
        if divides(world, train, rollout)
    ]


def test_bytes_equal_the_formulas_over_all_layouts() -> None:
    """Mean over ranks: M (1 / t'p' - 1 / max(t,t') max(p,p')) of what is split, M (1 / p' - 1 / max(p,p')) of norms."""
    layouts = formula_layouts()
    assert len(layouts) >= 500
    norms = (2 * WIDE.hidden_size + 2 * WIDE.head_dim) * WIDE.num_layers + WIDE.hidden_size
    split = WIDE.num_parameters - norms
    for world, train, rollout in layouts:
        made = plan_move(WIDE, train, rollout, numbering(world, train, rollout), gpus_per_node=4)
        t, p = max(train.tp, rollout.tp), max(train.pp, rollout.pp)
        mean = split * (Fraction(1, rollout.tp * rollout.pp) - Fraction(1, t * p))
        mean += norms * (Fraction(1, rollout.pp) - Fraction(1, p))
        assert Fraction(sum(made.bound), 2 * world) == mean, (world, train, rollout)
        assert made.received == made.bound
        assert made.imported == sum(made.import_bound)
        if rollout.pp >= train.pp and (rollout.tp >= train.tp):
            assert not made.stages, "a larger generation layout is a local slice"
        if rollout.tp <= train.tp and rollout.pp <= train.pp:
            names = [stage.name for stage in made.stages]
            assert ("pp" in names) == (rollout.pp < train.pp) and ("tp" in names) == (rollout.tp < train.tp)


def test_stages_split_the_bytes_as_the_theory_says() -> None:
    """pp brings M/t (1 - 1/p) inside pipeline groups, tp M (1/t' - 1/t) inside micro data-parallel groups."""
    train, rollout = ParallelSizes(tp=4, pp=2), ParallelSizes(tp=2)
    made = plan_move(WIDE, train, rollout, numbering(8, train, rollout))
    pp, tp = made.stages
    assert (pp.name, pp.forms, [group.ranks for group in pp.groups]) == (
        "pp",
        ("all_gather",),
        [(0, 4), (1, 5), (2, 6), (3, 7)],
    )
    assert (tp.name, tp.forms, [group.ranks for group in tp.groups]) == (
        "tp",
        ("all_gather",),
        [(0, 1), (2, 3), (4, 5), (6, 7)],
    )
    model = 2 * WIDE.num_parameters
    assert sum(pp.received) / 8 == pytest.approx(model / 4 * (1 - 1 / 2), rel=0.02)
    assert sum(tp.received) / 8 == pytest.approx(model * (1 / 2 - 1 / 4), rel=0.02)
    assert max(pp.sent) < 1.2 * max(pp.received) and max(tp.sent) < 1.2 * max(tp.received)


@pytest.mark.parametrize(
    ("world", "train", "rollout", "forms"),
    [
        (128, ParallelSizes(tp=8, pp=4), ParallelSizes(tp=4), {"pp": "all_gather", "tp": "all_gather"}),
        (128, ParallelSizes(tp=8, pp=4), ParallelSizes(tp=2), {"pp": "all_gather", "tp": "all_gather"}),
        (128, ParallelSizes(tp=8, pp=4), ParallelSizes(tp=8), {"pp": "all_gather"}),
        (128, ParallelSizes(tp=8, pp=4), ParallelSizes(tp=8, pp=2), {"pp": "all_gather"}),
        (128, ParallelSizes(tp=8, pp=4), ParallelSizes(tp=4, pp=4), {"tp": "all_gather"}),
        (32, ParallelSizes(tp=8, pp=4), ParallelSizes(), {"pp": "all_gather", "tp": "all_gather"}),
    ],
)
def test_what_goes_to_all_others_is_gathered(
    world: int, train: ParallelSizes, rollout: ParallelSizes, forms: dict[str, str]
) -> None:
    """Nested dense layouts: norms, which any tensor-parallel rank could import, make no stage irregular."""
    made = plan_move(SHAPES["llama-70b"], train, rollout, numbering(world, train, rollout))
    found = {stage.name: stage.forms for stage in made.stages if stage.name != "node"}
    assert found == {name: (form,) for name, form in forms.items()}


@pytest.mark.parametrize(
    ("rollout", "form", "size"),
    [
        (ParallelSizes(), "all_gather", 8),
        (ParallelSizes(tp=4), "all_to_all", 8),
        (ParallelSizes(tp=4, ep=4), "all_gather", 2),
    ],
)
def test_experts_are_gathered_only_among_ranks_that_want_every_one_whole(
    rollout: ParallelSizes, form: str, size: int
) -> None:
    """PAR-08: slices of experts are exchanged exactly."""
    made = plan(SHAPES["qwen3-30b-a3b"], 8, ParallelSizes(ep=8), rollout)
    (stage,) = [stage for stage in made.stages if stage.name == "ep"]
    assert {(group.form, len(group.ranks)) for group in stage.groups} == {(form, size)}
    assert made.received == made.bound


def test_what_comes_from_one_rank_is_broadcast() -> None:
    """An engine of one rank for every stage but the first: the embedding comes from the first one alone."""
    train, rollout = ParallelSizes(pp=2, first_stage_layers=7), ParallelSizes(pp=2)
    made = plan_move(DENSE, train, rollout, numbering(2, train, rollout))
    (stage,) = made.stages
    assert [(group.ranks, group.form) for group in stage.groups] == [((0, 1), "broadcast")]
    assert min(made.received) == 0 < max(made.received)


def test_a_rank_packs_once_what_goes_to_all_others() -> None:
    """Buckets of the same size then carry what three peers would else get in their own copies each."""
    train, rollout = ParallelSizes(tp=4), ParallelSizes()
    made = plan_move(WIDE, train, rollout, numbering(4, train, rollout), bucket_bytes=20_000)
    (stage,) = made.stages
    assert stage.sent[0] == 3 * (made.received[0] // 3)
    needed = (made.received[0] + stage.sent[0] // 3) / 20_000
    assert needed <= stage.groups[0].num_buckets <= 1.5 * needed + 1
    for bucket in made.schedule(0).buckets:
        assert sum(parcel.elements for parcel in (*bucket.packed, *bucket.receives)) * 2 <= 20_000


GB_70B = {(8, 4): 0, (4, 4): 4.41, (8, 2): 4.41, (8, 1): 13.23, (4, 1): 30.87, (2, 1): 66.14, (16, 4): 0, (16, 1): 6.74}
"""Mean GB per rank. 8 key/value heads on 16 ranks are kept twice, so TP 16 needs 6.74 and not M/16 (1 - 1/4) = 6.61."""


@pytest.mark.parametrize("layout", GB_70B)
def test_llama_70b_on_128_ranks(layout: tuple[int, int]) -> None:
    train, rollout = ParallelSizes(tp=8, pp=4), ParallelSizes(tp=layout[0], pp=layout[1])
    made = plan_move(SHAPES["llama-70b"], train, rollout, numbering(128, train, rollout))
    assert made.received == made.bound
    assert round(sum(made.received) / 128e9, 2) == GB_70B[layout]
    assert made.imported == sum(made.import_bound)
    assert max(made.peak_extra(rank) for rank in range(128)) <= 2 * made.bucket_bytes
    nodes = [
        {rank // 8 for rank in group.ranks} for stage in made.stages if stage.name == "tp" for group in stage.groups
    ]
    assert all(len(node) == 1 for node in nodes), "slices are exchanged inside a node"


@pytest.mark.timeout(60)
def test_a_rank_plans_deepseek_v3_over_256_ranks() -> None:
    """45 thousand tensors; the rank's own schedule of pieces and buckets included. Work by layer kind and rank class:
    element by element it would take hours, which the time limit tells apart."""
    shape, train, rollout = SHAPES["deepseek-v3"], ParallelSizes(pp=16, ep=16), ParallelSizes(tp=32)
    made = plan(shape, 256, train, rollout)
    schedule = made.schedule(0)
    assert made.received == made.bound
    assert made.imported == sum(made.import_bound)
    pieces = [piece for bucket in schedule.buckets for parcel in bucket.receives for piece in parcel.pieces]
    assert len({piece.tensor for piece in (*pieces, *schedule.local)}) > 45_000
    assert sum(num_elements(piece.box) for piece in pieces) * 2 == made.received[0]
    assert [len(layers) for layers in train_stage_layers(61, train)] == [4] * 15 + [1]


def expert_bound(shape: ModelShape, train: ParallelSizes, rollout: ParallelSizes) -> float:
    """R_E of experts, bytes."""
    size = 6 * shape.num_experts * shape.hidden_size * shape.expert_ffn_size * shape.num_layers
    cut = 1 if rollout.ep > 1 else rollout.tp
    common = max(train.ep, rollout.ep) * max(train.etp, cut) * max(train.pp, rollout.pp)
    return size * (1 / (rollout.ep * cut * rollout.pp) - 1 / common)


@pytest.mark.parametrize(
    ("world", "train", "rollout"),
    [
        (8, ParallelSizes(ep=8), ParallelSizes(tp=4)),
        (8, ParallelSizes(ep=8), ParallelSizes(tp=8, ep=8)),
        (8, ParallelSizes(ep=8), ParallelSizes(tp=1)),
        (8, ParallelSizes(tp=2, ep=4), ParallelSizes(tp=2, ep=2)),
        (8, ParallelSizes(tp=2, ep=4), ParallelSizes(tp=4)),
        (8, ParallelSizes(tp=2, ep=2, etp=2), ParallelSizes(tp=2)),
        (32, ParallelSizes(tp=4, ep=8), ParallelSizes(tp=4, ep=4)),
        (64, ParallelSizes(tp=4, pp=2, ep=8), ParallelSizes(tp=8, ep=8)),
        (32, ParallelSizes(ep=8), ParallelSizes(tp=4)),
    ],
)
def test_experts_and_the_rest_both_meet_their_bounds(world: int, train: ParallelSizes, rollout: ParallelSizes) -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    choice = choose_order(shape, world, train, rollout)
    assert choice.chosen.expert_bytes / world == pytest.approx(expert_bound(shape, train, rollout), rel=1e-9)
    assert choice.chosen.dense_bytes == choice.dense.dense_bytes
    places = numbering(world, train, rollout, choice.chosen.order)
    made = plan_move(shape, train, rollout, places)
    assert made.received == made.bound
    assert sum(made.received) == choice.chosen.total_bytes
    assert made.imported == sum(made.import_bound)


def test_ranks_of_one_expert_stay_inside_those_that_share_experts() -> None:
    """Megatron-core's dispatcher wants etp inside ep; experts would rather have it outside, which costs these bytes."""
    shape, train, rollout = SHAPES["qwen3-30b-a3b"], ParallelSizes(tp=2, ep=2, etp=2, pp=2), ParallelSizes(tp=4)
    places = numbering(8, train, rollout, choose_order(shape, 8, train, rollout).chosen.order)
    for group in groups(places, "experts", "ep", "etp"):
        trains = [place.train for place in places if place.rank in group]
        assert [(at.ep, at.etp) for at in trains if at] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    made = plan_move(shape, train, rollout, places)
    assert made.received == made.bound
    least = expert_bound(shape, train, rollout)
    assert least < sum(made.received) / 8 < 1.4 * least


def test_orders_of_experts_and_of_the_rest_can_disagree() -> None:
    """Equal TP 2; generation's half of the experts are those of two neighbours of four, which plain order separates."""
    train, rollout = ParallelSizes(tp=2, ep=4), ParallelSizes(tp=2, ep=2)
    choice = choose_order(SHAPES["qwen3-30b-a3b"], 8, train, rollout)
    plain = plan_move(SHAPES["qwen3-30b-a3b"], train, rollout, numbering(8, train, rollout))
    assert choice.chosen.total_bytes == choice.expert.total_bytes == 8 * 14_495_514_624
    assert sum(plain.received) == 8 * 21_743_271_936


def test_no_order_spreads_tensor_parallel_groups_over_more_nodes() -> None:
    """16 experts' places over two nodes of 8 would want strided TP 4 groups: the bytes are the price of keeping them."""
    train, rollout = ParallelSizes(tp=4, ep=16), ParallelSizes(tp=4, ep=4)
    near = choose_order(SHAPES["qwen3-30b-a3b"], 16, train, rollout)
    one_node = choose_order(SHAPES["qwen3-30b-a3b"], 16, train, rollout, gpus_per_node=16)
    assert one_node.chosen.expert_bytes / 16 == pytest.approx(expert_bound(SHAPES["qwen3-30b-a3b"], train, rollout))
    assert near.chosen.expert_bytes > one_node.chosen.expert_bytes


def test_an_element_counts_once_where_a_rank_keeps_it_twice() -> None:
    """Tied weights on one stage, key/value heads on several ranks."""
    train, rollout = ParallelSizes(tp=4, pp=2), ParallelSizes(tp=4)
    made = plan_move(TIED_EVEN, train, rollout, numbering(8, train, rollout))
    for place in made.places:
        held, needed = held_by(TIED_EVEN, train, place), needed_by(TIED_EVEN, rollout, place)
        assert made.bound[place.rank] == bound_bytes(needed, held, 2)


TIED_EVEN = replace(TIED, num_layers=4, kv_heads=2)


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"),
    [(7, 4, [2, 2, 2, 1]), (5, 2, [3, 2]), (10, 4, [2, 3, 3, 2]), (61, 16, [3, 3] + [4] * 13 + [3]), (6, 3, [2] * 3)],
)
def test_layers_that_do_not_divide_go_before_the_last_stage_of_an_engine(
    layers: int, pp: int, sizes: list[int]
) -> None:
    found = stage_layers(layers, pp)
    assert [layer for stage in found for layer in stage] == list(range(layers))
    assert [len(stage) for stage in found] == sizes


def test_training_stages_may_be_uneven_or_interleaved() -> None:
    assert [len(stage) for stage in train_stage_layers(61, ParallelSizes(pp=16))] == [4] * 15 + [1]
    assert train_stage_layers(8, ParallelSizes(pp=2, vpp=2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert train_stage_layers(5, ParallelSizes(pp=2, first_stage_layers=1)) == [[0], [1, 2, 3, 4]]
    with pytest.raises(ValueError, match="5 layers in stages of 2 leave nothing for the last of pp=4; use pp=3"):
        train_stage_layers(5, ParallelSizes(pp=4))
    with pytest.raises(ValueError, match="6 layers do not divide into pp=2 x vpp=2 = 4 chunks"):
        train_stage_layers(6, ParallelSizes(pp=2, vpp=2))


@pytest.mark.parametrize(
    ("shape", "train", "rollout", "message"),
    [
        (DENSE, ParallelSizes(tp=16), ParallelSizes(), r"train tp16: tp=16 does not divide the model's 8 attention heads"),
        (DENSE, ParallelSizes(), ParallelSizes(tp=16), r"rollout tp16: tp=16 does not divide the model's 8 attention heads"),
        (DENSE, ParallelSizes(ep=2), ParallelSizes(), r"ep=2, etp=1: Qwen2ForCausalLM has no experts"),
        (DENSE, ParallelSizes(), ParallelSizes(tp=2, ep=2), r"Qwen2ForCausalLM has no experts; leave ep out"),
        (DENSE, ParallelSizes(), ParallelSizes(pp=9), r"pp=9 is more than the model's 8 layers"),
        (MOE, ParallelSizes(ep=3), ParallelSizes(), r"ep=3 does not divide the model's 8 experts"),
        (replace(MOE, expert_ffn_size=6), ParallelSizes(), ParallelSizes(tp=4), r"inner size 6 of an expert; .* with ep4"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_an_error_with_numbers(
    shape: ModelShape, train: ParallelSizes, rollout: ParallelSizes, message: str
) -> None:
    world = train.tp * train.pp * train.ep * rollout.tp * rollout.pp
    with pytest.raises(ValueError, match=message):
        plan_move(shape, train, rollout, numbering(world, train, rollout))


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-moe-tiny", "mixtral-tiny", "llama-7b", "deepseek-v3"])
def test_units_have_every_parameter_of_the_model_once(name: str) -> None:
    shape = SHAPES[name]
    sizes = ParallelSizes(tp=2, ep=2 if shape.num_experts else 1)
    made = plan_move(shape, sizes, ParallelSizes(tp=4), numbering(4, sizes, ParallelSizes(tp=4)))
    assert sum(unit.elements for unit in made.units) == shape.num_parameters


def test_needs_of_all_ranks_are_the_whole_model() -> None:
    for name, shape in MODELS.items():
        for sizes in (ParallelSizes(), ParallelSizes(tp=4), ParallelSizes(tp=2, pp=2)):
            together: dict[str, list[families.Box]] = {}
            for tp_rank, stage in product(range(sizes.tp), range(sizes.pp)):
                for tensor, boxes in rank_needs(shape, sizes, tp_rank, stage).items():
                    together.setdefault(tensor, []).extend(boxes)
            assert sum(sum(map(num_elements, disjoint(boxes))) for boxes in together.values()) == shape.num_parameters
            assert set(together) == set(SHAPE_OF_TENSORS[name])
