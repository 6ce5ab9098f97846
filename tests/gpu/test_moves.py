"""Weights from trainer to engine on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import make_model
from rollout_scenarios import Setup
from scenarios import Cell

from tests.gpu.conftest import WIDE, WIDE_VOCAB
from tests.gpu.ranks import run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_arrive_bit_for_bit_in_an_engine_that_slept(wide: Path, tmp_path: Path, dtype: str) -> None:
    """SYN-01: level 2 sleep loses all weights; nothing travels on one rank."""
    target = make_model(tmp_path / "target", "Qwen2", seed=9, **WIDE)
    wrong, metrics = run(1, "tests.gpu.scenarios_gpu:move_metrics", wide, target, dtype, WIDE_VOCAB)[0]
    assert wrong == []
    assert metrics["reshard/fingerprint_ok"] == 1.0
    assert metrics["reshard/received_bytes_max"] == metrics["reshard/bound_bytes_max"] == 0


def test_halves_become_whole_replicas_on_two_ranks(tiny: Path) -> None:
    """PAR-05: two engines, each with what vLLM itself loads from the folder."""
    pair = Cell(tp=2), Setup()
    for result in run(2, "move_scenarios:exact_moves", tiny, [pair], 1 << 16):
        wrong, report = result[pair]
        assert wrong == []
        assert report.received_bytes == report.bound_bytes > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (17, 24), (131, 64), (64, 131), (300, 9000), (2048, 1536)])
def test_a_gpu_finds_the_checksum_of_the_cpu(dtype: torch.dtype, rows: int, columns: int) -> None:
    """Exact integers, whatever the device and however a box lies in memory."""
    from flowrl.resharding.fingerprint import Checksums, checksum

    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(rows + 3, columns + 5, generator=generator)
    box = ((2, 2 + rows), (4, 4 + columns))
    values, shape = whole[2 : 2 + rows, 4 : 4 + columns], (rows + 3, columns + 5)
    expected = checksum(values, box, shape, dtype)
    there = whole.to("cuda")[2 : 2 + rows, 4 : 4 + columns]
    for view in (there, there.to(dtype), there.t().contiguous().t()):
        assert int(checksum(view, box, shape, dtype)) == int(expected)
        together = Checksums([(1, view, box, shape)] * 2, 3, dtype, view.device).run()
        assert together.tolist() == [0, int(expected + expected), 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_copies_at_once_are_exact_and_write_nothing_else(dtype: torch.dtype) -> None:
    """Flat ones of all sizes, columns, rounded ones, and some that no kernel takes; to places and out of a buffer."""
    from flowrl.resharding.copies import BufferCopies, Copies, Pair

    generator = torch.Generator().manual_seed(0)
    sizes = [1, 7, 8, 64, 4096, 70001, 1 << 20]
    flat = [torch.randn(size, generator=generator).to("cuda", dtype) for size in sizes]
    wide = [torch.randn(33, 300, generator=generator).to("cuda", dtype) for _ in range(3)]
    sources = [*flat, wide[0][:, 16:160], wide[1][5:9, 3:7], wide[2].float()]
    room = [torch.full((source.numel() + 64,), 5.0, dtype=dtype, device="cuda") for source in sources]
    targets = [place[32:-32].view(source.shape) for place, source in zip(room, sources, strict=True)]
    Copies(list(zip(targets, sources, strict=True))).run()
    for place, target, source in zip(room, targets, sources, strict=True):
        assert torch.equal(target, source.to(dtype))
        assert bool((place[:32] == 5).all()) and bool((place[-32:] == 5).all())
    pairs, offset = [], 0
    for target in targets:
        pairs.append(Pair(tuple(target.shape), target.stride(), offset, target))
        offset += target.numel() + 64
    for start in (0, 1):
        buffer = torch.full((start + offset,), 5.0, dtype=dtype, device="cuda")[start:]
        BufferCopies(pairs, dtype, fills=True).run(buffer)
        found = [pair.of(buffer).clone() for pair in pairs]
        assert all(torch.equal(part, target) for part, target in zip(found, targets, strict=True))
        assert int((buffer == 5).sum()) >= 64 * len(pairs)
        for target in targets:
            target.zero_()
        BufferCopies(pairs, dtype, fills=False).run(buffer)
        assert all(torch.equal(part, target) for part, target in zip(found, targets, strict=True))
    assert all(bool((place[:32] == 5).all()) and bool((place[-32:] == 5).all()) for place in room)
