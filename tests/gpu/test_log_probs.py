"""Engine, trainer and transformers agree about the tokens that the engine sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import WIDE_VOCAB
from tests.gpu.ranks import run

pytestmark = pytest.mark.gpu
TINY_VOCAB = 131


def differences(folder: Path, num_ids: int, dtype: str, *, graphs: bool = False) -> dict[str, torch.Tensor]:
    """|log-prob - that of transformers in float32| by token."""
    found = run(1, "tests.gpu.scenarios_gpu:three_log_probs", folder, num_ids, dtype, graphs)[0]
    exact = found.pop("exact")
    return {name: (values - exact).abs() for name, values in found.items()}


@pytest.mark.parametrize("size", ["tiny", "wide"])
def test_all_three_agree_in_full_precision(request: pytest.FixtureRequest, size: str) -> None:
    """ROL-01: at a temperature. Workers have Triton's products whole; by default it shortens the mantissas of float32."""
    off = differences(request.getfixturevalue(size), {"tiny": TINY_VOCAB, "wide": WIDE_VOCAB}[size], "float32")
    for name in ("trainer", "engine"):
        assert off[name].max() <= 1e-4, (name, off[name].max())


@pytest.mark.parametrize("size", ["tiny", "wide"])
def test_all_three_round_alike_in_bfloat16(request: pytest.FixtureRequest, size: str) -> None:
    """ROL-01: trainer and engine are no further from the exact values than transformers is, up to chance."""
    folder = request.getfixturevalue(size)
    off = differences(folder, {"tiny": TINY_VOCAB, "wide": WIDE_VOCAB}[size], "bfloat16", graphs=size == "wide")
    for name in ("trainer", "engine"):
        assert off[name].mean() <= 2 * off["transformers"].mean() + 1e-3, (name, off[name].mean())
