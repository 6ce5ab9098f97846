"""Which elements of a Hugging Face model each rank of a vLLM engine keeps, known without building the engine.

Pure integers, for planning before anything runs; a running engine's own loader is recorded (`recorder`), and tests
compare the two. Described after vLLM 0.32: heads and feed-forward columns in equal shares, a key/value head on several
ranks where there are fewer heads than ranks, the vocabulary padded to a multiple of 64, norms and router everywhere.
"""

from __future__ import annotations

from flowrl.config.layout import ENGINE_VOCABULARY_UNIT, vocabulary_problem
from flowrl.config.model_shape import MOE_ARCHITECTURES, ModelShape
from flowrl.resharding import families, latent
from flowrl.resharding.experts import attention_shape
from flowrl.resharding.families import EMBEDDING, FINAL_NORM, HEAD, Box, expert_tensors, router_tensor
from flowrl.resharding.ranks import ParallelSizes
from flowrl.resharding.regions import whole
from flowrl.resharding.shapes import LatentShape


def check_rollout(shape: ModelShape, sizes: ParallelSizes) -> None:
    """Errors: `ValueError` with the numbers where the engine cannot be cut this way."""
    tp = sizes.tp
    try:
        if isinstance(shape, LatentShape):
            latent.check_tensor_parallel(shape, tp)
        elif shape.num_experts:
            families.check_tensor_parallel(attention_shape(shape, tp), tp)
        else:
            families.check_tensor_parallel(shape, tp)
    except ValueError as error:
        raise ValueError(f"rollout {sizes}: {error}") from None
    if (reason := vocabulary_problem(shape, tp)) is not None:
        raise ValueError(f"rollout {sizes}: {reason}")
    if sizes.pp > shape.num_layers:
        raise ValueError(f"rollout {sizes}: pp={sizes.pp} is more than the model's {shape.num_layers} layers")
    if not shape.num_experts:
        if sizes.ep > 1:
            raise ValueError(f"rollout {sizes}: ep={sizes.ep}, but {shape.architecture} has no experts; leave ep out")
    elif sizes.ep > shape.num_experts:
        raise ValueError(f"rollout {sizes}: ep={sizes.ep} is more than the model's {shape.num_experts} experts")
    elif sizes.ep == 1 and shape.expert_ffn_size % tp:
        raise ValueError(
            f"rollout {sizes}: tp={tp} does not divide the inner size {shape.expert_ffn_size} of an expert; spread whole "
            f"experts with ep{tp}"
        )


def stage_layers(num_layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage of an engine.

    What does not divide goes, one layer each, to the stages before the last one, counted from the back.
    """
    sizes = [num_layers // pp] * pp
    for place in range(2, num_layers % pp + 2):
        sizes[-place] += 1
    starts = [sum(sizes[:stage]) for stage in range(pp + 1)]
    return [range(start, stop) for start, stop in zip(starts[:-1], starts[1:], strict=True)]


def end_stages(shape: ModelShape, pp: int) -> dict[str, range | tuple[int, ...]]:
    """Pipeline stages that keep embedding, final norm and head.

    vLLM's models with experts build all three on every stage; a tied model keeps the embedding on the last stage too.
    """
    if shape.architecture in MOE_ARCHITECTURES:
        everywhere = range(pp)
        stages: dict[str, range | tuple[int, ...]] = {EMBEDDING: everywhere, FINAL_NORM: everywhere}
        return stages if shape.tied else stages | {HEAD: everywhere}
    if shape.tied:
        return {EMBEDDING: tuple(sorted({0, pp - 1})), FINAL_NORM: (pp - 1,)}
    return {EMBEDDING: (0,), FINAL_NORM: (pp - 1,), HEAD: (pp - 1,)}


def vocabulary_box(shape: ModelShape, tp: int, tp_rank: int) -> Box | None:
    """Rows of embedding or head; None where a rank has padding alone."""
    rows = -(-shape.vocab_size // ENGINE_VOCABULARY_UNIT) * ENGINE_VOCABULARY_UNIT // tp
    low, high = tp_rank * rows, min((tp_rank + 1) * rows, shape.vocab_size)
    return ((low, high), (0, shape.hidden_size)) if low < high else None


def end_boxes(shape: ModelShape, tp: int, tp_rank: int) -> dict[str, list[Box]]:
    """Boxes of embedding, final norm and head, on the stages that keep them."""
    rows = vocabulary_box(shape, tp, tp_rank)
    vocabulary = [] if rows is None else [rows]
    boxes = {EMBEDDING: vocabulary, FINAL_NORM: [whole((shape.hidden_size,))]}
    return boxes if shape.tied else boxes | {HEAD: vocabulary}


def layer_boxes(shape: ModelShape, layer: int, tp: int, tp_rank: int) -> dict[str, list[Box]]:
    """Boxes of a layer's tensors without its routed experts."""
    if isinstance(shape, LatentShape):
        return {t.name: [latent.shard(t, tp, tp_rank)] for t in latent.layer_tensors(shape, layer)}
    h, d, prefix = shape.hidden_size, shape.head_dim, f"model.layers.{layer}."
    attention = prefix + "self_attn."
    boxes: dict[str, list[Box]] = {prefix + "input_layernorm.weight": [whole((h,))]}
    q_rows = _share(shape.heads, tp, tp_rank, d)
    kv_rows = _share(shape.kv_heads, tp, tp_rank, d)
    for kind, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
        boxes[f"{attention}{kind}_proj.weight"] = [(rows, (0, h))]
        if shape.qkv_bias:
            boxes[f"{attention}{kind}_proj.bias"] = [(rows,)]
    if shape.qk_norm:
        boxes |= {f"{attention}{kind}_norm.weight": [whole((d,))] for kind in ("q", "k")}
    boxes[attention + "o_proj.weight"] = [((0, h), q_rows)]
    boxes[prefix + "post_attention_layernorm.weight"] = [whole((h,))]
    if shape.num_experts:
        router = router_tensor(shape, layer)
        return boxes | {router.name: [whole(router.shape)]}
    columns = _share(shape.ffn_size, tp, tp_rank, 1)
    boxes |= {f"{prefix}mlp.{kind}_proj.weight": [(columns, (0, h))] for kind in ("gate", "up")}
    boxes[prefix + "mlp.down_proj.weight"] = [((0, h), columns)]
    return boxes


def _share(count: int, tp: int, tp_rank: int, width: int) -> tuple[int, int]:
    """The interval of `count` items of `width` rows that a rank keeps; fewer items than ranks: one, shared by several."""
    if count >= tp:
        share = count // tp
        return tp_rank * share * width, (tp_rank + 1) * share * width
    item = tp_rank * count // tp
    return item * width, (item + 1) * width


def expert_slices(sizes: ParallelSizes) -> int:
    """Parts that generation cuts each expert into."""
    return 1 if sizes.ep > 1 else sizes.tp


def kept_experts(shape: ModelShape, sizes: ParallelSizes, tp_rank: int) -> range:
    """Global numbers of the experts of which a rank keeps something; a remainder goes to the first ranks."""
    if sizes.ep == 1:
        return range(shape.num_experts)
    share, rest = divmod(shape.num_experts, sizes.ep)
    start = tp_rank * share + min(tp_rank, rest)
    return range(start, start + share + (tp_rank < rest))


def expert_boxes(shape: ModelShape, layer: int, expert: int, slices: int, number: int) -> dict[str, list[Box]]:
    """Boxes of slice `number` of one expert."""
    share, h = shape.expert_ffn_size // slices, shape.hidden_size
    inner = (number * share, (number + 1) * share)
    gate, up, down = expert_tensors(shape, layer, expert)
    return {gate.name: [(inner, (0, h))], up.name: [(inner, (0, h))], down.name: [((0, h), inner)]}


def rank_needs(shape: ModelShape, sizes: ParallelSizes, tp_rank: int, stage: int) -> dict[str, list[Box]]:
    """Every box that one rank of an engine keeps, by tensor, in the order of the folder. Errors: as `check_rollout`."""
    check_rollout(shape, sizes)
    slices = expert_slices(sizes)
    ends = {
        name: boxes
        for name, boxes in end_boxes(shape, sizes.tp, tp_rank).items()
        if boxes and stage in end_stages(shape, sizes.pp)[name]
    }
    needs = {EMBEDDING: ends.pop(EMBEDDING)} if EMBEDDING in ends else {}
    first_sparse = shape.num_dense_layers if isinstance(shape, LatentShape) else 0
    for layer in stage_layers(shape.num_layers, sizes.pp)[stage]:
        needs |= layer_boxes(shape, layer, sizes.tp, tp_rank)
        if layer >= first_sparse:
            for expert in kept_experts(shape, sizes, tp_rank):
                needs |= expert_boxes(shape, layer, expert, slices, tp_rank if slices > 1 else 0)
    return needs | ends
