"""The kernels, compiled for GPUs on a machine without one: what a compiler refuses or does silently is seen early."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
backends = pytest.importorskip("triton.backends.compiler")

A100, H100 = 80, 90


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier run compiled would be found again."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: Any, types: Mapping[str, str], constants: Mapping[str, int], capability: int) -> str:
    """The kernel's PTX; its machine code is made too."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = triton.compiler.ASTSource(
        fn=kernel, signature=signature, constexprs={(kernel.arg_names.index(n),): v for n, v in constants.items()}
    )
    made = triton.compile(source, target=backends.GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert made.asm["cubin"]
    text: str = made.asm["ptx"]
    return text


def accesses(ptx: str, kind: str) -> set[str]:
    """The widths of loads (`ld`) or stores (`st`) of the device's memory."""
    return {found.split(".", 2)[2] for found in re.findall(rf"\b{kind}\.global\S*", ptx)}


@pytest.mark.parametrize("capability", (A100, H100))
@pytest.mark.parametrize("base", ("i32", "i64"))
def test_copies_move_16_bytes_at_a_time(capability: int, base: str) -> None:
    """A base that is 0 comes as 32 bits, an address as 64."""
    from flowrl.resharding import copies_gpu

    types = {"tiles": "*i64", "boxes": "*i64", "target_base": base, "source_base": "i64", "num_tiles": "i32"}
    constants = {"fields": copies_gpu._FIELDS, "at_once": copies_gpu.VECTORS}
    ptx = compiled(copies_gpu._copy, types, constants, capability)
    assert accesses(ptx, "st") == {"v4.b32"}
    assert accesses(ptx, "ld") == {"v4.b32", "b64"}, "the tables are numbers of 64 bits"
    assert ".local" not in ptx


@pytest.mark.parametrize(("multiprocessors", "programs"), [(132, 79), (108, 64), (1, 1)])
def test_copies_beside_collectives_leave_some_multiprocessors(
    monkeypatch: pytest.MonkeyPatch, multiprocessors: int, programs: int
) -> None:
    from flowrl.resharding import copies_gpu

    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(multi_processor_count=multiprocessors)
    )
    assert copies_gpu.programs_beside_collectives(torch.device("cuda")) == programs


@pytest.mark.parametrize("capability", (A100, H100))
def test_checksums_multiply_on_tensor_cores(capability: int) -> None:
    from flowrl.resharding import fingerprint, fingerprint_gpu

    types = {"tiles": "*i64", "boxes": "*i64", "row_weights": "*i64", "sketches": "*i8", "mixer": "*i64"}
    types |= {"cells": "*i64", "sketch_stride": "i32"}
    constants = {
        "fields": fingerprint_gpu._FIELDS, "rows_at_once": fingerprint_gpu.ROWS,
        "columns_at_once": fingerprint_gpu.COLUMNS, "longest": fingerprint_gpu.LONGEST,
        "num_sketches": fingerprint._SKETCHES,
    }  # fmt: skip
    ptx = compiled(fingerprint_gpu._add_checksums, types, constants, capability)
    assert re.search(r"mma\S*\.s32\.s8\.s8", ptx) and ".local" not in ptx


@pytest.mark.parametrize("capability", (A100, H100))
def test_sampling_keeps_its_numbers_in_registers(capability: int) -> None:
    from flowrl.workers import sampling_gpu

    types = {"probs": "*fp32", "seeds": "*i64", "tokens": "*i64", "vocab": "i32", "stride": "i32"}
    ptx = compiled(sampling_gpu._draw, types, {"block": sampling_gpu.BLOCK}, capability)
    assert accesses(ptx, "st") == {"b64"}, "one id per row"
    assert ".local" not in ptx
