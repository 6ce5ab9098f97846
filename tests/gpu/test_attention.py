"""The kernel for packed rows gives what padded rows give, in numbers and in gradients."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.ranks import run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("lengths", [[300], [64, 64, 64], [257, 96, 95, 3, 1]], ids=["one", "equal", "mixed"])
def test_packed_kernel_agrees_with_padded_rows_in_full_precision(lengths: list[int]) -> None:
    """Rotary embeddings and repeated heads are compiled there; gradients go through all of it."""
    found, exact = run(1, "tests.gpu.scenarios_gpu:packed_attention", lengths)[0]
    for name, tensor in exact.items():
        off = (found[name].float() - tensor).abs()
        assert off.max() <= 0.03 * tensor.abs().max(), (name, off.max(), tensor.abs().max())
        assert torch.isfinite(found[name]).all(), name
