"""Figures of a step: merging, skipped optimizer steps, phases, the console's phrases."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flowrl.config.compose import compose, to_tree
from flowrl.console import StepConsole, reshard_phrase, seconds_phrase
from flowrl.protocol import DataProto, Metric
from flowrl.report import StepReport, TrainingFailed
from flowrl.single_controller import DeviceMemory, Span
from flowrl.timing import covered_seconds, memory_ledger, phase_of
from flowrl.tracking import Tracker


def update(skipped: int) -> DataProto:
    return DataProto(metrics={"policy/skipped_steps": Metric.sum(skipped), "policy/loss": Metric.mean(2.0, 1.0)})


def test_metrics_of_mini_batches_merge_by_their_denominators() -> None:
    report = StepReport(max_skipped_steps=3)
    report.note(DataProto(metrics={"policy/loss": Metric.mean(6.0, 2.0)}))
    report.note(DataProto(metrics={"policy/loss": Metric.mean(0.0, 1.0)}))
    report.add({"reward/mean": 0.5})
    assert report.take(1) == {"policy/loss": 2.0, "reward/mean": 0.5}
    assert report.take(2) == {}


def test_skipped_steps_in_a_row_end_the_run_also_across_steps() -> None:
    """NUM-01: after max_skipped_steps in a row, and not before."""
    report = StepReport(max_skipped_steps=3)
    for skipped in (1, 1, 0, 1):
        report.note(update(skipped))
    assert report.take(1)["policy/skipped_steps"] == 3
    report.note(update(1))
    report.take(2)
    report.note(update(1))
    with pytest.raises(TrainingFailed, match=r"step 3: 3 optimizer steps in a row .*trainer.max_skipped_steps=3"):
        report.take(3)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_overlapping_calls_count_once(pairs: list[tuple[int, int]]) -> None:
    intervals = [(float(start), float(start + length)) for start, length in pairs]
    seconds = {s for start, stop in intervals for s in range(int(start), int(stop))}
    assert covered_seconds(intervals) == len(seconds)


def test_a_call_of_an_unknown_role_is_a_phase_of_its_own() -> None:
    assert phase_of("actor", "update") == "update_actor"
    assert phase_of("judge", "grade") == "judge_grade"


def test_phrases_say_where_time_went_and_that_the_move_was_proven() -> None:
    metrics = {"seconds/total": 2.0, "seconds/generate": 1.5, "seconds/reshard": 0.001, "seconds/update_actor": 0.4}
    assert seconds_phrase(metrics) == "generate 1.50, update_actor 0.40"
    assert reshard_phrase(metrics) == ""
    move = {"reshard/received_bytes_max": 2e6, "reshard/bound_bytes_max": 2e6, "reshard/move_seconds": 0.0123}
    assert reshard_phrase(move) == "reshard: received 2.00 MB (bound 2.00 MB) in 0.012 s"
    proven = move | {"reshard/fingerprint_ok": 1.0}
    assert reshard_phrase(proven) == "reshard: received 2.00 MB (bound 2.00 MB) in 0.012 s, fingerprint ok"


def test_without_a_terminal_every_step_is_one_plain_line() -> None:
    out = io.StringIO()
    console = StepConsole(4, Console(file=out, force_terminal=False, width=500))
    console.started(done=0)
    console.step(1, {"reward/mean": 0.25, "seconds/total": 1.0})
    console.close()
    (line,) = out.getvalue().splitlines()
    assert line.startswith("step 1/4  reward 0.250") and "left" in line


def test_a_live_table_shows_the_last_steps_and_progress() -> None:
    out = io.StringIO()
    console = StepConsole(30, Console(file=out, force_terminal=True, width=120, color_system=None))
    console.started(done=0)
    for step in range(1, 31):
        console.step(step, {"reward/mean": step / 100})
    console.close()
    text = out.getvalue()
    assert "30/30" in text and "0.300" in text and "held-out" in text


def test_the_tracker_writes_every_step_and_a_picture(tmp_path: Path) -> None:
    config = compose([f"run.dir={tmp_path}", "trainer.loggers=[]"])
    tracker = Tracker(tmp_path, config, to_tree(config), run_id="id")
    assert tracker.picture() is None
    tracker.log(0, {"eval/reward/mean": 0.2})
    tracker.log(1, {"reward/mean": 0.3, "policy/grad_norm": float("nan")})
    tracker.samples(1, [{"id": "1:a", "reward": 1.0}])
    tracker.timeline(1, [Span("eval", 1, "rollout", "generate", 10.0, 10.5)])
    picture = tracker.picture()
    tracker.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 0, "eval/reward/mean": 0.2}, {"step": 1, "reward/mean": 0.3, "policy/grad_norm": None}]
    assert picture is not None and picture.stat().st_size > 5000
    (event,) = json.loads((tmp_path / "profile" / "step_1.json").read_text())["traceEvents"]
    assert event["name"] == "rollout.generate" and event["dur"] == pytest.approx(5e5)


def test_the_memory_of_a_phase_is_that_of_its_worst_call() -> None:
    spans = [
        Span(None, 1, "actor", "update", 0.0, 1.0, DeviceMemory(peak=9, allocated=5, reserved=10, free=70, pinned=2)),
        Span(None, 1, "actor", "update", 1.0, 2.0, DeviceMemory(peak=8, allocated=6, reserved=10, free=60, pinned=2)),
        Span(None, 1, "rollout", "sleep", 2.0, 3.0),
    ]
    assert memory_ledger(spans) == {
        "memory/update_actor/peak_bytes_max": 9.0,
        "memory/update_actor/allocated_bytes_max": 6.0,
        "memory/update_actor/reserved_bytes_max": 10.0,
        "memory/update_actor/free_bytes_min": 60.0,
        "memory/update_actor/pinned_bytes_max": 2.0,
    }


def test_skipped_steps_in_a_row_are_counted_on_by_a_resumed_run() -> None:
    """NUM-01: the count is part of a checkpoint."""
    report = StepReport(max_skipped_steps=3)
    for _ in range(2):
        report.note(update(1))
    report.take(1)
    resumed = StepReport(3, report.skipped_in_a_row)
    resumed.note(update(1))
    with pytest.raises(TrainingFailed, match="3 optimizer steps in a row"):
        resumed.take(2)


def test_time_left_counts_the_steps_of_this_process_only() -> None:
    out = io.StringIO()
    console = StepConsole(10, Console(file=out, force_terminal=False, width=500))
    console.started(done=8)
    console._started -= 5
    console.step(9, {"seconds/total": 5.0})
    assert "left 5 s" in out.getvalue()
