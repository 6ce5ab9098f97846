"""Checksums of elements with their positions."""

from __future__ import annotations

import pytest
import torch

from flowrl.resharding.fingerprint import _BLOCK_BYTES, _MAX_WEIGHT, _product, checksum
from flowrl.resharding.regions import slices_in, whole

SHAPE = (37, 24)
PARTS = [((0, 20), (0, 24)), ((20, 37), (0, 7)), ((20, 37), (7, 24))]


def of(values: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    return int(checksum(values, whole(values.shape), tuple(values.shape), dtype))


def values() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_disjoint_parts_add_up_to_the_whole(dtype: torch.dtype) -> None:
    full = values()
    parts = sum(checksum(full[slices_in(box, whole(SHAPE))], box, SHAPE, dtype) for box in PARTS)
    assert int(parts) == of(full, dtype)


def test_checksum_does_not_depend_on_strides_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    full = values()
    expected = of(full)
    assert of(full.t().contiguous().t()) == expected
    monkeypatch.setattr("flowrl.resharding.fingerprint._CHUNK_BYTES", 400)
    assert of(full) == expected


def test_checksum_is_in_the_engines_dtype() -> None:
    full = values()
    assert of(full, torch.bfloat16) == of(full.to(torch.bfloat16), torch.bfloat16) != of(full)
    assert of(full.to(torch.bfloat16), torch.float32) == of(full.to(torch.bfloat16).float())


def test_one_changed_bit_and_two_exchanged_elements_are_seen() -> None:
    full = values()
    expected = of(full)
    flipped = full.clone()
    flipped.view(torch.int32)[5, 7] ^= 1
    exchanged = full.clone()
    exchanged[3, 4], exchanged[4, 3] = full[4, 3], full[3, 4]
    rows = full.roll(1, 0)
    assert len({expected, of(flipped), of(exchanged), of(rows), of(-full)}) == 5


def test_scalars_and_vectors_have_checksums() -> None:
    assert of(torch.tensor(1.0)) == of(torch.ones(1)) != of(torch.zeros(1))


def test_wrong_shape_and_dtype_are_errors() -> None:
    with pytest.raises(ValueError, match="are not the box"):
        checksum(values(), ((0, 3), (0, 3)), SHAPE, torch.float32)
    with pytest.raises(ValueError, match="no fingerprint of torch.float16"):
        of(values(), torch.float16)


def test_wide_rows_are_cut_anywhere() -> None:
    wide = torch.randn(3, 20011, generator=torch.Generator().manual_seed(2))
    parts = [((0, 3), (0, 7001)), ((0, 3), (7001, 16384)), ((0, 3), (16384, 20011))]
    found = sum(checksum(wide[slices_in(box, whole(wide.shape))], box, (3, 20011), torch.float32) for box in parts)
    assert int(found) == of(wide)


def test_every_single_bit_counts() -> None:
    full = values()
    seen = {of(full)}
    for number in range(full.numel()):
        flipped = full.clone()
        flipped.view(torch.int32).view(-1)[number] ^= 1 << (number % 31)
        seen.add(of(flipped))
    assert len(seen) == 1 + full.numel()


def test_products_of_bytes_are_exact_at_their_limits() -> None:
    for byte in (-128, 127):
        matrix = torch.full((40, _BLOCK_BYTES), byte, dtype=torch.int8)
        for weight in (-_MAX_WEIGHT, _MAX_WEIGHT):
            weights = torch.full((_BLOCK_BYTES, 16), weight, dtype=torch.int8)
            assert (_product(matrix, weights) == byte * weight * _BLOCK_BYTES).all()
