"""Which elements of a Hugging Face model with experts each Megatron parameter consists of; attention is as in `families`.

Routed experts are spread over expert-parallel ranks, contiguous shares each, and an expert may be cut over expert
tensor-parallel ranks like a dense feed-forward part. The router is on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl.config.model_shape import ModelShape
from flowrl.resharding import families
from flowrl.resharding.families import HFTensor, Parameter, Piece

DENSE_MLP = (".mlp.gate_proj.", ".mlp.up_proj.", ".mlp.down_proj.", ".mlp.linear_fc1.", ".mlp.linear_fc2.")


@dataclass(frozen=True)
class ExpertNames:
    """Names inside a layer of the folder."""

    router: str
    expert: str
    gate: str
    up: str
    down: str


_QWEN3 = ExpertNames("mlp.gate.weight", "mlp.experts.", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = ExpertNames("block_sparse_moe.gate.weight", "block_sparse_moe.experts.", "w1", "w3", "w2")


def expert_names(shape: ModelShape) -> ExpertNames:
    """How the architecture's folder calls the parts of a layer with experts."""
    return _MIXTRAL if shape.architecture == "MixtralForCausalLM" else _QWEN3


def check_expert_parallel(shape: ModelShape, ep: int, etp: int) -> None:
    """Errors: `ValueError` with the numbers where experts cannot be spread or cut this way."""
    if not shape.num_experts and (ep > 1 or etp > 1):
        raise ValueError(f"ep={ep}, etp={etp}: {shape.architecture} has no experts; use ep=1 and etp=1")
    if shape.num_experts % ep:
        raise ValueError(f"ep={ep} does not divide the model's {shape.num_experts} experts")
    if shape.expert_ffn_size % etp:
        raise ValueError(f"etp={etp} does not divide the inner size {shape.expert_ffn_size} of an expert")


def local_experts(shape: ModelShape, ep: int, ep_rank: int) -> range:
    """Global numbers of the experts that a rank holds."""
    share = shape.num_experts // ep
    return range(ep_rank * share, (ep_rank + 1) * share)


def expert_tensors(shape: ModelShape, layer: int, expert: int) -> tuple[HFTensor, HFTensor, HFTensor]:
    """Gate, up and down of one expert."""
    names, h, f = expert_names(shape), shape.hidden_size, shape.expert_ffn_size
    prefix = f"model.layers.{layer}.{names.expert}{expert}."
    return (
        HFTensor(f"{prefix}{names.gate}.weight", (f, h)),
        HFTensor(f"{prefix}{names.up}.weight", (f, h)),
        HFTensor(f"{prefix}{names.down}.weight", (h, f)),
    )


def router_tensor(shape: ModelShape, layer: int) -> HFTensor:
    return HFTensor(f"model.layers.{layer}.{expert_names(shape).router}", (shape.num_experts, shape.hidden_size))


def hf_tensors(shape: ModelShape) -> tuple[HFTensor, ...]:
    """All tensors of the folder of a model in which every layer has experts, in the order of the layers."""
    tensors: list[HFTensor] = []
    for tensor in families.hf_tensors(attention_shape(shape)):
        if any(name in tensor.name for name in DENSE_MLP):
            if ".gate_proj." in tensor.name:
                layer = int(tensor.name.split(".")[2])
                tensors.append(router_tensor(shape, layer))
                for expert in range(shape.num_experts):
                    tensors += expert_tensors(shape, layer, expert)
        else:
            tensors.append(tensor)
    return tuple(tensors)


def expert_parameters(
    shape: ModelShape, layer: int, expert: int, local: int, *, etp: int, etp_rank: int
) -> tuple[Parameter, Parameter]:
    """The two parameters of one expert, which is number `local` of its rank, as expert tensor rank `etp_rank` holds them."""
    gate, up, down = expert_tensors(shape, layer, expert)
    h, share = shape.hidden_size, shape.expert_ffn_size // etp
    mcore = f"decoder.layers.{layer}.mlp.experts.local_experts.{local}."
    rows = (etp_rank * share, (etp_rank + 1) * share)
    first = tuple(
        Piece(tensor.name, (rows, (0, h)), ((half * share, (half + 1) * share), (0, h)))
        for half, tensor in enumerate((gate, up))
    )
    second = (Piece(down.name, ((0, h), rows), ((0, h), (0, share))),)
    return (
        Parameter(mcore + "linear_fc1.weight", (2 * share, h), first, replicated=False),
        Parameter(mcore + "linear_fc2.weight", (h, share), second, replicated=False),
    )


def router_parameter(shape: ModelShape, layer: int) -> Parameter:
    tensor = router_tensor(shape, layer)
    box = tuple((0, size) for size in tensor.shape)
    name = f"decoder.layers.{layer}.mlp.router.weight"
    return Parameter(name, tensor.shape, (Piece(tensor.name, box, box),), replicated=True)


def stage_parameters(
    shape: ModelShape,
    *,
    tp: int,
    tp_rank: int,
    ep: int,
    ep_rank: int,
    etp: int,
    etp_rank: int,
    layers: range,
    first: bool,
    last: bool,
    head: bool = True,
) -> tuple[Parameter, ...]:
    """Parameters of a pipeline stage of a model with experts in every layer; the rest as `families.stage_parameters`.

    Experts are named by their number on the rank, as Megatron's modules are; pieces name them by their global number.
    """
    check_expert_parallel(shape, ep, etp)
    parameters: list[Parameter] = []
    for parameter in attention_parameters(
        shape, tp=tp, tp_rank=tp_rank, layers=layers, first=first, last=last, head=head
    ):
        parameters.append(parameter)
        if parameter.name.endswith(".pre_mlp_layernorm.weight"):
            layer = int(parameter.name.split(".")[2])
            parameters.append(router_parameter(shape, layer))
            for local, expert in enumerate(local_experts(shape, ep, ep_rank)):
                parameters += expert_parameters(shape, layer, expert, local, etp=etp, etp_rank=etp_rank)
    return tuple(parameters)


def attention_parameters(
    shape: ModelShape, *, tp: int, tp_rank: int, layers: range, first: bool, last: bool, head: bool = True
) -> Iterator[Parameter]:
    """What a stage holds beside its feed-forward parts: attention, norms, embedding and head."""
    for parameter in families.stage_parameters(
        attention_shape(shape, tp), tp=tp, tp_rank=tp_rank, layers=layers, first=first, last=last, head=head
    ):
        if not any(name in parameter.name for name in DENSE_MLP):
            yield parameter


def attention_shape(shape: ModelShape, tp: int = 1) -> ModelShape:
    """A dense shape whose feed-forward part any `tp` divides, for what experts leave unchanged."""
    return replace(shape, ffn_size=tp)
