"""The script behind `docs/benchmarks/failures.md`: one of its cells, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.kill_matrix.cells import CALLS, PLACES, cells
from recipes.kill_matrix.run import Result, run_cell
from recipes.kill_matrix.table import DATA, DOCUMENT, document, read, write
from tests.end_to_end.conftest import ROOT


def test_every_place_meets_every_phase() -> None:
    """RAY-01."""
    names = [cell.name for cell in cells()]
    assert len(set(names)) == len(names)
    assert {f"{place}/{phase}/SIGKILL" for place in PLACES for phase in CALLS} <= set(names)


def test_results_are_kept_and_shown_without_what_is_of_one_machine(tmp_path: Path) -> None:
    line = "role actor, rank 1, node 10.0.0.7, pid 4711, stands in /opt/src/recipes/kill_matrix/order.py:61 in carry_out | x"
    result = Result("actor last rank", "update", "SIGKILL", 1.5, 0.2, 1, line, ("process 12",), False)
    write(tmp_path, [result])
    assert read(tmp_path) == [result]
    text = (tmp_path / DOCUMENT).read_text()
    assert "| actor last rank | update | SIGKILL | 1.5 | 0.2 | 1 | process 12 | **broken** |" in text
    assert "10.0.0.7" not in text and "4711" not in text and "/opt" not in text and "\\| x" in text


def test_the_written_page_is_that_of_its_data() -> None:
    facts = json.loads((ROOT / "docs" / "benchmarks" / DATA).read_text())
    del facts["cells"]
    assert (ROOT / "docs" / "benchmarks" / DOCUMENT).read_text() == document(facts, read(ROOT / "docs" / "benchmarks"))


@pytest.mark.slow
def test_a_rank_that_is_killed_while_a_checkpoint_begins_ends_the_run_as_the_contract_says() -> None:
    """RAY-01, RAY-03: with its name, and nothing is left."""
    cell = next(cell for cell in cells() if cell.name == "actor last rank/save/SIGKILL")
    result = run_cell(cell)
    assert (result.exit_code, result.leftovers) == (1, ()), result
    assert all(words in result.last_line for words in ("role actor", "rank 1", "save_state", "step 2", "SIGKILL"))
