"""What the recorder learns from a loader, with a loader small enough to see through."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from flowrl.resharding.families import HFTensor
from flowrl.resharding.recorder import Region, check_names, place_of, record

TENSORS = (HFTensor("embed", (5, 4)), HFTensor("gate", (6, 4)), HFTensor("up", (6, 4)), HFTensor("out", (4, 6)))


class Loader:
    """Second of two tensor-parallel ranks: a padded vocabulary, a fused gate and up, a projection split by columns."""

    def __init__(self) -> None:
        self.parameters = {
            "embed": torch.full((4, 4), 7.0),
            "gate_up": torch.full((6, 4), 7.0),
            "out": torch.full((4, 3), 7.0),
        }

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "embed":
                self.parameters["embed"][:1].copy_(weight.narrow(0, 4, 1))
            elif name in ("gate", "up"):
                start = 3 * (name == "up")
                self.parameters["gate_up"].narrow(0, start, 3).copy_(weight.chunk(2, dim=0)[1])
            elif name == "out":
                self.parameters["out"].copy_(weight.to(torch.float32)[:, 3:6])
            elif name == "scaled":
                self.parameters["out"].copy_(weight[:, :3] * 2)
            elif name == "turned":
                self.parameters["out"].copy_(weight.t())
            else:
                raise KeyError(name)


def test_regions_say_which_elements_land_where() -> None:
    loader = Loader()
    recording = record(loader.load, loader.parameters, TENSORS)
    assert recording.regions == (
        Region("embed", ((4, 5), (0, 4)), "embed", 0, (4, 1)),
        Region("gate", ((3, 6), (0, 4)), "gate_up", 0, (4, 1)),
        Region("up", ((3, 6), (0, 4)), "gate_up", 12, (4, 1)),
        Region("out", ((0, 4), (3, 6)), "out", 0, (3, 1)),
    )
    assert all(bool((parameter == 7).all()) for parameter in loader.parameters.values()), "recording wrote something"


def test_copying_by_the_recording_equals_loading() -> None:
    loader, direct = Loader(), Loader()
    tensors = {tensor.name: torch.randn(tensor.shape) for tensor in TENSORS}
    for region in record(loader.load, loader.parameters, TENSORS).regions:
        box = tuple(slice(*interval) for interval in region.box)
        place_of(region, loader.parameters[region.parameter]).copy_(tensors[region.tensor][box])
    direct.load(tensors.items())
    assert all(torch.equal(loader.parameters[name], direct.parameters[name]) for name in direct.parameters)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (HFTensor("other", (2, 2)), "refuses other"),
        (HFTensor("gate", (6, 5)), r"refuses gate \[6, 5\]"),
        (HFTensor("scaled", (4, 6)), "computes mul on scaled"),
        (HFTensor("turned", (3, 4)), "other than a box of turned"),
    ],
)
def test_what_cannot_be_recorded_is_refused_by_name(tensor: HFTensor, message: str) -> None:
    loader = Loader()
    with pytest.raises(ValueError, match=message):
        record(loader.load, loader.parameters, (*TENSORS[:3], tensor))


def test_a_parameter_that_no_tensor_fills_is_an_error() -> None:
    loader = Loader()
    with pytest.raises(ValueError, match=r"do not fill 1 parameters of the engine: out \[4, 3\]; they would keep what"):
        record(loader.load, loader.parameters, TENSORS[:3])
    with pytest.raises(ValueError, match=r"do not fill 1 parameters of the engine: gate_up \[6, 4\]"):
        record(loader.load, loader.parameters, (TENSORS[0], TENSORS[2], TENSORS[3]))


def test_scales_of_a_quantised_engine_are_named() -> None:
    loader = Loader()
    loader.parameters |= {f"layer{n}.input_scale": torch.ones(1) for n in range(7)}
    with pytest.raises(
        ValueError, match=r"7 parameters of the engine: layer0.input_scale \[1\], .* and 2 more; .*quantised"
    ):
        record(loader.load, loader.parameters, TENSORS)


def test_a_parameter_of_another_dtype_is_named() -> None:
    """SYN-03: it would be filled with values that were rounded on the way."""
    loader = Loader()
    loader.parameters["out"] = loader.parameters["out"].bfloat16()
    with pytest.raises(ValueError, match="several dtypes: embed in torch.float32, out in torch.bfloat16"):
        record(loader.load, loader.parameters, TENSORS)


def test_names_and_shapes_must_be_the_same_set() -> None:
    """SYN-03: dropped, renamed, transposed and repeated tensors are listed by name."""
    expected = {tensor.name: tensor.shape for tensor in TENSORS}
    good = list(expected.items())
    check_names(expected, good)
    for bad, message in (
        (good[1:], "1 missing: embed"),
        ([*good[1:], ("embedding", (5, 4))], "1 missing: embed; 1 unexpected: embedding"),
        ([*good, good[2]], "1 given twice: up"),
        ([*good[:3], ("out", (6, 4))], r"1 of another shape: out \[6, 4\] instead of \[4, 6\]"),
    ):
        with pytest.raises(ValueError, match=message):
            check_names(expected, bad)
