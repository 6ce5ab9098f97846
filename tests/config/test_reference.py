from __future__ import annotations

import re
from pathlib import Path

from flowrl.config.reference import DOCUMENT, document, number_of_keys
from flowrl.config.schema import VARIANTS, Config
from flowrl.config.tree import knobs

ROOT = Path(__file__).parents[2]


def every_knob() -> list[tuple[str, str]]:
    rows = [(knob.key, knob.doc) for knob in knobs(Config).values()]
    return rows + [
        (k.key, k.doc)
        for group, types in VARIANTS.items()
        for cls in types.values()
        for k in knobs(cls, f"{group}.").values()
    ]


def test_the_written_reference_is_current() -> None:
    """Run `python -m flowrl.config.reference` where this fails."""
    assert (ROOT / DOCUMENT).read_text() == document()


def test_there_are_fewer_than_150_keys() -> None:
    assert number_of_keys() < 150


def test_every_key_is_explained_and_listed() -> None:
    text = document()
    for key, doc in every_knob():
        assert len(doc) > 5 and f"| `{key}` |" in text


def test_every_key_is_read_somewhere() -> None:
    """CFG-02: no option exists that nothing reads. Keys that only rules look at are those of features not built yet."""
    files = [
        path
        for path in (ROOT / "flowrl").rglob("*.py")
        if "config" not in path.parts or path.name in ("cli.py", "plan.py", "resolve.py")
    ]
    read = set(re.findall(r"\.(\w+)\b", "\n".join(path.read_text() for path in files)))
    assert {key for key, _ in every_knob() if key.rpartition(".")[2] not in read} == set()
