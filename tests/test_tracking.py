from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flowrl.config.compose import compose
from flowrl.config.tree import ConfigError
from flowrl.tracking import Tracker, cut_back


def write(folder: Path, steps: int) -> None:
    tracker = Tracker(folder, compose([f"run.dir={folder}"]), {}, run_id="id")
    for step in range(steps + 1):
        tracker.log(step, {"reward/mean": step / 10, "value/loss": math.nan})
        tracker.samples(step, [{"id": step}])
        tracker.timeline(step, [])
    tracker.close()


def test_a_resumed_run_forgets_later_steps_and_goes_on(tmp_path: Path) -> None:
    """CKP-01: the lines that stay are the same bytes; a last line cut short by a kill goes."""
    write(tmp_path, 5)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 6, "reward/me')
    again = Tracker(tmp_path, compose([f"run.dir={tmp_path}"]), {}, run_id="id", done=3)
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:4])
    assert again.series("reward/mean") == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    assert math.isnan(again.series("value/loss")[0][1])
    for kind in ("samples", "profile"):
        assert sorted(file.stem for file in (tmp_path / kind).iterdir()) == ["step_0", "step_1", "step_2", "step_3"]
    again.log(4, {"reward/mean": 0.4})
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4]
    assert again.picture() is not None


def test_a_folder_without_metrics_can_be_gone_on_with(tmp_path: Path) -> None:
    assert cut_back(tmp_path, 3) == []
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_metrics_that_no_run_has_written_are_an_error_with_their_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "caf\xe9": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl is not UTF-8"):
        cut_back(tmp_path, 1)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"metrics.jsonl is no regular file"):
        cut_back(tmp_path, 1)


def test_steps_without_a_line_are_a_warning_and_strange_names_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + "[" * 100_000 + '\n{"step": 3}\n')
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_best.jsonl").touch()
    assert cut_back(tmp_path, 3) == [{"step": 1}, {"step": 3}]
    assert "metrics.jsonl has no line of step 2" in caplog.text
    assert (tmp_path / "samples" / "step_best.jsonl").exists()


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, 5)
    again = Tracker(tmp_path, compose([f"run.dir={tmp_path}"]), {}, run_id="id", done=3)
    again.log(4, {"reward/mean": 7.0})
    again.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/mean")
    assert [event.step for event in shown] == [0, 1, 2, 3, 4] and shown[-1].value == 7.0
