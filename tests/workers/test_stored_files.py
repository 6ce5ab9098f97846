"""A role's files name nothing that runs, and what is not flowrl's is refused before it does anything."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from processes import run
from scenarios import Cell
from state_scenarios import Trip, take_over, write_trips
from test_update import with_old_log_probs
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from flowrl.protocol import DataProto
from flowrl.workers import megatron_private_files
from flowrl.workers.stored_files import StoredReader, cover_problem, logical_tensors, read_common


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.path}",)


class Writer(dcp.FileSystemWriter):
    """Like Megatron-core's, it does not note where it wrote."""

    def storage_meta(self) -> None:
        return None


@pytest.fixture(scope="module")
def stored(model_folder: dict[str, Path], batch: DataProto, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An actor's folder, of a Qwen3."""
    target = tmp_path_factory.mktemp("stored")
    run(1, write_trips, model_folder["Qwen3"], [Trip(Cell(), Cell())], with_old_log_probs(batch), target)
    return target / "0"


def copy_of(stored: Path, target: Path) -> Path:
    target.mkdir()
    for file in stored.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_tensors_come_in_order_in_buckets_each_with_memory_of_its_own(stored: Path) -> None:
    """As the head of a tied model that its folder spells out needs it."""
    key, other = "weight.model.embed_tokens.weight", "weight.model.norm.weight"
    buckets = list(StoredReader(stored).buckets([key, other, key, key], bucket_bytes=1 << 16))
    assert [[name for name, _ in bucket] for bucket in buckets] == [[key, other], [key], [key]]
    tensors = [tensor for bucket in buckets for name, tensor in bucket if name == key]
    assert len({tensor.data_ptr() for tensor in tensors}) == 3 and torch.equal(tensors[0], tensors[2])
    assert [len(bucket) for bucket in StoredReader(stored).buckets([key, other], bucket_bytes=1)] == [1, 1]


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_pickle_that_would_run_something_is_refused(stored: Path, tmp_path: Path, name: str) -> None:
    """Nothing unverified is unpickled: neither by flowrl's readers nor by those of Megatron-core underneath."""
    made = tmp_path / "made"
    folder = copy_of(stored, tmp_path / "copy")
    if name == "common.pt":
        torch.save({"common": Evil(made)}, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(Evil(made)))
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        read_common(folder)
        len(StoredReader(folder).tensors)
    with pytest.raises(ValueError, match="posix.system, which no checkpoint of flowrl contains"):
        (folder / ".metadata").write_bytes(pickle.dumps(Evil(made)))
        megatron_private_files._reader(folder).read_metadata()
    assert not made.exists()
    pickle.loads(pickle.dumps(Evil(made)))
    assert made.exists(), "the pickle of this test does nothing, so the test says nothing"


def test_boxes_that_are_no_tensors_are_refused(stored: Path, tmp_path: Path) -> None:
    """torch opens them with weights_only."""
    folder, made = copy_of(stored, tmp_path / "copy"), tmp_path / "made"
    reader = StoredReader(folder)
    torch.save(Evil(made), folder / "evil.pt")
    evil = (folder / "evil.pt").read_bytes()
    metadata = reader.read_metadata()
    for index, where in metadata.storage_data.items():
        if index.fqn == "weight.model.norm.weight":
            where.offset, where.length = (folder / where.relative_path).stat().st_size, len(evil)
            with (folder / where.relative_path).open("ab") as file:
                file.write(evil)
    with pytest.raises(ValueError, match="posix.system"):
        list(reader.buckets(["weight.model.norm.weight"]))
    assert not made.exists()


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((4, 6), [((0, 0), (4, 3)), ((0, 3), (4, 3))], ""),
        ((4, 6), [((2, 0), (2, 6)), ((0, 0), (2, 2)), ((0, 2), (2, 4))], ""),
        ((), [((), ())], ""),
        ((0, 3), [], ""),
        ((4,), [], "its boxes cover 0 of 4 elements"),
        ((4,), [((0,), (3,))], "its boxes cover 3 of 4 elements"),
        ((4, 2), [((0, 0), (2, 2)), ((1, 0), (2, 2))], r"boxes at [0, 0] and [1, 0] overlap"),
        ((4,), [((1,), (4,))], "a box at [1] of [4] is not inside"),
        ((4,), [((-1,), (4,))], "a box at [-1] of [4] is not inside"),
        ((4,), [((0, 0), (4, 1))], "a box at [0, 0] of [4, 1] is not inside"),
        ((-4,), [], "its size is negative"),
        ((2**50,), [((0,), (4,))], f"its boxes cover 4 of {2**50} elements"),
    ],
)
def test_boxes_cover_a_tensor_once(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], problem: str
) -> None:
    assert cover_problem(shape, boxes) == problem


def enlarge(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["a"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.size = entry.chunks[0].sizes = torch.Size([2**50])


def place(**where: object) -> Callable[[Metadata], None]:
    def harm(metadata: Metadata) -> None:
        for entry in metadata.storage_data.values():
            vars(entry).update(where)

    return harm


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda metadata: metadata.state_dict_metadata["a"].chunks.clear(), "its boxes cover 0 of 8 elements"),
        (lambda metadata: metadata.storage_data.clear(), "KeyError"),
        (enlarge, "a box of .* bytes"),
        (place(length=2**50), "too short"),
        (place(offset=-1), "lies at -1"),
        (place(relative_path="/etc/passwd"), "'/etc/passwd' leaves the folder"),
        (place(relative_path="../a/__0_0.distcp"), "leaves the folder"),
    ],
)
def test_a_table_that_its_files_do_not_bear_out_is_refused(
    tmp_path: Path, harm: Callable[[Metadata], None], problem: str
) -> None:
    """Before memory is allocated, which nothing would fill."""
    folder = tmp_path / "a"
    dcp.save({"a": torch.arange(8.0)}, storage_writer=Writer(folder), no_dist=True)
    [(_, tensor)] = logical_tensors(folder)
    assert torch.equal(tensor, torch.arange(8.0))
    metadata = StoredReader(folder).read_metadata()
    harm(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=problem):
        list(logical_tensors(folder))


def test_parts_of_megatron_that_saving_and_reading_build_on_are_there(stored: Path) -> None:
    """Fails loudly where another version has other ones."""
    assert filesystem_async._results_queue is None
    assert callable(filesystem_async.FileSystemWriterAsync.write_preloaded_data.__wrapped__)
    assert torch_strategies._get_filesystem_reader.__code__.co_varnames[:2] == ("checkpoint_dir", "cache_metadata")
    assert "_get_filesystem_reader" in torch_strategies.TorchDistLoadShardedStrategy.load.__code__.co_names
    kinds = {key.partition(".")[0] for key, _ in logical_tensors(stored)}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq", "rng"}


def test_what_does_not_fit_the_role_is_named_before_anything_changes(
    model_folder: dict[str, Path], stored: Path, tmp_path: Path
) -> None:
    """RES-02: nothing is silently left as it was: missing, unexpected and odd tensors, another type, a critic's files."""
    bare = copy_of(stored, tmp_path / "bare")
    (bare / ".metadata").unlink()
    asked = [("Qwen3", "actor", "bfloat16", stored), ("Llama", "actor", "float32", stored)]
    asked += [("Qwen3", "critic", "float32", stored), ("Qwen3", "actor", "float32", bare)]
    asked += [("Qwen2", "actor", "float32", stored)]
    [said] = run(1, take_over, [(model_folder[family], *rest) for family, *rest in asked])
    assert "44 missing" in said[0] or "missing: exact.lm_head.weight" in said[0]
    assert "torch.float32 instead of [" in said[0] and "torch.bfloat16" in said[0]
    assert "24 unexpected: exp_avg.model.layers.0.self_attn.k_norm.weight" in said[1]
    assert "3 missing: exp_avg.value_head.weight, exp_avg_sq.value_head.weight, weight.value_head.weight" in said[2]
    assert "3 unexpected: exp_avg.lm_head.weight" in said[2]
    assert ".metadata cannot be read: No such file" in said[3]
    assert "[131, 64] torch.float32 instead of [131, 128]" in said[4]
