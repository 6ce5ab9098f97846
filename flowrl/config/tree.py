"""The tree of dataclasses as flat `key -> value` tables: enumerate the knobs, check values strictly, build the tree."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from flowrl.config.redact import redact
from flowrl.config.schema import AUTO, VARIANTS, Config

T = TypeVar("T")
SCALARS = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


LARGEST_NUMBER = 2**32 - 1
"""Of whole numbers that are no budgets (bytes, tokens of a micro-batch); seeds go this far."""
MOST_SECONDS = 1_000_000
"""Of any time: eleven days. Timers of the operating system take twice as many, and no more."""


class ConfigError(ValueError):
    """What a user asked for cannot be run; the message names every key concerned and what would be legal."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Knob:
    """One leaf of the tree. `scalar` is the type of the value or, where `many`, of its elements. `free`: see `schema.knob`."""

    key: str
    scalar: type
    choices: tuple[str, ...]
    optional: bool
    many: bool
    auto: bool
    default: Any
    doc: str
    minimum: float | None
    maximum: float | None
    free: bool

    @property
    def legal(self) -> str:
        """What may be given, in words."""
        one = " | ".join(self.choices) if self.choices else SCALARS[self.scalar]
        if self.minimum is not None and self.maximum is not None:
            one += f" from {self.minimum:g} to {self.maximum:g}"
        elif self.minimum is not None:
            one += f" >= {self.minimum:g}"
        elif self.maximum is not None:
            one += f" <= {self.maximum:g}"
        if self.many:
            one = f"a list [a,b] of {one}" if not self.choices else f"a list [a,b] of: {one}"
        return one + (", or null" if self.optional else "") + (", or auto" if self.auto else "")


def nearest(name: str, known: Iterable[str]) -> str:
    """`"; did you mean X?"` or nothing. A key is also compared by its last part, so that moved knobs are found."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not close:
        last = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}
        close = [last[part] for part in difflib.get_close_matches(name.rsplit(".", 1)[-1], last, n=1, cutoff=0.6)]
    return f"; did you mean {close[0]}?" if close else ""


def knobs(cls: type, prefix: str = "") -> dict[str, Knob]:
    """Every leaf below the dataclass `cls`, in order of definition; the fields of config groups are left out."""
    return {knob.key: knob for knob in _walk(cls, prefix)}


def sections(cls: type, prefix: str = "") -> dict[str, tuple[type, str]]:
    """The nested sections below `cls`: key -> (dataclass, doc); config groups are left out."""
    found: dict[str, tuple[type, str]] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, key = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(kind) and key not in VARIANTS:
            found[key] = (typing.cast(type, kind), field.metadata["doc"])
            found |= sections(found[key][0], key + ".")
    return found


def _walk(cls: type, prefix: str, free: bool = False) -> Iterator[Knob]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind, key = hints[field.name], prefix + field.name
        if key in VARIANTS:
            continue
        if dataclasses.is_dataclass(kind):
            yield from _walk(typing.cast(type, kind), key + ".", free or field.metadata["free"])
        else:
            yield _knob(key, kind, field, free)


def _knob(key: str, kind: Any, field: dataclasses.Field[Any], free: bool) -> Knob:
    optional = many = False
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        optional = True
        (kind,) = (arm for arm in typing.get_args(kind) if arm is not type(None))
    if typing.get_origin(kind) is tuple:
        many, kind = True, typing.get_args(kind)[0]
    choices: tuple[str, ...] = ()
    if typing.get_origin(kind) is Literal:
        choices, kind = typing.get_args(kind), str
    meta = field.metadata
    return Knob(
        key,
        kind,
        choices,
        optional,
        many,
        field.default == AUTO,
        field.default,
        meta["doc"],
        meta["minimum"],
        MOST_SECONDS if meta["maximum"] is None and key.endswith("_seconds") else meta["maximum"],
        free or meta["free"],
    )


def checked(knob: Knob, value: Any) -> Any:
    """`value` as the knob's type. Errors: `ValueError` naming key, value and what is legal. Nothing is guessed: 8.0 and
    '8' are no integers, true is no number; an integer is a number."""
    if value is None and knob.optional or knob.auto and value == AUTO:
        return value
    if not knob.many:
        return _scalar(knob, value, value)
    if isinstance(value, Mapping):
        raise ValueError(refusal(knob, value))
    elements = value if isinstance(value, (list, tuple)) else [value]
    return tuple(_scalar(knob, element, value) for element in elements)


def _scalar(knob: Knob, value: Any, given: Any) -> Any:
    if knob.scalar is float and type(value) is int:
        if abs(value) > LARGEST_NUMBER:
            raise ValueError(refusal(knob, given))
        return _scalar(knob, float(value), given)
    if type(value) is not knob.scalar:
        raise ValueError(refusal(knob, given))
    if isinstance(value, str):
        if value in ("", "???") or (knob.choices and value not in knob.choices):
            raise ValueError(refusal(knob, given) + nearest(value, knob.choices))
    elif isinstance(value, (int, float)):
        below = knob.minimum is not None and value < knob.minimum
        above = knob.maximum is not None and value > knob.maximum
        if below or above or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(refusal(knob, given))
        if (
            isinstance(value, int)
            and abs(value) > LARGEST_NUMBER
            and not knob.key.endswith(("_bytes", "tokens_per_microbatch"))
        ):
            raise ValueError(f"{refusal(knob, given)}, at most {LARGEST_NUMBER}")
    return value


def refusal(knob: Knob, value: Any) -> str:
    """The message for a value that the knob does not take."""
    hint, value = "", redact(value, knob.key)
    if knob.scalar is str and isinstance(value, (bool, int, float)):
        hint = f"""; for text write {knob.key}="'{value}'\""""
    elif knob.scalar is not str and isinstance(value, str) and value:
        hint = "; text was given (quotes make text of a number)"
    elif knob.scalar is int and isinstance(value, float) and math.isfinite(value) and value == int(value):
        hint = f"; write {int(value)}"
    shown = repr(value) if isinstance(value, str) and knob.scalar is not str else show(value)
    return f"{knob.key}={shown} is not legal; legal: {knob.legal}{hint}"


def show(value: Any) -> str:
    """A value as one would write it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(show(element) for element in value) + "]"
    return repr(value) if isinstance(value, str) and (not value or value.strip() != value) else str(value)


def flatten(tree: Mapping[str, Any], known: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one table `a.b.c -> value`; stops at the keys of `known`, whose values are kept whole."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in known:
            flat |= flatten(value, known, key + ".")
        else:
            flat[key] = value
    return flat


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The opposite of `flatten`; tuples become lists."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[last] = list(value) if isinstance(value, tuple) else value
    return tree


def build(values: Mapping[str, Any], variants: Mapping[str, type]) -> Config:
    """The frozen tree from a complete table of checked values and the type chosen for each config group."""
    return _build(Config, values, variants, "")


def _build(cls: type[T], values: Mapping[str, Any], variants: Mapping[str, type], prefix: str) -> T:
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        key, kind = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(kind):
            kind = variants[key] if key in VARIANTS else typing.cast(type, kind)
            arguments[field.name] = _build(kind, values, variants, key + ".")
        else:
            arguments[field.name] = values[key]
    return cls(**arguments)


def table(config: Any, prefix: str = "") -> dict[str, Any]:
    """A built tree as a flat table `key -> value`, config groups' fields included."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value: Any = config.__dict__[field.name]
        key = prefix + field.name
        if dataclasses.is_dataclass(value):
            flat |= table(value, key + ".")
        else:
            flat[key] = value
    return flat
