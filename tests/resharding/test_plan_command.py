"""The planning command: words in, a table and JSON out, exit code 2 with one message for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.config.model_shape import read_model_shape
from flowrl.resharding.plan.__main__ import main
from flowrl.resharding.plan.options import parse_layout, parse_options
from flowrl.resharding.ranks import ParallelSizes
from flowrl.resharding.shapes import SHAPES, planned_shape

TINY = ["model=llama-tiny", "train=tp4pp2", "world=8"]


def test_layout_strings_are_sizes_in_any_order() -> None:
    layout = parse_layout("train", "tp8pp4dp4")
    assert (layout.sizes, layout.replicas) == (ParallelSizes(tp=8, pp=4), 4)
    assert parse_layout("train", "pp16ep16etp2").sizes == ParallelSizes(pp=16, ep=16, etp=2)
    assert parse_layout("train", "vpp2cp2tp1pp2").sizes == ParallelSizes(pp=2, cp=2, vpp=2)
    assert parse_layout("rollout", "tp8ep8").sizes == ParallelSizes(tp=8, ep=8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=llama-tiny", "train=tp4pp2"], "missing: rollout="),
        ([*TINY, "rollout=tp2", "modle=x"], r"unknown argument 'modle=x'; did you mean model"),
        ([*TINY, "rollout=tp2", "world=8"], r"world is given twice: 8 and 8"),
        ([*TINY, "rollout=2"], r"rollout=2: '2' is no size; write sizes one after another, such as tp8pp4"),
        ([*TINY, "rollout=tp2xp3"], r"rollout=tp2xp3: 'xp3' is no size"),
        ([*TINY, "rollout=tp2,"], r"rollout=: '' is no size"),
        ([*TINY, "rollout=tp0"], r"tp0=0 must be a whole number of at least 1"),
        ([*TINY, "rollout=tp2tp4"], r"tp4 is given twice"),
        ([*TINY, "rollout=tp2etp2"], r"a rollout layout has no etp; it has tp, pp, ep, dp"),
        (["model=llama-tiny", "train=tp4pp2", "rollout=tp2"], r"add dp<replicas> to it or give world=<a multiple of 8>"),
        (["model=llama-tiny", "train=tp4dp3", "world=8", "rollout=tp2"], r"4 x dp=3 = 12 ranks and world=8; make them equal"),
        ([*TINY, "rollout=tp2dp2"], r"rollout=tp2dp2 are 2 x dp=2 = 4 ranks and world=8"),
        ([*TINY, "rollout=tp2", "nic_gb_s=fast"], r"nic_gb_s=fast is not a number"),
        ([*TINY, "rollout=tp2", "link_gb_s=0"], r"link_gb_s=0 must be from 1e-6 to 1e6 GB/s"),
        ([*TINY, "rollout=tp2", "nic_gb_s=nan"], r"nic_gb_s=nan must be from"),
        ([*TINY, "rollout=tp2", "gpus_per_node=1.5"], r"gpus_per_node=1.5 must be a whole number"),
        ([*TINY, "rollout=tp2", "gpus_per_node=\u0668"], r"gpus_per_node=\u0668 must be a whole number"),
        ([*TINY, "rollout=tp2", "bucket_bytes=1e300"], r"bucket_bytes=1e300 must be a whole number"),
        ([*TINY, "rollout=tp2", "bucket_bytes=99"], r"bucket_bytes=99 is too small: .* can be \d+ bytes here; give more, such as"),
        ([*TINY, "rollout=tp2", "out="], r"out= is empty; give a value or leave it out"),
        ([*TINY, "rollout=tp2", "out=a\0b"], r"has a null character"),
        ([*TINY, "rollout=tp2", "out=~nobody-of-this-name/x"], r"out=~nobody-of-this-name/x cannot be written: there is no user 'nobody-of-this-name'"),
        (["model=~nobody-of-this-name/x", "train=dp2", "rollout=tp2"], r"neither a folder nor a named shape"),
        (["model=llama-tiny", "train=dp2", "world=0", "rollout=tp2"], r"world=0 must be a whole number of at least 1 and at most 16384"),
        (["model=llama-tiny", "train=tp1", "world=99999999999999999999999", "rollout=tp2"], r"and at most 16384"),
        (["model=llama-tiny", "train=tp2dp16384", "rollout=tp2"], r"train=tp2dp16384 are 32768 ranks; .* at most 16384"),
        (["model=llama-tiny", "train=tp99999999999999999999", "rollout=tp2"], r"must be a whole number of at least 1 and at most"),
        (["model=llama-tiny", "train=tp\u0662dp1", "rollout=tp2"], r"is no size; write sizes one after another"),
        (["model=llama-tiny", "train=tp4pp2", "world=7", "rollout=tp2"], r"7 ranks cannot be cut into train tp x cp x pp = 8"),
        ([*TINY, "rollout=tp2", "dtype=int8"], r"dtype=int8 is not known; known: float32, bfloat16"),
        ([*TINY, "rollout=tp16"], r"8 ranks cannot be cut into rollout tp x pp = 16; nearest: 16 ranks"),
        ([*TINY, "rollout=tp8", "model=x"], r"model is given twice"),
        (["model=gpt-9", "train=dp2", "rollout=tp1"], r"model=gpt-9 is neither a folder nor a named shape; named are: llama-7b"),
        (["model=llama-tiny", "train=tp2ep2dp2", "rollout=tp1"], r"LlamaForCausalLM has no experts"),
        (["model=llama-tiny", "train=pp8dp1", "rollout=tp1"], r"4 layers in stages of 1 leave nothing for .* pp=8; nearest: pp=4"),
        (["model=llama-tiny", "train=dp2", "rollout=tp2", "out=/proc/none/x"], r"out=/proc/none/x cannot be written"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(shown.err)


def test_the_table_has_a_row_per_layout_and_the_file_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "plan.json"
    layouts = ["tp8pp4", "tp4pp4", "tp8pp2", "tp8", "tp4", "tp2", "tp16", "tp16pp4"]
    arguments = ["model=llama-70b", "train=tp8pp4dp4", f"rollout={','.join(layouts)}", f"out={out}"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "llama-70b, 141.1 GB, trained tp8pp4dp4 on 128 ranks" in shown
    assert all(f"│ {layout} " in shown for layout in layouts)
    content = json.loads(out.read_text())
    assert {"hardware", "versions", "commit", "date", "rows"} <= set(content)
    rows = {row["rollout"]: row for row in content["rows"]}
    assert list(rows) == layouts
    assert all(row["ratio_to_bound"] == row["node_import_ratio"] == 1.0 for row in rows.values())
    means = [round(row["received_bytes_mean"] / 1e9, 2) for row in rows.values()]
    assert means == [0, 4.41, 4.41, 13.23, 30.87, 66.14, 6.74, 0]
    assert all(130e9 < row["full_gather_bytes_mean"] < 140e9 for row in rows.values())
    assert all(row["peak_extra_bytes_max"] <= 2 * content["bucket_bytes"] for row in rows.values())
    tp4 = rows["tp4"]
    assert (tp4["engine"], tp4["model"], tp4["world"], tp4["train"]) == ("flowrl", "llama-70b", 128, "tp8pp4dp4")
    assert tp4["received_bytes_max"] == tp4["bound_bytes_max"] > tp4["received_bytes_mean"]
    assert sum(stage["received_bytes_mean"] for stage in tp4["stage_bytes"].values()) == tp4["received_bytes_mean"]
    assert 0 < tp4["floor_seconds"] <= tp4["predicted_seconds"] < 2 * tp4["floor_seconds"]
    assert rows["tp8pp4"]["num_collectives"] == rows["tp8pp4"]["predicted_seconds"] == 0


def test_both_orders_of_a_model_with_experts_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=qwen3-30b-a3b", "train=tp2ep4dp4", "rollout=tp2ep2"]) == 0
    shown = capsys.readouterr().out
    assert "dense order 0 + 21.74, expert order 0 + 14.50, chosen order 0 + 14.50" in shown


def test_other_ranks_may_generate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = ["model=llama-1b", "train=tp2pp2dp2", "rollout=tp2,tp1dp8", "rollout_world=8", f"out={out}"]
    assert main(arguments) == 0
    half, whole = json.loads(out.read_text())["rows"]
    model = 2 * SHAPES["llama-1b"].num_parameters
    assert half["received_bytes_mean"] == pytest.approx(model / 2, rel=1e-4)
    assert whole["received_bytes_max"] == model
    assert half["node_import_ratio"] == whole["node_import_ratio"] == 1.0


def test_help_names_every_key_and_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("gpus_per_node", "rollout_world", "deepseek-v3", "mixtral-tiny"))


def test_speeds_default_to_one_node_of_eight() -> None:
    options = parse_options([*TINY, "rollout=tp2"])
    assert (options.link_gb_s, options.nic_gb_s, options.gpus_per_node, options.element_bytes) == (450, 50, 8, 2)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-7b", 6.74), ("llama-13b", 13.02), ("llama-70b", 70.55), ("qwen3-30b-a3b", 30.53), ("qwen3-235b-a22b", 235.09),
     ("deepseek-v3", 671.03), ("llama-1b", 1.10)],
)  # fmt: skip
def test_named_shapes_have_the_published_sizes(name: str, billions: float) -> None:
    assert round(SHAPES[name].num_parameters / 1e9, 2) == billions


QWEN3_MOE = dict(
    architectures=["Qwen3MoeForCausalLM"], num_hidden_layers=4, hidden_size=64, intermediate_size=192, num_attention_heads=8,
    num_key_value_heads=4, head_dim=8, vocab_size=160, max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=1e4,
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[], decoder_sparse_step=1,
    norm_topk_prob=True,
)  # fmt: skip


def folder(path: Path, **values: object) -> Path:
    (path / "config.json").write_text(json.dumps(values))
    return path


def test_a_folder_of_a_model_with_experts_is_planned(tmp_path: Path) -> None:
    assert planned_shape(str(folder(tmp_path, **QWEN3_MOE))) == SHAPES["qwen3-moe-tiny"]
    mixtral = {key: value for key, value in QWEN3_MOE.items() if key not in ("num_experts", "moe_intermediate_size")}
    mixtral |= dict(architectures=["MixtralForCausalLM"], num_local_experts=4, sliding_window=None)
    shape = read_model_shape(folder(tmp_path, **mixtral))
    assert (shape.num_experts, shape.experts_per_token, shape.expert_ffn_size, shape.qk_norm) == (4, 2, 192, False)


def test_dense_layers_among_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"mlp_only_layers=\[0\] is not supported; supported are mixtures whose every layer"
    ):
        planned_shape(str(folder(tmp_path, **(QWEN3_MOE | dict(mlp_only_layers=[0])))))
