"""SYN-03: which dtypes a move accepts on each side, and in which one weights travel."""

from __future__ import annotations

import pytest
import torch

from flowrl.resharding.dtypes import side_dtype, wire_dtype
from flowrl.resharding.fingerprint import checksum

FULL, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("held", "kept", "wire"), [(FULL, FULL, FULL), (FULL, HALF, HALF), (HALF, FULL, HALF), (HALF, HALF, HALF)]
)
def test_weights_travel_in_the_narrower_dtype(held: torch.dtype, kept: torch.dtype, wire: torch.dtype) -> None:
    assert side_dtype("the engine keeps", [("a", kept), ("b", kept)]) == kept
    assert wire_dtype(held, kept) == wire


@pytest.mark.parametrize("odd", [torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_with_tensor_and_dtype(odd: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"the trainer holds b in {odd}; .*actor.dtype and rollout.dtype"):
        side_dtype("the trainer holds", [("a", FULL), ("b", odd)])


def test_a_side_of_several_dtypes_is_refused_instead_of_rounded() -> None:
    """A float32 router beside bfloat16 weights would lose bits on the wire, and both checksums would agree on it."""
    with pytest.raises(
        ValueError, match="the engine keeps tensors of several dtypes: x in torch.bfloat16, gate in torch.f"
    ):
        side_dtype("the engine keeps", [("x", HALF), ("gate", FULL), ("y", HALF)])


def test_the_proof_compares_rounded_values_bit_for_bit() -> None:
    """The trainer's float32 counts as the engine's bfloat16 would hold it: to nearest, ties to even."""
    values = torch.randn(64, 48) * 1e3
    box = ((0, 64), (0, 48))
    assert int(checksum(values, box, (64, 48), HALF)) == int(checksum(values.to(HALF), box, (64, 48), HALF))
    truncated = (values.view(torch.int32) & -65536).view(FULL)
    assert int(checksum(truncated, box, (64, 48), HALF)) != int(checksum(values, box, (64, 48), HALF))
