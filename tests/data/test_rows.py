from __future__ import annotations

import datetime
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from flowrl.config.tree import ConfigError
from flowrl.data.rows import read_rows

Write = Callable[..., str]
MESSAGES = [{"role": "user", "content": "hello"}]


def refusal(*files: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_rows(files)
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"answer": 1}, "no key 'prompt'; the row has answer"),
        ({}, "the row has no keys"),
        ({"prompt": None}, "prompt is null"),
        ({"prompt": 3}, "prompt is a number"),
        ({"prompt": True}, "prompt is true or false"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": " \n"}, "prompt is empty"),
        ({"prompt": []}, "prompt is an empty list"),
        ({"prompt": {"role": "user", "content": "x"}}, "prompt is an object"),
        ({"prompt": ["x"]}, "message 1 is text"),
        ({"prompt": [None]}, "message 1 is null"),
        ({"prompt": [*MESSAGES, {"content": "x"}]}, "message 2 has no 'role'"),
        ({"prompt": [{"role": "user"}]}, "message 1 has no 'content'"),
        ({"prompt": [{"role": 1, "content": "x"}]}, "'role' that is a number"),
        ({"prompt": [{"role": "user", "content": None}]}, "'content' that is null"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "'content' that is a list"),
        ({"prompt": [{"role": "human", "content": "x"}]}, "role 'human'; legal: system, developer, user"),
        ({"prompt": [*MESSAGES, {"role": "assistant", "content": "x"}]}, "the last message is the assistant's"),
        ({"prompt": "x", "id": 1.5}, "id is a number"),
        ({"prompt": "x", "id": False}, "id is true or false"),
        ({"prompt": "x", "id": ["a"]}, "id is a list"),
        (["x"], "a row is an object with the key 'prompt', not a list"),
        ("3", "a row is an object with the key 'prompt', not a number"),
        ("null", "not null"),
    ],
)
def test_malformed_rows_are_refused_with_file_and_line(write: Write, row: Any, expected: str) -> None:
    file = write({"prompt": "fine"}, "", row)
    message = refusal(file)
    assert message.startswith(f"{file}, line 3: ") and expected in message


def test_all_wrong_rows_are_counted_and_five_are_shown(write: Write) -> None:
    message = refusal(write(*[{"prompt": i} for i in range(9)]))
    assert len(message.splitlines()) == 6 and message.endswith("... 9 rows are malformed in all")


@pytest.mark.parametrize("text", ["{", "{'prompt': 'x'}", '{"prompt": "x"} {}', "prompt"])
def test_lines_that_are_not_json_are_refused(write: Write, text: str) -> None:
    file = write({"prompt": "fine"}, text)
    assert refusal(file).startswith(f"{file}, line 2 is not JSON")


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}')
    assert "not UTF-8 text (byte 12)" in refusal(str(tmp_path / "a.jsonl"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 or not")
    assert "cannot be read as Parquet" in refusal(str(tmp_path / "a.parquet"))
    assert "cannot be read" in refusal(str(tmp_path / "none.jsonl"))


def test_a_file_without_rows_is_refused(write: Write) -> None:
    assert "no rows" in refusal(write("", ""))


def test_rows_keep_every_field_and_odd_characters(write: Write, tmp_path: Path) -> None:
    file = write({"prompt": "a\u2028b", "answer": "7", "nested": {"x": [1, None]}})
    Path(file).write_bytes(b"\xef\xbb\xbf" + Path(file).read_bytes())
    (row,) = read_rows([file])
    assert row.prompt == "a\u2028b" and row.row["nested"] == {"x": [1, None]}


def test_identical_prompts_stay_two_prompts(write: Write) -> None:
    """ALG-04: groups go by id, and two equal prompts have two ids."""
    file = write({"prompt": "same"}, {"prompt": "same"})
    rows = read_rows([file, file])
    assert [row.prompt_id for row in rows] == ["0:1", "0:2", "1:1", "1:2"]


def test_given_ids_are_kept_and_must_be_unique(write: Write) -> None:
    assert [
        row.prompt_id
        for row in read_rows([write({"prompt": "a", "id": 7}, {"prompt": "a", "id": "x"}, {"prompt": "b", "id": None})])
    ] == [
        "7",
        "x",
        "0:3",
    ]
    file = write({"prompt": "a", "id": 7}, {"prompt": "b", "id": "7"})
    assert f"{file}, line 2: id '7' is also that of {file}, line 1" in refusal(file)


def test_parquet_rows_are_as_json_rows(tmp_path: Path) -> None:
    file = str(tmp_path / "rows.parquet")
    rows = [
        {
            "prompt": [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "x"}],
            "answer": None,
            "id": 3,
        },
        {"prompt": [{"role": "user", "content": "c", "name": None}], "answer": "z", "id": 4},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    first, second = read_rows([file])
    assert first.prompt == ({"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "x"})
    assert (second.prompt_id, second.row["answer"], second.place) == ("4", "z", f"{file}, row 2")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "a"}, {"prompt": None}]), file)
    assert refusal(file) == f"{file}, row 2: prompt is null; give text or a list of {{role, content}}"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": datetime.date(2020, 1, 1)}]), file)
    assert "prompt is date" in refusal(file)


def test_hub_names_go_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> list[dict[str, str]]:
        asked.append((name, split))
        if name == "gone":
            raise FileNotFoundError("no such dataset")
        return [{"prompt": "q"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert [row.prompt for row in read_rows(["hf:a/b", "hf:a/b:test"])] == ["q", "q"]
    assert asked == [("a/b", "train"), ("a/b", "test")]
    assert "hf:gone cannot be loaded: no such dataset" in refusal("hf:gone")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "needs the package `datasets`" in refusal("hf:a/b")


def test_built_in_rows() -> None:
    train, held_out = read_rows(["builtin:arithmetic"]), read_rows(["builtin:arithmetic/eval"])
    assert len(train) > 64 and not {row.prompt for row in train} & {row.prompt for row in held_out}
    assert "legal: builtin:arithmetic" in refusal("builtin:poetry")


def test_an_id_that_is_no_text_is_refused(write: Write) -> None:
    assert "id: character 1 is half of a surrogate pair" in refusal(write('{"prompt": "a", "id": "\\ud8000"}\n'))


def test_a_row_without_id_makes_way_for_one_that_was_given(write: Write) -> None:
    rows = read_rows([write('{"prompt": "a", "id": "0:2"}\n{"prompt": "b"}\n{"prompt": "c", "id": "0:2+"}\n')])
    ids = [row.prompt_id for row in rows]
    assert ids == ["0:2", "0:2++", "0:2+"]


def test_a_value_that_python_cannot_hold_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    text = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"a\xff")]
    )
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x", "y"], "answer": text}), path)
    assert f"{path}: row 2: answer has a value that cannot be read" in refusal(str(path))
    times = pyarrow.array([0, 2**62], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x", "y"], "when": times}), path)
    assert f"{path}: row 2: when has a value that cannot be read" in refusal(str(path))
