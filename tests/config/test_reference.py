from __future__ import annotations

from pathlib import Path

from flowrl.config.reference import DOCUMENT, document, number_of_keys
from flowrl.config.schema import VARIANTS, Config
from flowrl.config.tree import knobs

ROOT = Path(__file__).parents[2]


def every_knob() -> list[tuple[str, str]]:
    rows = [(knob.key, knob.doc) for knob in knobs(Config).values()]
    return rows + [(k.key, k.doc) for group, types in VARIANTS.items() for cls in types.values() for k in knobs(cls, f"{group}.").values()]


def test_the_written_reference_is_current() -> None:
    """Run `python -m flowrl.config.reference` where this fails."""
    assert (ROOT / DOCUMENT).read_text() == document()


def test_there_are_fewer_than_150_keys() -> None:
    assert number_of_keys() < 150


def test_every_key_is_explained_and_listed() -> None:
    text = document()
    for key, doc in every_knob():
        assert len(doc) > 5 and f"| `{key}` |" in text
