"""The pages on weight moves are true: commands run, pasted output and tables are current, the drawn example adds up."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.config.compose import compose_all
from flowrl.config.model_shape import BUILTIN
from flowrl.resharding.measure import options, page
from flowrl.resharding.plan import choose_order, plan_move
from flowrl.resharding.plan.__main__ import main as plan_command
from flowrl.resharding.ranks import ParallelSizes, groups, micro_groups, numbering
from flowrl.resharding.shapes import SHAPES, planned_shape

ROOT = Path(__file__).parent.parent
GUIDE, BENCHMARK = ROOT / "docs" / "resharding.md", ROOT / page.DOCUMENT
COMMAND = re.compile(r"^    python -m (flowrl\S*) ?(.*)$", re.MULTILINE)
MEASURED_ELSEWHERE = {"plan_seconds"}


def commands(module: str) -> list[tuple[str, list[str]]]:
    """(page, arguments) of every command of this module on the pages."""
    found = [
        (path.name, words.split())
        for path in (GUIDE, BENCHMARK)
        for name, words in COMMAND.findall(path.read_text())
        if name == module
    ]
    assert found
    return found


def test_the_pages_show_no_command_that_is_not_tested() -> None:
    known = {
        "flowrl.resharding.plan",
        "flowrl.resharding.benchmark",
        "flowrl.main_ppo",
        "flowrl.resharding.measure.page",
    }
    named = {name for path in (GUIDE, BENCHMARK) for name, _ in COMMAND.findall(path.read_text())}
    assert named <= known


def test_planning_commands_run_and_stored_predictions_are_current(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where this fails: run the commands of the benchmark's page, then `python -m flowrl.resharding.measure.page`."""
    for _, arguments in commands("flowrl.resharding.plan"):
        stored = next((ROOT / word.partition("=")[2] for word in arguments if word.startswith("out=")), None)
        words = [f"out={tmp_path / 'plan.json'}" if word.startswith("out=") else word for word in arguments]
        assert plan_command(words) == 0, (arguments, capsys.readouterr().err)
        if stored is not None:
            made, kept = (json.loads(file.read_text()) for file in (tmp_path / "plan.json", stored))
            assert made["rollout_world"] == kept["rollout_world"]
            assert [_without_times(row) for row in made["rows"]] == [_without_times(row) for row in kept["rows"]], (
                stored
            )


def _without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in MEASURED_ELSEWHERE}


def test_the_pasted_plan_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """All columns but the last, which is a time."""
    (arguments, pasted) = re.findall(
        r"^    python -m flowrl\.resharding\.plan (.*)\n\n```\n(.*?)\n```", GUIDE.read_text(), re.MULTILINE | re.DOTALL
    )[0]
    assert plan_command(arguments.split()) == 0
    printed = capsys.readouterr().out
    assert _cells(printed) == _cells(pasted), printed


def _cells(table: str) -> list[list[str]]:
    lines = [re.split("[│┃]", line)[1:-2] for line in table.splitlines() if line.strip()[0] in "│┃"]
    assert lines
    return [[cell.strip() for cell in line] for line in lines]


def test_configurations_of_the_guide_are_legal() -> None:
    for _, arguments in commands("flowrl.main_ppo"):
        composed = compose_all(arguments)
        assert composed.config.dry_run and composed.shapes.policy == BUILTIN["builtin:tiny"]


def test_benchmark_commands_are_understood() -> None:
    """They run in the tests of the benchmark and, the small one, below."""
    for _, arguments in commands("flowrl.resharding.benchmark"):
        parsed = options.parse_options(arguments)
        options.check_model(planned_shape(parsed.model), parsed)
        assert parsed.rollouts and parsed.out is not None


@pytest.mark.slow
def test_the_small_benchmark_of_the_guide_runs(tmp_path: Path) -> None:
    small = next(words for name, words in commands("flowrl.resharding.benchmark") if name == GUIDE.name)
    words = [f"out={tmp_path}" if word.startswith("out=") else word for word in small]
    done = subprocess.run([sys.executable, "-m", "flowrl.resharding.benchmark", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = page.measured(json.loads((tmp_path / "results.json").read_text()))
    assert "| tp1 | flowrl |" in shown and "| tp1 | per_tensor_gather |" in shown


def test_tables_of_the_benchmark_page_are_those_of_its_data() -> None:
    """Run `python -m flowrl.resharding.measure.page` where this fails."""
    text = BENCHMARK.read_text()
    assert page.render(text, BENCHMARK.parent / "data") == text
    named = set(re.findall(r"<!-- (predicted-\S+) -->", text))
    assert named == {file.name for file in (BENCHMARK.parent / "data").glob("predicted-*.json")}


def test_the_figures_over_all_1b_pairs_are_those_of_their_data() -> None:
    times: list[float] = []
    for file in (BENCHMARK.parent / "data").glob("measured-*1b-*.json"):
        rows = json.loads(file.read_text())["rows"]
        own = {row["rollout"]: row["seconds_median"] for row in rows if row["engine"] == "flowrl"}
        times += [r["seconds_median"] / own[r["rollout"]] for r in rows if r["engine"] == "per_tensor_gather"]
    assert len(times) == 6
    mean = math.prod(times) ** (1 / 6)
    said = re.search(r"takes ([\d.]+) times as long.*mean; ([\d.]+) times", BENCHMARK.read_text())
    assert said is not None and said.groups() == (f"{mean:.1f}", f"{min(times):.1f}")


def test_a_table_without_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*predicted-x.json; write it with"):
        page.render("<!-- predicted-x.json -->\n<!-- end -->\n", tmp_path)


def test_measured_tables_say_how_much_slower_others_were(tmp_path: Path) -> None:
    row = dict(
        engine="flowrl", model="llama-1b", world=8, train="tp4pp2", rollout="tp2", received_bytes_max=830_000_000,
        received_bytes_mean=8e8, bound_bytes_max=830_000_000, ratio_to_bound=1.0, peak_extra_bytes_max=64 << 20,
        largest_temporary_bytes=32 << 20, num_collectives=40, num_copies=500, plan_seconds=0.1, seconds_median=0.5,
        seconds_p95=0.6, stage_seconds={"pp": 0.2}, gb_per_second=1.6, bit_exact=True, fingerprint_ok=True,
    )  # fmt: skip
    slow = row | dict(engine="per_tensor_gather", ratio_to_bound=2.33, seconds_median=1.0, fingerprint_ok=None)
    other = [part | dict(rollout="tp4", seconds_median=part["seconds_median"] * 4) for part in (row, slow)]
    other[1]["seconds_median"] = 16.0
    rows = [row, slow, *other]
    content = dict(
        rows=rows,
        rounds=[{"seconds": [1.0, 1.5]}] * 4,
        skipped=[dict(engine="megatron_refit", rollout="tp4", reason="no room")],
        hardware=dict(cpu="one", device="cpu"),
        versions=dict(torch="2"),
        commit="0123456789abcdef",
        date="2026-01-01",
    )
    (tmp_path / "measured-small.json").write_text(json.dumps(content))
    shown = page.render("<!-- measured -->\nold\n<!-- end -->", tmp_path)
    assert "| tp2 | flowrl | 830 | 1.00 | 64.0 | 40 | 0.5000 | 0.6000 | 0.5000 | 1.00 | yes | yes |" in shown
    assert "| 2.00 | yes | - |" in shown and "old" not in shown
    # The geometric mean of 2 and 8.
    assert "over these layouts: per_tensor_gather 4.00." in shown
    assert "Not run: megatron_refit to tp4: no room." in shown and "commit 0123456789ab, 2026-01-01" in shown


def test_the_drawn_example_adds_up() -> None:
    train, rollout = ParallelSizes(tp=4, pp=2), ParallelSizes(tp=2)
    shape, text = SHAPES["llama-1b"], GUIDE.read_text()
    places = numbering(8, train, rollout, choose_order(shape, 8, train, rollout).chosen.order)
    drawn = {line.split("  ")[0]: line for line in text.splitlines() if "groups [" in line}
    for name, found in (
        ("training TP", groups(places, "train", "tp")),
        ("training PP", groups(places, "train", "pp")),
        ("generation TP", groups(places, "rollout", "tp")),
        ("micro-DP", micro_groups(places)),
    ):
        assert drawn[name].endswith("groups " + " ".join(f"[{' '.join(map(str, ranks))}]" for ranks in found)), name
    assert re.search(r"^replica\s+" + r"\s+".join(str(at.rollout.replica) for at in places if at.rollout), text, re.M)
    made = plan_move(shape, train, rollout, places)
    stages = {stage.name: stage.received[0] / 1e9 for stage in made.stages}
    assert list(stages) == ["pp", "tp"]
    full = 2 * shape.num_parameters * 7 / 8 / 1e9
    figures = [f"{size:.2f} GB" for size in (stages["pp"], stages["tp"], made.received[0] / 1e9, full)]
    drawn_line = next(line for line in text.splitlines() if line.startswith("llama-1b, bf16"))
    assert re.findall(r"\d+\.\d+ GB", drawn_line) == figures
