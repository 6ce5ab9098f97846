"""What the script for several GPUs of one host computes and asks for, and one rehearsal of its links over gloo."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl.config.compose import compose
from flowrl.config.machine import Machine
from flowrl.resharding.measure import multi_gpu_tables as tables
from flowrl.resharding.measure import page, report
from flowrl.resharding.measure.links import part_bytes
from flowrl.resharding.measure.options import check_model, kept_shape, parse_options
from flowrl.resharding.shapes import SHAPES
from recipes import bench_multi_gpu, gpu_check
from recipes.multi_gpu import steps as step_part
from recipes.multi_gpu.cases import MOVES, USABLE, move_bytes, move_layers, move_words, steps, trained_layers
from recipes.multi_gpu.predict import MEMORY_BYTES, planned_move
from recipes.multi_gpu.words import STOPPING_SECONDS, at_most, parse, planned_parts

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / page.DOCUMENTS[2]
MODELS = {"dense": "llama-7b", "experts": "qwen3-30b-a3b"}
HOST = Machine(cpus=32, memory_bytes=256 << 30, shared_memory_bytes=1 << 30, gpus=2, gpu_memory_bytes=MEMORY_BYTES)


def test_tables_of_the_page_are_those_of_its_data() -> None:
    """Run `python -m flowrl.resharding.measure.page` where this fails."""
    text = DOCUMENT.read_text()
    assert page.render(text, DOCUMENT.parent / "data") == text


def test_stored_predictions_are_what_the_planner_says(tmp_path: Path) -> None:
    """Run the page's command with `predict=` where this fails."""
    assert bench_multi_gpu.main([f"predict={tmp_path / 'made.json'}"]) == 0
    stored = DOCUMENT.parent / "data" / "planned-multi-gpu.json"
    assert json.loads((tmp_path / "made.json").read_text()) == json.loads(stored.read_text())


def test_commands_of_the_page_are_understood() -> None:
    lines = [line.split() for line in DOCUMENT.read_text().splitlines() if line.startswith("    python")]
    mine = [words[3:] for words in lines if words[2] == "recipes.bench_multi_gpu"]
    assert len(mine) == 5 and [words[2] for words in lines if words[3:] not in mine] == [
        "flowrl.resharding.measure.page"
    ]
    for words in mine:
        if not words[0].startswith("predict="):
            assert planned_parts(parse(words, HOST), Path("/scratch"), 1.0)[1]


@pytest.mark.parametrize("devices", MOVES)
def test_moves_fit_the_memory_of_a_device_and_are_legal(devices: int) -> None:
    names = [move.name for move in MOVES[devices]]
    assert len(set(names)) == len(names)
    for move in MOVES[devices]:
        shape = SHAPES[MODELS[move.family]]
        options = parse_options(move_words(MODELS[move.family], move, devices, shape.num_layers))
        layers = move_layers(shape, options, MEMORY_BYTES)
        told = parse_options(move_words(MODELS[move.family], move, devices, layers))
        kept = kept_shape(shape, told)
        check_model(kept, told)
        assert kept.num_layers == layers and move_bytes(kept, told) <= USABLE * MEMORY_BYTES
        if layers < shape.num_layers and not told.against:
            assert move_bytes(replace(shape, num_layers=layers + 1), told) > USABLE * MEMORY_BYTES


def test_nothing_travels_where_theory_says_so_and_pairs_add_up_to_the_bound_elsewhere() -> None:
    for move in MOVES[8]:
        row = planned_move(MODELS[move.family], move, 8, MEMORY_BYTES, 100.0, 4)
        received = [
            sum(size for pair, size in row["pair_bytes"].items() if pair.endswith(f">{rank}")) for rank in range(8)
        ]
        assert max(received) == row["received_bytes_max"] == row["bound_bytes_max"] and row["layers"] == 4
        assert (row["seconds"] == 0) == (not row["pair_bytes"]) == ((move.train, move.rollout) in (("tp2", "tp8"), ("ep8", "tp8ep8")))  # fmt: skip


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    options = parse_options(move_words("llama-7b", MOVES[2][2], 2, 32))
    with pytest.raises(ValueError, match=r"llama-7b of 2 layers needs \d.* GB on a device of 1.0 GB, of which 85%"):
        move_layers(SHAPES["llama-7b"], options, 10**9)
    with pytest.raises(ValueError, match=r"two layers are .* x 18 bytes, 2 devices of 1.0 GB may hold 1.0 GB"):
        trained_layers(SHAPES["llama-7b"], 2, 10**9)
    assert (
        trained_layers(SHAPES["llama-7b"], 1, MEMORY_BYTES) == trained_layers(SHAPES["llama-7b"], 2, MEMORY_BYTES) == 18
    )


def test_layers_of_a_named_shape_are_kept_and_no_others() -> None:
    words = ["world=2", "train=tp2", "rollout=tp1"]
    some = parse_options([*words, "model=llama-7b", "layers=3"])
    assert kept_shape(SHAPES["llama-7b"], some).num_layers == 3 and some.label == "llama-7b of 3 layers"
    with pytest.raises(ValueError, match="layers=33: llama-7b has 32"):
        kept_shape(SHAPES["llama-7b"], parse_options([*words, "model=llama-7b", "layers=33"]))
    with pytest.raises(ValueError, match="is a folder, whose weights are moved whole"):
        kept_shape(SHAPES["llama-7b"], parse_options([*words, "model=/a/folder", "layers=3"]))


@pytest.mark.parametrize("devices", MOVES)
def test_training_runs_are_legal_and_what_is_given_wins(devices: int, tmp_path: Path) -> None:
    for run in steps(devices):
        if run.family == "experts":
            continue
        extra = [*run.words, "rollout.temperature=0.5"]
        given = {"scratch": str(tmp_path), "device": "cpu", "prompt": "8", "tokens": "8"}
        common, added = step_part.words(given, "builtin:tiny", extra)
        config = compose([*common, "algorithm=grpo", "kl=none", *added])
        assert config.rollout.temperature == 0.5 and config.trainer.total_steps == 5
        apart = config.cluster.rollout_devices if config.placement == "standalone_rollout" else 0
        assert config.cluster.devices + apart == devices
    given = {"scratch": str(tmp_path), "device": "cuda"}
    assert "rollout.cuda_graphs=false" in step_part.words(given, "m", [])[1]
    assert "rollout.cuda_graphs=false" not in step_part.words(given, "m", ["rollout.cuda_graphs=true"])[1]


def test_parts_are_links_then_moves_then_steps_then_whole_models(tmp_path: Path) -> None:
    plan, parts = planned_parts(parse([f"out={tmp_path}", "actor.optim.lr=1e-6"], HOST), tmp_path, 280.0)
    assert [part.name for part in parts] == [
        "links", "move_dense_tp2_tp1", "move_dense_tp1_tp2", "move_dense_pp2_tp2", "move_experts_ep2_tp2",
        "move_experts_ep2_tp1", "steps_tp", "steps_apart", "steps_pp", "steps_ep", "move_experts_ep2_tp2_none",
    ]  # fmt: skip
    assert len(plan["rows"]) == 6 and all(part.alone for part in parts)
    commands = {part.name: part.command for part in parts}
    assert {"model=qwen3-30b-a3b", "layers=7", "against=all"} <= set(commands["move_experts_ep2_tp1"])
    assert {"layers=18", "placement=standalone_rollout", "actor.optim.lr=1e-6"} <= set(commands["steps_apart"])
    some = parse([f"out={tmp_path}", "parts=links,steps_e"], HOST)
    assert [part.name for part in planned_parts(some, tmp_path, 1.0)[1]] == ["links", "steps_ep"]


def test_a_part_gets_no_more_than_what_is_left() -> None:
    run = gpu_check.Part("steps_tp", ("python", "limit=120", "device=cuda"), 185)
    cut = at_most(run, 180.0)
    assert cut is not None and cut.limit_seconds == 180 and cut.command[1] == f"limit={180 - STOPPING_SECONDS}"
    assert at_most(run, 500.0) == run
    assert at_most(run, STOPPING_SECONDS + 1.0) is None


def test_a_part_that_hangs_does_not_keep_the_others_from_their_turn(tmp_path: Path) -> None:
    wanted = replace(parse([f"out={tmp_path}"], HOST), limit_seconds=60)
    hanging = gpu_check.Part("links", (sys.executable, "-c", "import time; time.sleep(60)"), 1, alone=True)
    good = gpu_check.Part("links_again", (sys.executable, "-c", "print('done')"), 30, alone=True)
    late = gpu_check.Part("steps_tp", (sys.executable, "-c", "limit=1"), 185, alone=True)
    outcomes = bench_multi_gpu.run_parts([hanging, good, late], wanted)
    assert [(found.code, found.last_line[:11]) for found in outcomes] == [
        (None, ""),
        (0, "done"),
        (None, "not started"),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpus=4"], "gpus=4 must be one of 2, 4, 8, and there are 2"),
        (["device=tpu"], "known: cpu, cuda"),
        (["dense=deepseek-v3"], "deepseek-v3 cannot be built here"),
        (["part=links"], "did you mean parts=...?"),
        (["limit=0"], "limit=0 must be a whole number"),
        (["prompts=0"], "prompts=0 must be a whole number"),
        (["parts=,"], "has an empty name"),
        (["parts=links,"], "has an empty name"),
        (["trained=/nowhere"], "trained=/nowhere is no named shape (llama-7b, "),
        (["trained_experts=builtin:huge"], "builtin:huge is not a built-in model; known: builtin:tiny"),
        (["trained=deepseek-v3"], "trained=deepseek-v3 cannot be built here"),
    ],
)
def test_bad_words_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(["out=x", *words], HOST)
    assert message in str(error.value)


def test_a_host_without_gpus_is_told_to_rehearse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="needs 2 GPUs and there are 1; rehearse with device=cpu"):
        parse(["out=x", "device=cuda"], replace(HOST, gpus=1))
    assert parse(["out=x"], replace(HOST, gpus=0)).device == "cpu"
    assert bench_multi_gpu.main(["--help"]) == 0 and "parts" in capsys.readouterr().out
    assert bench_multi_gpu.main(["gpus=2"]) == 2 and capsys.readouterr().err == "error: missing: out=...; --help explains every key\n"  # fmt: skip


def test_ranks_share_gpus_over_gloo_alone(tmp_path: Path) -> None:
    """Each has its share of the memory, and nothing is trained: a run has a GPU for each of its ranks."""
    one = replace(HOST, gpus=1)
    wanted = parse([f"out={tmp_path}", "device=cuda", "backend=gloo", "dense=llama-1b", "experts=qwen3-moe-1b"], one)
    assert (wanted.devices, wanted.memory_bytes, wanted.shared) == (2, HOST.gpu_memory_bytes // 2, True)
    parts = planned_parts(wanted, tmp_path, 1.0)[1]
    assert {part.name.partition("_")[0] for part in parts} == {"links", "move"}
    assert all("backend=gloo" in part.command for part in parts)
    assert parse([f"out={tmp_path}", "backend=gloo"], HOST).shared, "also where there are enough"
    assert not parse([f"out={tmp_path}"], HOST).shared
    with pytest.raises(ValueError, match="backend=nccl with device=cpu is not known"):
        parse([f"out={tmp_path}", "device=cpu", "backend=nccl"], one)
    with pytest.raises(ValueError, match="needs a GPU and there is none"):
        parse([f"out={tmp_path}", "device=cuda", "backend=gloo"], replace(HOST, gpus=0))


def test_figures_of_other_links_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also after a command that was cut off: what it measures stands in the folder from its beginning."""
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "results.json").write_text("{}")
    for plan in ("[", "[1]", "{}", '{"device": "cuda", "backend": "gloo", "devices": 2}', "[" * 100000):
        (tmp_path / "plan.json").write_text(plan)
        assert bench_multi_gpu.main([f"out={tmp_path}", "device=cpu", "gpus=2"]) == 2
        told = capsys.readouterr().err
        assert "holds parts (links) of device " in told and told.endswith("; give another folder\n")
    wanted = parse([f"out={tmp_path}", "device=cpu", "gpus=2", "layers=2", "prompts=4"], HOST)
    (tmp_path / "plan.json").write_text(json.dumps(bench_multi_gpu._links(wanted)))
    bench_multi_gpu._check_folder(wanted)
    for word, said in (
        ("layers=4", "layers 2, and this is 4"),
        ("prompts=8", "{'prompts': '8'}"),
        ("dense=llama-1b", "models"),
    ):
        with pytest.raises(ValueError, match="give another folder") as error:
            words = [f"out={tmp_path}", "device=cpu", "gpus=2", "layers=2", "prompts=4"]
            bench_multi_gpu._check_folder(parse([w for w in words if w[:5] != word[:5]] + [word], HOST))
        assert said in str(error.value)


def test_parts_that_are_none_are_left_out_of_the_results(tmp_path: Path) -> None:
    wanted = parse([f"out={tmp_path}", "device=cpu", "gpus=2"], HOST)
    for name, text in {
        "links": "{",
        "move_dense": "[]",
        "move_other": '{"a": 1}',
        "steps_tp": '{"commit": "of another"}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(text)
    found = bench_multi_gpu.results(wanted)
    assert (found["links"], found["moves"], found["steps"]) == ([], [], [])


def content() -> dict[str, Any]:
    """Of results.json, with a move at half of the link's rate and one of nothing."""
    move: dict[str, Any] = dict(
        engine="flowrl", model="m", train="tp2", rollout="tp1", received_bytes_max=10**10, bound_bytes_max=10**10,
        ratio_to_bound=1.0, seconds_median=0.1, gb_per_second=100.0, stage_seconds={"local": 0.05, "tp": 0.05},
        bit_exact=True, fingerprint_ok=True,
    )  # fmt: skip
    slow = move | dict(engine="gather_all", seconds_median=0.3, fingerprint_ok=None)
    still = move | dict(rollout="tp2", received_bytes_max=0, bound_bytes_max=0, stage_seconds={})
    settings = {"cluster.devices": "2", "actor.layout.tp": "2", "rollout.layout.tp": "1", "actor.optim.lr": "1e-6"}
    phases: dict[str, Any] = dict(run="grpo", rows=4, step_seconds=1.5, phases="generate 1.00", other_share=0.25)
    peak = dict(run="grpo", phase="generate", measured_bytes=2 * 10**9, predicted_bytes=21 * 10**8, ratio=1.05)
    return dict(
        hardware={"gpu": "a GPU"}, versions={"torch": "1"}, commit="c" * 40, date="2026-01-01", devices=2,
        links=[dict(kind="all_to_all", bytes=1 << 20, seconds=0.01, gb_per_second=200.0)], copy_gb_per_second=4000.0,
        moves=[
            dict(name="a", rows=[move, slow], skipped=[dict(engine="megatron_refit", rollout="tp1", reason="no room")]),
            dict(name="b", rows=[still], skipped=[]),
        ],
        steps=[dict(name="steps_tp", model="m", settings=settings, rows=[phases], memory=[peak])],
    )  # fmt: skip


def test_moves_are_shown_as_a_share_of_the_link(tmp_path: Path) -> None:
    (tmp_path / "multi-gpu-2.json").write_text(json.dumps(content()))
    shown = page.render("<!-- multi-gpu -->\nold\n<!-- end -->", tmp_path)
    assert (
        "| m | tp2 | tp1 | 10.000 | 1.00 | 100.00 | 100.00 | 50% | 50.00 | 50.00 | 3.00 (gather_all) | yes | yes |"
        in shown
    )
    assert shown.count("nothing moves") == 1 and "the link is 200.00 GB/s" in shown and "4000 GB/s" in shown
    assert "| steps_tp | m | devices=2, train tp=2 | 4 |" in shown and "Not run: megatron_refit in a: no room." in shown
    assert "| steps_tp | generate | 2.00 | 2.10 | 1.05 |" in shown
    assert tables.link_rate([]) is None
    assert tables.share_of_link(content()["moves"][0], None) is None


def test_results_are_of_one_commit_and_of_every_part_that_has_some(tmp_path: Path) -> None:
    wanted = parse([f"out={tmp_path}", "device=cpu"], HOST)
    here, made = report.origin("cpu"), content()
    parts = {"links": made, "move_a": made["moves"][0], "move_b": {**made["moves"][1], "commit": "another"}}
    for name, part in parts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(
            json.dumps({**part, "commit": part.get("commit", here["commit"])})
        )
    assert bench_multi_gpu.results(wanted)["links"] == []
    (tmp_path / "links" / "results.json").write_text(json.dumps({**made, "commit": here["commit"]}))
    found = bench_multi_gpu.results(wanted)
    assert [move["name"] for move in found["moves"]] == ["move_a"] and found["link_gb_per_second"] == 200.0
    assert found["moves"][0]["of_link"] == 0.5


def test_what_a_device_receives_comes_from_all_others() -> None:
    assert [part_bytes(1 << 20, world) for world in (2, 4)] == [1 << 20, (1 << 20) // 3]


@pytest.mark.slow
def test_links_and_a_move_are_measured_over_gloo(tmp_path: Path) -> None:
    words = [f"out={tmp_path}", "device=cpu", "dense=llama-tiny", "experts=qwen3-moe-tiny", "trained=builtin:tiny"]
    words += ["trained_experts=qwen3-moe-1b", "layers=2", "repeat=1", "parts=links,move_experts_ep2_tp2_none"]
    assert bench_multi_gpu.main(words) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert {row["kind"] for row in found["links"]} == {"all_gather", "all_to_all", "send_receive"}
    [move] = found["moves"]
    [row] = move["rows"]
    assert row["received_bytes_max"] == row["bound_bytes_max"] > 0 and row["bit_exact"] and row["fingerprint_ok"]
    assert found["link_gb_per_second"] > 0 and move["of_link"] > 0
    [planned] = [row for row in json.loads((tmp_path / "plan.json").read_text())["rows"] if row["name"] == move["name"]]
    assert planned["received_bytes_max"] == row["received_bytes_max"]
    assert [part["code"] for part in json.loads((tmp_path / "summary.json").read_text())] == [0, 0]
