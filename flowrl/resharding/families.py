"""Which elements of a Hugging Face model each Megatron parameter consists of: one table for all families.

Pure integers. Loading, export, transfer and fingerprints all read this table, so a layout is described once.

A *box* is one half-open interval per dimension. A parameter of one tensor-parallel rank is a list of pieces: the box
`source` of a Hugging Face tensor is, element for element, the box `target` of the local parameter. What no piece
covers is padding of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowrl.config.model_shape import ModelShape

Box = tuple[tuple[int, int], ...]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the Hugging Face folder."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """`target` of the local parameter holds `source` of the Hugging Face tensor `tensor`; both boxes have one size."""

    tensor: str
    source: Box
    target: Box


@dataclass(frozen=True)
class Parameter:
    """A Megatron parameter as one tensor-parallel rank holds it.

    `name` numbers layers and experts globally. `shape` is local. `replicated`: every tensor-parallel rank holds the same values.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replicated: bool


@dataclass(frozen=True)
class ExpertShard:
    """What a rank holds of the experts: share `ep_rank` of `ep` of them, and of each the slice `etp_rank` of `etp`."""

    ep: int = 1
    ep_rank: int = 0
    etp: int = 1
    etp_rank: int = 0

    def experts(self, num_experts: int) -> range:
        """Global numbers of the experts that this rank holds."""
        share = num_experts // self.ep
        return range(self.ep_rank * share, (self.ep_rank + 1) * share)


ALL_EXPERTS = ExpertShard()


@dataclass(frozen=True)
class ExpertNames:
    """Names inside a layer of the folder; `{}` is the expert's number."""

    router: str
    gate: str
    up: str
    down: str


def expert_names(shape: ModelShape) -> ExpertNames:
    """What the family calls its router and the three projections of an expert."""
    if shape.architecture == "MixtralForCausalLM":
        expert = "block_sparse_moe.experts.{}."
        return ExpertNames("block_sparse_moe.gate.weight", *(f"{expert}{w}.weight" for w in ("w1", "w3", "w2")))
    expert = "mlp.experts.{}."
    return ExpertNames("mlp.gate.weight", *(f"{expert}{part}_proj.weight" for part in ("gate", "up", "down")))


@dataclass(frozen=True)
class _Run:
    """Rows [start, start + count) of a fused parameter are rows [source, source + count) of a Hugging Face tensor."""

    start: int
    tensor: str
    source: int
    count: int


def box_size(box: Box) -> tuple[int, ...]:
    """Extent of a box per dimension."""
    return tuple(stop - start for start, stop in box)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of embedding and head in training: the next multiple of 64 that `tp` divides."""
    unit = math.lcm(64, tp)
    return -(-vocab_size // unit) * unit


def stage_layers(num_layers: int, pp: int, first_stage_layers: int | None = None) -> list[range]:
    """Global layer numbers of each pipeline stage.

    Errors: `ValueError` with the arithmetic where layers do not divide over the stages.
    """
    first = num_layers // pp if first_stage_layers is None or pp == 1 else first_stage_layers
    rest = pp - 1
    if rest == 0:
        return [range(num_layers)]
    if (first_stage_layers is None and num_layers % pp) or not 0 < first < num_layers or (num_layers - first) % rest:
        raise ValueError(
            f"{num_layers} layers cannot be cut into {pp} pipeline stages with {first} on the first and equal shares on "
            f"the others; choose first_stage_layers so that {num_layers} - first_stage_layers is a multiple of {rest}"
        )
    share = (num_layers - first) // rest
    starts = [0] + [first + share * stage for stage in range(pp)]
    return [range(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]


def check_tensor_parallel(shape: ModelShape, tp: int) -> None:
    """Errors: `ValueError` with the numbers where `tp` does not divide what Megatron splits."""
    if shape.heads % tp:
        raise ValueError(f"tp={tp} does not divide the model's {shape.heads} attention heads")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise ValueError(f"tp={tp} neither divides nor is a multiple of the model's {shape.kv_heads} key/value heads")
    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    if rows % tp:
        raise ValueError(f"tp={tp} does not divide the {rows} rows of the fused query/key/value projection")
    if not shape.num_experts and shape.ffn_size % tp:
        raise ValueError(f"tp={tp} does not divide intermediate_size={shape.ffn_size}")


def check_expert_parallel(shape: ModelShape, ep: int, etp: int) -> None:
    """Errors: `ValueError` with the numbers where the experts cannot be shared by `ep` and cut by `etp` ranks."""
    if not shape.num_experts:
        if ep > 1 or etp > 1:
            raise ValueError(f"ep={ep}, etp={etp}: {shape.architecture} has no experts; use ep=1 and etp=1")
        return
    if shape.num_experts % ep:
        raise ValueError(f"ep={ep} does not divide the model's {shape.num_experts} experts")
    if shape.expert_ffn_size % etp:
        raise ValueError(f"etp={etp} does not divide an expert's {shape.expert_ffn_size} columns")


def hf_tensors(shape: ModelShape) -> tuple[HFTensor, ...]:
    """All tensors of the folder in the order of the layers; a tied model has no `lm_head.weight`."""
    tensors = [HFTensor(EMBEDDING, (shape.vocab_size, shape.hidden_size))]
    for layer in range(shape.num_layers):
        tensors += _layer_tensors(shape, layer)
    tensors.append(HFTensor(FINAL_NORM, (shape.hidden_size,)))
    if not shape.tied:
        tensors.append(HFTensor(HEAD, (shape.vocab_size, shape.hidden_size)))
    return tuple(tensors)


def _layer_tensors(shape: ModelShape, layer: int) -> Iterator[HFTensor]:
    h, d, f = shape.hidden_size, shape.head_dim, shape.ffn_size
    prefix = f"model.layers.{layer}."
    heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    yield HFTensor(prefix + "input_layernorm.weight", (h,))
    for kind, count in heads.items():
        yield HFTensor(f"{prefix}self_attn.{kind}_proj.weight", (count * d, h))
        if shape.qkv_bias:
            yield HFTensor(f"{prefix}self_attn.{kind}_proj.bias", (count * d,))
    if shape.qk_norm:
        yield HFTensor(prefix + "self_attn.q_norm.weight", (d,))
        yield HFTensor(prefix + "self_attn.k_norm.weight", (d,))
    yield HFTensor(prefix + "self_attn.o_proj.weight", (h, shape.heads * d))
    yield HFTensor(prefix + "post_attention_layernorm.weight", (h,))
    if shape.num_experts:
        yield router_tensor(shape, layer)
        for expert in range(shape.num_experts):
            yield from expert_tensors(shape, layer, expert)
        return
    yield HFTensor(prefix + "mlp.gate_proj.weight", (f, h))
    yield HFTensor(prefix + "mlp.up_proj.weight", (f, h))
    yield HFTensor(prefix + "mlp.down_proj.weight", (h, f))


def router_tensor(shape: ModelShape, layer: int) -> HFTensor:
    """What scores the experts of a layer."""
    return HFTensor(f"model.layers.{layer}.{expert_names(shape).router}", (shape.num_experts, shape.hidden_size))


def expert_tensors(shape: ModelShape, layer: int, expert: int) -> tuple[HFTensor, HFTensor, HFTensor]:
    """Gate, up and down of one expert."""
    h, f, names = shape.hidden_size, shape.expert_ffn_size, expert_names(shape)
    gate, up, down = (f"model.layers.{layer}.{name.format(expert)}" for name in (names.gate, names.up, names.down))
    return HFTensor(gate, (f, h)), HFTensor(up, (f, h)), HFTensor(down, (h, f))


def stage_parameters(
    shape: ModelShape,
    *,
    tp: int,
    tp_rank: int,
    layers: range,
    first: bool,
    last: bool,
    head: bool = True,
    shard: ExpertShard = ALL_EXPERTS,
) -> tuple[Parameter, ...]:
    """Parameters that rank `tp_rank` of `tp` holds of a pipeline stage with these layers, and of its experts `shard`, in
    Megatron-core's own order.

    `first` and `last` say whether the stage is; `head` is False for models without a language-model head (a critic).
    A tied model's head is the embedding itself on a single stage, and a second copy of it on a separate last stage.
    """
    check_tensor_parallel(shape, tp)
    check_expert_parallel(shape, shard.ep, shard.etp)
    parameters = []
    if first:
        parameters.append(_vocabulary(shape, "embedding.word_embeddings.weight", EMBEDDING, tp, tp_rank))
    for layer in layers:
        parameters += _layer_parameters(shape, layer, tp, tp_rank)
        parameters += _feed_forward(shape, layer, tp, tp_rank, shard)
    if last:
        parameters.append(_replicated("decoder.final_layernorm.weight", FINAL_NORM, shape.hidden_size))
        if head and not (shape.tied and first):
            source = EMBEDDING if shape.tied else HEAD
            parameters.append(_vocabulary(shape, "output_layer.weight", source, tp, tp_rank))
    return tuple(parameters)


def _layer_parameters(shape: ModelShape, layer: int, tp: int, tp_rank: int) -> Iterator[Parameter]:
    h, d = shape.hidden_size, shape.head_dim
    hf, mcore = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    attention = mcore + "self_attention."
    yield _replicated(mcore + "input_layernorm.weight", hf + "input_layernorm.weight", h)
    yield _columns(attention + "linear_proj.weight", hf + "self_attn.o_proj.weight", h, shape.heads * d, tp, tp_rank)
    runs = _qkv_runs(shape, hf + "self_attn.{}_proj.weight")
    yield _fused_rows(attention + "linear_qkv.weight", runs, tp, tp_rank, width=h)
    if shape.qkv_bias:
        runs = _qkv_runs(shape, hf + "self_attn.{}_proj.bias")
        yield _fused_rows(attention + "linear_qkv.bias", runs, tp, tp_rank, width=None)
    if shape.qk_norm:
        yield _replicated(attention + "q_layernorm.weight", hf + "self_attn.q_norm.weight", d)
        yield _replicated(attention + "k_layernorm.weight", hf + "self_attn.k_norm.weight", d)
    yield _replicated(mcore + "pre_mlp_layernorm.weight", hf + "post_attention_layernorm.weight", h)


def _feed_forward(shape: ModelShape, layer: int, tp: int, tp_rank: int, shard: ExpertShard) -> Iterator[Parameter]:
    if shape.num_experts:
        yield router_parameter(shape, layer)
        for expert in shard.experts(shape.num_experts):
            yield from expert_parameters(shape, layer, expert, etp=shard.etp, etp_rank=shard.etp_rank)
        return
    h, f, hf, mcore = shape.hidden_size, shape.ffn_size, f"model.layers.{layer}.mlp.", f"decoder.layers.{layer}.mlp."
    yield _gate_up(mcore + "linear_fc1.weight", hf + "gate_proj.weight", hf + "up_proj.weight", f, h, tp, tp_rank)
    yield _columns(mcore + "linear_fc2.weight", hf + "down_proj.weight", h, f, tp, tp_rank)


def router_parameter(shape: ModelShape, layer: int) -> Parameter:
    """The router of a layer, whole on every rank of the stage."""
    tensor = router_tensor(shape, layer)
    box = tuple((0, size) for size in tensor.shape)
    piece = Piece(tensor.name, box, box)
    return Parameter(f"decoder.layers.{layer}.mlp.router.weight", tensor.shape, (piece,), replicated=True)


def expert_parameters(
    shape: ModelShape, layer: int, expert: int, *, etp: int, etp_rank: int
) -> tuple[Parameter, Parameter]:
    """The two parameters of one expert, cut over expert tensor-parallel ranks as a dense feed-forward part would be."""
    gate, up, down = (tensor.name for tensor in expert_tensors(shape, layer, expert))
    h, f, name = shape.hidden_size, shape.expert_ffn_size, f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}."
    return (
        _gate_up(name + "linear_fc1.weight", gate, up, f, h, etp, etp_rank),
        _columns(name + "linear_fc2.weight", down, h, f, etp, etp_rank),
    )


def _qkv_runs(shape: ModelShape, template: str) -> list[_Run]:
    """Rows of the fused projection: for each key/value head its query heads, then its key, then its value."""
    ratio, d = shape.heads // shape.kv_heads, shape.head_dim
    runs, row = [], 0
    for group in range(shape.kv_heads):
        for kind, source, count in (("q", group * ratio * d, ratio * d), ("k", group * d, d), ("v", group * d, d)):
            runs.append(_Run(row, template.format(kind), source, count))
            row += count
    return runs


def _fused_rows(name: str, runs: Sequence[_Run], tp: int, tp_rank: int, width: int | None) -> Parameter:
    """Equal contiguous shares of the fused rows; a share may begin inside a run."""
    rows = sum(run.count for run in runs) // tp
    low, high = tp_rank * rows, (tp_rank + 1) * rows
    tail: Box = () if width is None else ((0, width),)
    pieces = []
    for run in runs:
        start, stop = max(run.start, low), min(run.start + run.count, high)
        if start < stop:
            shift = run.source - run.start
            pieces.append(Piece(run.tensor, ((start + shift, stop + shift), *tail), ((start - low, stop - low), *tail)))
    return Parameter(name, (rows,) if width is None else (rows, width), tuple(pieces), replicated=False)


def _gate_up(name: str, gate: str, up: str, ffn: int, hidden: int, tp: int, tp_rank: int) -> Parameter:
    """The gate's share above the up-projection's share: not a slice of the two stacked whole."""
    share = ffn // tp
    source = ((tp_rank * share, (tp_rank + 1) * share), (0, hidden))
    pieces = tuple(
        Piece(tensor, source, ((half * share, (half + 1) * share), (0, hidden)))
        for half, tensor in enumerate((gate, up))
    )
    return Parameter(name, (2 * share, hidden), pieces, replicated=False)


def _columns(name: str, tensor: str, rows: int, columns: int, tp: int, tp_rank: int) -> Parameter:
    share = columns // tp
    piece = Piece(tensor, ((0, rows), (tp_rank * share, (tp_rank + 1) * share)), ((0, rows), (0, share)))
    return Parameter(name, (rows, share), (piece,), replicated=False)


def _replicated(name: str, tensor: str, size: int) -> Parameter:
    return Parameter(name, (size,), (Piece(tensor, ((0, size),), ((0, size),)),), replicated=True)


def _vocabulary(shape: ModelShape, name: str, tensor: str, tp: int, tp_rank: int) -> Parameter:
    """Equal shares of the padded rows; the padding rows belong to no Hugging Face tensor."""
    rows = padded_vocab_size(shape.vocab_size, tp) // tp
    low = tp_rank * rows
    real = min(shape.vocab_size, low + rows) - low
    width = (0, shape.hidden_size)
    pieces = (Piece(tensor, ((low, low + real), width), ((0, real), width)),) if real > 0 else ()
    return Parameter(name, (rows, shape.hidden_size), pieces, replicated=False)
