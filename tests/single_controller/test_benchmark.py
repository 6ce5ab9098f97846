"""The data plane's benchmark."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from flowrl.single_controller import benchmark


def test_wrong_arguments_are_one_message(capsys):
    assert benchmark.main(["rowz=1"]) == 2 and benchmark.main(["rows=many"]) == 2
    assert "expected key=value with a key of" in capsys.readouterr().err


@pytest.mark.slow
def test_driver_moves_less_than_a_hundredth_of_the_batch(tmp_path):
    """The figures are written with where they come from; both ways compute the same."""
    out = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "flowrl.single_controller.benchmark",
        "rows=512",
        "workers=2",
        "repeat=1",
        f"out={out}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert figures["driver_bytes_share_of_batch"] < 0.01 and figures["results_equal"]
    assert figures["by_value"]["bytes_out"] > figures["batch_token_bytes"]
    assert {"commit", "versions", "hardware", "date", "options"} <= figures.keys()
