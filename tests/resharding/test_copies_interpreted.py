"""The kernel that makes many copies in one launch, run by Triton's interpreter: no GPU is needed to see what it writes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import sys
import torch
from flowrl.resharding import copies, copies_gpu
from flowrl.resharding.copies import Pair
from flowrl.resharding.copy_boxes import rows_of

# Tiles that end within a row, and programs with several of them.
copies_gpu.VECTORS, copies_gpu.programs_beside_collectives = 16, lambda device: 3
draw = torch.Generator().manual_seed(0)
room = lambda *size: torch.randn(*size, generator=draw).bfloat16()

# Buffers: a long run, columns of a matrix, rows of one, one that starts where no word does, one of another type.
wide, tall, long, odd = room(40, 96), room(24, 64), room(9000), room(50)
views = [long, wide[:, 32:64], tall[8:16], odd[1:17], room(5, 16).float()]
pairs, offset = [], 16
for view in views:
    stride = (view.shape[1], 1) if view.dim() == 2 else (1,)
    pairs.append(Pair(tuple(view.shape), stride, offset, view))
    offset += view.numel() + 16
for start in (0, 8, 3):
    for fills in (True, False):
        buffer = torch.full((start + offset,), 5.0, dtype=torch.bfloat16)[start:]
        expected = buffer.clone()
        if fills:
            for pair in pairs:
                pair.of(expected).copy_(pair.view)
        else:
            buffer.copy_(room(offset))
            expected = buffer.clone()
        made = copies.BufferCopies(pairs, torch.bfloat16, fills=fills)
        made._launch, made._rest = copies._launch_of_pairs(pairs, torch.bfloat16, fills)
        assert made._launch is not None and made._rest == (pairs[3], pairs[4])
        before = [view.clone() for view in (wide, tall, long, odd)]
        made.run(buffer, beside_collectives=start == 0)
        assert torch.equal(buffer, expected), (start, fills)
        for pair in pairs:
            assert torch.equal(pair.view, pair.of(expected).to(pair.view.dtype)), (start, fills)
        if not fills:  # what no pair names stays
            assert torch.equal(wide[:, :32], before[0][:, :32]) and torch.equal(wide[:, 64:], before[0][:, 64:])
            assert torch.equal(tall[:8], before[1][:8]) and torch.equal(tall[16:], before[1][16:])

# Places: both sides are tensors.
targets = [room(40, 64), room(9000), room(8, 64), room(3)]
sources = [room(40, 96)[:, 32:], room(9000), room(8, 64), room(3)]
launch, rest = copies._launch_of_copies(list(zip(targets, sources)))
assert len(rest) == 1
launch.run(beside_collectives=True)
assert all(torch.equal(target, source) for target, source in zip(targets[:3], sources[:3]))

# As many programs as tiles, or so many as leave a part of the device.
kernel, grids = copies_gpu._copy, []
class Grids:
    def __getitem__(self, grid):
        grids.append(grid)
        return kernel[grid]
copies_gpu._copy = Grids()
launch.run()
launch.run(beside_collectives=True)
assert grids == [(len(launch._tiles),), (3,)] and len(launch._tiles) > 3
print("exact")
"""


def test_one_launch_writes_what_single_copies_would_and_nothing_else() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "exact", done.stderr[-3000:]
