"""The cells of every kind of layer of a model under two layouts, from the tables of training and of generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flowrl.config.model_shape import ModelShape
from flowrl.resharding import experts, families, latent, needs
from flowrl.resharding.families import EMBEDDING, HEAD, Box, Parameter
from flowrl.resharding.plan.cells import Cell, Memory, Place, cut_cells
from flowrl.resharding.ranks import ParallelSizes
from flowrl.resharding.shapes import LatentShape

T = TypeVar("T")

ENDS = "ends"
"""Kind of the tensors outside layers: embedding, final norm, head."""


@dataclass(frozen=True)
class LayerKind:
    """Layers that are cut alike. Cells name tensors with the fields {layer} and {expert}."""

    name: str
    layers: tuple[int, ...]
    cells: tuple[Cell, ...]
    expert_cells: tuple[Cell, ...]


@dataclass(frozen=True)
class ModelTable:
    """A model under two layouts. `train_stages[s]` and `rollout_stages[s]` are layers of pipeline stage s; `ends` are
    the cells of embedding, final norm and head, `end_stages` says where both sides keep them (training, generation)."""

    kinds: tuple[LayerKind, ...]
    ends: tuple[Cell, ...]
    train_stages: tuple[tuple[int, ...], ...]
    rollout_stages: tuple[tuple[int, ...], ...]
    end_stages: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    train_experts: tuple[range, ...]
    rollout_experts: tuple[range, ...]


def train_stage_layers(num_layers: int, sizes: ParallelSizes) -> list[list[int]]:
    """Layers of each training stage: equal shares; where they do not divide, the last stage has fewer.

    With `vpp` a stage has that many chunks, dealt round; with `first_stage_layers` the others share the rest.

    Errors: `ValueError` with the arithmetic.
    """
    pp, vpp = sizes.pp, sizes.vpp
    if pp == 1:
        return [list(range(num_layers))]
    if sizes.first_stage_layers is not None:
        return [list(layers) for layers in families.stage_layers(num_layers, pp, sizes.first_stage_layers)]
    if vpp > 1:
        if num_layers % (pp * vpp):
            raise ValueError(f"{num_layers} layers do not divide into pp={pp} x vpp={vpp} = {pp * vpp} chunks")
        size = num_layers // (pp * vpp)
        chunks = [range(start, start + size) for start in range(0, num_layers, size)]
        return [[layer for chunk in chunks[stage::pp] for layer in chunk] for stage in range(pp)]
    share = -(-num_layers // pp)
    stages = [list(range(start, min(start + share, num_layers))) for start in range(0, pp * share, share)]
    if not stages[-1]:
        fit = next(size for size in range(pp, 0, -1) if (size - 1) * -(-num_layers // size) < num_layers)
        raise ValueError(
            f"{num_layers} layers in stages of {share} leave nothing for the last of pp={pp}; use pp={fit} or fewer"
        )
    return stages


def check_train(shape: ModelShape, sizes: ParallelSizes) -> None:
    """Errors: `ValueError` with the numbers where the trainer cannot be cut this way."""
    try:
        if isinstance(shape, LatentShape):
            latent.check_tensor_parallel(shape, sizes.tp)
        else:
            dense = experts.attention_shape(shape, sizes.tp) if shape.num_experts else shape
            families.check_tensor_parallel(dense, sizes.tp)
        families.check_expert_parallel(shape, sizes.ep, sizes.etp)
        train_stage_layers(shape.num_layers, sizes)
    except ValueError as error:
        raise ValueError(f"train {sizes}: {error}") from None


def _boxes(parameters: Iterable[Parameter]) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = {}
    for parameter in parameters:
        for piece in parameter.pieces:
            boxes.setdefault(piece.tensor, []).append(piece.source)
    return boxes


def _memory(parameters: Sequence[Parameter]) -> dict[str, list[tuple[Box, Place]]]:
    """Where a rank that holds all of a layer keeps it; shards keep the same order, see `buffer`."""
    runs: dict[str, list[tuple[Box, Place]]] = {}
    for number, parameter in enumerate(reversed(parameters)):
        for piece in parameter.pieces:
            runs.setdefault(piece.tensor, []).append((piece.source, (number, piece.target[0][0])))
    return runs


def _layer_parameters(shape: ModelShape, layer: int, tp: int, tp_rank: int) -> list[Parameter]:
    """What a training rank holds of a layer without its routed experts."""
    if isinstance(shape, LatentShape):
        return list(latent.layer_parameters(shape, layer, tp=tp, tp_rank=tp_rank))
    layers = range(layer, layer + 1)
    if not shape.num_experts:
        stage = families.stage_parameters(shape, tp=tp, tp_rank=tp_rank, layers=layers, first=False, last=False)
        return list(stage)
    attention = experts.attention_parameters(shape, tp=tp, tp_rank=tp_rank, layers=layers, first=False, last=False)
    return [*attention, families.router_parameter(shape, layer)]


def _rename(shard: Mapping[str, T], layer: int) -> dict[str, T]:
    """The same with templates as names."""

    def template(name: str) -> str:
        return name.replace(f"model.layers.{layer}.", "model.layers.{layer}.").replace(
            ".experts.0.", ".experts.{expert}."
        )

    return {template(name): boxes for name, boxes in shard.items()}


def _kind(
    name: str, shape: ModelShape, layers: range, train: ParallelSizes, rollout: ParallelSizes, sparse: bool
) -> LayerKind:
    layer = layers[0]
    held = [_rename(_boxes(_layer_parameters(shape, layer, train.tp, rank)), layer) for rank in range(train.tp)]
    needed = [_rename(needs.layer_boxes(shape, layer, rollout.tp, rank), layer) for rank in range(rollout.tp)]
    memory: Memory = _rename(_memory(_layer_parameters(shape, layer, 1, 0)), layer)
    cells = cut_cells(_layer_shapes(shape, layer), held, needed, memory)
    expert_cells: list[Cell] = []
    if sparse:
        shards = [
            families.expert_parameters(shape, layer, 0, etp=train.etp, etp_rank=rank) for rank in range(train.etp)
        ]
        held = [_rename(_boxes(shard), layer) for shard in shards]
        slices = needs.expert_slices(rollout)
        needed = [_rename(needs.expert_boxes(shape, layer, 0, slices, rank), layer) for rank in range(slices)]
        memory = _rename(_memory(families.expert_parameters(shape, layer, 0, etp=1, etp_rank=0)), layer)
        tensors = families.expert_tensors(shape, layer, 0)
        shapes = dict(zip(needed[0], (tensor.shape for tensor in tensors), strict=True))
        expert_cells = cut_cells(shapes, held, needed, memory)
    return LayerKind(name, tuple(layers), tuple(cells), tuple(expert_cells))


def _layer_shapes(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors without routed experts, in the folder's order, by template."""
    if isinstance(shape, LatentShape):
        sizes = {tensor.name: tensor.shape for tensor in latent.layer_tensors(shape, layer)}
    else:
        boxes = needs.layer_boxes(shape, layer, 1, 0)
        sizes = {name: tuple(stop for _, stop in there[0]) for name, there in boxes.items()}
    return {name.replace(f"model.layers.{layer}.", "model.layers.{layer}."): size for name, size in sizes.items()}


def model_table(shape: ModelShape, train: ParallelSizes, rollout: ParallelSizes) -> ModelTable:
    """The cells of a model under two layouts. Errors: `ValueError` where either side cannot be cut this way."""
    check_train(shape, train)
    needs.check_rollout(shape, rollout)
    kinds = []
    dense_layers = shape.num_dense_layers if isinstance(shape, LatentShape) else shape.num_layers
    if isinstance(shape, LatentShape) or not shape.num_experts:
        kinds.append(_kind("dense", shape, range(dense_layers), train, rollout, sparse=False))
    if shape.num_experts:
        first = dense_layers if isinstance(shape, LatentShape) else 0
        kinds.append(_kind("sparse", shape, range(first, shape.num_layers), train, rollout, sparse=True))
    last = train.pp - 1
    tied_last = {EMBEDDING: tuple(sorted({0, last})) if shape.tied else (0,)}
    held_at = dict.fromkeys(needs.end_stages(shape, 1), (last,)) | tied_last
    kept_at = needs.end_stages(shape, rollout.pp)
    return ModelTable(
        tuple(kinds),
        _end_cells(shape, train, rollout),
        tuple(tuple(layers) for layers in train_stage_layers(shape.num_layers, train)),
        tuple(tuple(layers) for layers in needs.stage_layers(shape.num_layers, rollout.pp)),
        {name: (held_at[name], tuple(kept_at[name])) for name in kept_at},
        tuple(experts.local_experts(shape, train.ep, rank) for rank in range(train.ep)),
        tuple(needs.kept_experts(shape, rollout, rank) for rank in range(rollout.ep)),
    )


def _end_cells(shape: ModelShape, train: ParallelSizes, rollout: ParallelSizes) -> tuple[Cell, ...]:
    """Cells of embedding, final norm and head, each tensor in cells of its own: their stages differ."""

    def parameters(tp: int, rank: int) -> tuple[Parameter, ...]:
        dense = experts.attention_shape(shape, tp)
        return families.stage_parameters(dense, tp=tp, tp_rank=rank, layers=range(0), first=True, last=True)

    held = [_boxes(parameters(train.tp, rank)) for rank in range(train.tp)]
    memory = _memory(parameters(1, 0))
    needed = [needs.end_boxes(shape, rollout.tp, rank) for rank in range(rollout.tp)]
    cells: list[Cell] = []
    for name in needs.end_boxes(shape, 1, 0):
        size = (shape.vocab_size, shape.hidden_size) if name in (EMBEDDING, HEAD) else (shape.hidden_size,)
        cells += cut_cells({name: size}, held, needed, memory)
    return tuple(cells)
