"""The benchmark of weight moves: its words, its truth, its baselines' arithmetic, its report, and one real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.resharding import benchmark
from flowrl.resharding.baselines import cut_forms, parameter_forms, whole_tensors
from flowrl.resharding.families import HFTensor, hf_tensors
from flowrl.resharding.measure import report
from flowrl.resharding.measure.options import (
    BASELINES,
    check_memory,
    check_model,
    parse_options,
    refit_refusal,
)
from flowrl.resharding.measure.rounds import Seen, Timed, as_json, make_row, p95, slowest
from flowrl.resharding.measure.truth import IndexCoded, differs, fill
from flowrl.resharding.ranks import ParallelSizes
from flowrl.resharding.shapes import SHAPES

GIVEN = ["world=8", "model=llama-1b", "train=tp4pp2", "rollout=tp2,tp4", "out=bench"]
ROW_FIELDS = [
    "engine",
    "model",
    "world",
    "train",
    "rollout",
    "received_bytes_max",
    "received_bytes_mean",
    "bound_bytes_max",
    "ratio_to_bound",
    "node_import_ratio",
    "peak_extra_bytes_max",
    "largest_temporary_bytes",
    "num_collectives",
    "num_copies",
    "plan_seconds",
    "seconds_median",
    "seconds_p95",
    "stage_seconds",
    "gb_per_second",
    "bit_exact",
    "fingerprint_ok",
    "fingerprint_seconds",
    "installed_bytes_max",
    "install_gb_per_second",
    "copy_gb_per_second",
]
TINY = SHAPES["llama-tiny"]


def with_word(word: str) -> list[str]:
    """The command line with one word instead of the one of the same key."""
    return [given for given in GIVEN if given.split("=")[0] != word.split("=")[0]] + [word]


def test_options_have_defaults_and_a_list_of_layouts() -> None:
    options = parse_options(GIVEN)
    assert [layout.text for layout in options.rollouts] == ["tp2", "tp4"]
    assert (options.world, options.repeat, options.dtype, options.against) == (8, 10, "bfloat16", ())
    assert parse_options([*GIVEN, "against=all"]).against == BASELINES
    some = parse_options([*GIVEN, "against=gather_all,per_tensor_gather"])
    assert some.against == ("per_tensor_gather", "gather_all")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("world=0", "world=0 must be a whole number"),
        ("world=99999999", "must be a whole number of at least 1 and at most 16384"),
        ("repeat=0", "repeat=0 must be a whole number of at least 1"),
        ("against=,", "no baseline ''"),
        ("world=6", "6 ranks cannot be cut into train tp x cp x pp = 8"),
        ("train=tp4pq2", "'pq2' is no size"),
        ("train=tp2dp2", "2 x dp=2 ranks and world=8"),
        ("train=tp4cp2", "the benchmark runs tp, pp, ep, etp and dp"),
        ("rollout=tp3", "8 ranks cannot be cut into rollout tp x pp = 3"),
        ("against=verl", "no baseline 'verl'; known: all, per_tensor_gather"),
        ("repeat=x", "repeat=x must be a whole number"),
        ("dtype=float16", "known: float32, bfloat16"),
        ("device=tpu", "known: cpu, cuda"),
        ("repeats=3", "did you mean repeat=...?"),
    ],
)
def test_a_wrong_word_is_named(word: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_options(with_word(word))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "missing: world=..., model=..., train=..., rollout=..."),
        (with_word("model=nowhere"), "neither a folder nor a named shape"),
        (with_word("model=deepseek-v3"), "cannot be built here"),
        (with_word("out=/proc/none"), "out=/proc/none cannot be written: No such file or directory"),
        ([*GIVEN[:2], "train=tp4ep2", *GIVEN[3:]], "train tp4ep2: "),
        (with_word("model=llama-70b"), "this machine has"),
        ([*with_word("device=cuda"), "repeat=1"], "device=cuda needs a GPU for each of world=8 ranks"),
    ],
)
def test_bad_input_exits_2_with_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [word if word != "out=bench" else f"out={tmp_path}" for word in words]
    assert benchmark.main(words) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.startswith("error: ") and shown.count("\n") == 1


def test_layouts_that_do_not_cut_the_model_are_refused() -> None:
    options = parse_options(with_word("rollout=tp8"))
    with pytest.raises(ValueError, match="train tp4pp2: tp=4 does not divide"):
        check_model(replace(TINY, heads=6, kv_heads=2), options)
    with pytest.raises(ValueError, match="1 layers in stages of 1 leave nothing for the last of pp=2"):
        check_model(replace(TINY, num_layers=1), options)
    check_model(replace(TINY, num_layers=5), options)
    three = parse_options(["world=3", "model=llama-1b", "train=tp3", "rollout=tp3", "out=bench"])
    with pytest.raises(ValueError, match="rollout tp3: the vocabulary of 128 rows .* cannot be cut into 3 parts"):
        check_model(replace(TINY, heads=6, kv_heads=3, vocab_size=100), three)


def test_memory_is_counted_before_anything_starts() -> None:
    options = parse_options(GIVEN)
    shape, rollout = SHAPES["llama-1b"], options.rollouts[0]
    check_memory(shape, options, rollout, 24 << 30)
    with pytest.raises(ValueError, match=r"8 ranks x \(0.28 GB trained \+ 1.10 GB generating"):
        check_memory(shape, options, rollout, 8 << 30)
    assert "= 31.2 GB" in str(refit_refusal(shape, options, rollout, 24 << 30))
    assert refit_refusal(shape, options, rollout, 64 << 30) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_coded_values_depend_on_tensor_and_index_only(dtype: torch.dtype) -> None:
    truth = IndexCoded([HFTensor("a", (40, 30)), HFTensor("b", (40, 30)), HFTensor("c", (50,))])
    whole = truth.values("a", ((0, 40), (0, 30)), dtype)
    assert whole.isfinite().all() and whole.unique().numel() > 1000
    assert torch.equal(truth.values("a", ((7, 19), (4, 30)), dtype), whole[7:19, 4:])
    assert not torch.equal(truth.values("b", ((0, 40), (0, 30)), dtype), whole)
    held = torch.empty(12, 26, dtype=dtype)
    fill(held, truth, "a", ((7, 19), (4, 30)))
    assert not differs(held, truth, "a", ((7, 19), (4, 30)))
    held[3, 5] = -held[3, 5]
    assert differs(held, truth, "a", ((7, 19), (4, 30)))
    assert truth.values("c", ((10, 20),), dtype).shape == (10,)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (TINY, ParallelSizes()),
        (TINY, ParallelSizes(tp=4, pp=2)),
        (replace(TINY, tied=True, qkv_bias=True, kv_heads=2), ParallelSizes(tp=4, pp=2)),
        (replace(TINY, qk_norm=True), ParallelSizes(tp=2, pp=4)),
        (SHAPES["qwen3-moe-tiny"], ParallelSizes(tp=2, ep=4)),
        (SHAPES["mixtral-tiny"], ParallelSizes(pp=2, ep=2, etp=2)),
    ],
)
def test_baselines_put_whole_tensors_together_from_shards(shape: Any, sizes: ParallelSizes) -> None:
    tensors = hf_tensors(shape)
    truth = IndexCoded(tensors)
    found: dict[str, torch.Tensor] = {}
    for form in (form for stage in parameter_forms(shape, sizes) for form in stage):
        shards = [torch.zeros(parameter.shape) for parameter in form.parts]
        for parameter, shard in zip(form.parts, shards, strict=True):
            for piece in parameter.pieces:
                view = shard[tuple(slice(*interval) for interval in piece.target)]
                fill(view, truth, piece.tensor, piece.source)
        used = 1 if form.replicated else len(shards)
        found |= dict(whole_tensors(form.parts[:used], shards[:used]))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {t.name: t.shape for t in tensors}
    for name, tensor in found.items():
        assert not differs(tensor, truth, name, tuple((0, size) for size in tensor.shape))


def test_baselines_buckets_hold_every_parameter_once_and_not_too_much() -> None:
    forms = parameter_forms(SHAPES["qwen3-moe-tiny"], ParallelSizes(tp=2, ep=4))[0]
    buckets = cut_forms(forms, 20_000)
    assert [form for bucket in buckets for form in bucket] == list(forms)
    sizes = [[form.numel * len(form.parts) for form in bucket] for bucket in buckets]
    assert all(sum(bucket) <= 20_000 or len(bucket) == 1 for bucket in sizes)
    assert all(len({form.expert for form in bucket}) == 1 for bucket in buckets)


def seen(received: int, bound: int, **other: Any) -> Seen:
    values: dict[str, Any] = dict(
        peak_extra_bytes=5, largest_temporary_bytes=3, num_collectives=1, num_copies=2, installed_bytes=8, plan_seconds=0.1, bit_exact=True,
        fingerprint_ok=True,
    )  # fmt: skip
    return Seen(received, bound, **(values | other))


LABELS = dict(model="m", world=2, train="tp2", rollout="tp1")


def test_a_row_takes_the_worst_rank() -> None:
    row = make_row("flowrl", LABELS, [seen(10, 10), seen(30, 20, bit_exact=False)], [0.1, 0.3, 0.2], {"move": 0.1})
    assert (row.received_bytes_max, row.received_bytes_mean, row.bound_bytes_max) == (30, 20, 20)
    assert (row.ratio_to_bound, row.bit_exact, row.fingerprint_ok) == (1.5, False, True)
    assert (row.seconds_median, row.seconds_p95) == (0.2, 0.3)
    assert row.gb_per_second == pytest.approx(30 / 0.2 / 1e9)


def test_the_ratio_is_one_where_nothing_moves_and_absent_where_nothing_had_to() -> None:
    assert make_row("flowrl", LABELS, [seen(0, 0)], [0.1], {}).ratio_to_bound == 1.0
    assert make_row("gather_all", LABELS, [seen(4, 0)], [0.1], {}).ratio_to_bound is None
    assert make_row("megatron_refit", LABELS, [seen(0, 0, fingerprint_ok=None)], [0.1], {}).fingerprint_ok is None


def test_rounds_count_the_slowest_rank() -> None:
    rounds = [[Timed(1.0, {"tp": 0.9}), Timed(2.0, {"tp": 1.5})], [Timed(3.0, {"tp": 2.0, "pp": 1.0}), Timed(1.0, {})]]
    seconds, stages = slowest(rounds)
    assert seconds == [3.0, 2.0]
    assert stages == {"tp": 1.75, "pp": 0.5}
    assert p95([float(value) for value in range(1, 101)]) == 95.0 and p95([2.0, 1.0]) == 2.0


def test_the_report_has_the_fields_that_readers_parse(tmp_path: Path) -> None:
    rows = [
        make_row(name, LABELS, [seen(10, 5), seen(4, 0)], [0.1, 0.2], {"pp": 0.1}) for name in ("flowrl", "gather_all")
    ]
    measured = [(as_json(row), [0.1, 0.2]) for row in rows]
    skipped = [{"engine": "megatron_refit", "rollout": "tp1", "reason": "needs 40 GB"}]
    report.write(tmp_path / "new", "a title", report.results(measured, skipped, "cpu"), measured)
    content = json.loads((tmp_path / "new" / "results.json").read_text())
    assert {"hardware", "versions", "commit", "date", "rows"} <= content.keys()
    assert all(list(row) == ROW_FIELDS for row in content["rows"])
    assert os.uname().nodename not in json.dumps(content["hardware"])
    text = (tmp_path / "new" / "results.md").read_text()
    assert "| tp1 | gather_all |" in text and "no bound" in text and "needs 40 GB" in text
    assert report.sentence(measured[0][0]) == "flowrl to tp1: 1e-05 MB in 150.00 ms, 0.00 GB/s, exact"
    assert (tmp_path / "new" / "results.png").stat().st_size > 5000


def test_the_command_measures_every_engine_on_real_processes(tmp_path: Path) -> None:
    """PAR-04: every engine writes vLLM's (or Megatron-core's) parameters bit for bit; flowrl receives the bound."""
    command = [sys.executable, "-m", "flowrl.resharding.benchmark", "world=2", "model=llama-tiny", "train=tp2"]
    command += ["rollout=tp1", "against=all", "repeat=1", "device=cpu", f"out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {row["engine"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    assert list(rows) == ["flowrl", *BASELINES]
    assert all(list(row) == ROW_FIELDS and row["bit_exact"] for row in rows.values())
    proven = {name: row["fingerprint_ok"] for name, row in rows.items() if row["fingerprint_ok"] is not None}
    assert proven == {"flowrl": True, "vanilla_grouping": True}
    assert rows["flowrl"]["received_bytes_max"] == rows["flowrl"]["bound_bytes_max"] > 0
    assert all(row["ratio_to_bound"] >= 1.0 for row in rows.values())
    sizes = [prod(tensor.shape) * 2 for tensor in hf_tensors(TINY)]
    # Half of every tensor, but all of what both ranks hold alike.
    assert (
        rows["per_tensor_gather"]["received_bytes_max"]
        == sum(size // 2 for size, tensor in zip(sizes, hf_tensors(TINY), strict=True) if len(tensor.shape) == 2)
        + 32 // 2 * 64 * 2 * 2
    )
