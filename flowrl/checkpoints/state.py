"""What a run is beside its tensors, as `state.json` keeps it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from flowrl.checkpoints.reading import parse_json, shown

STATE = "state.json"
Value = TypeVar("Value")


@dataclass(frozen=True)
class RoleState:
    """How a trained role lay on its ranks: `layout` in words, on `world_size` ranks."""

    layout: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.layout} on {self.world_size} rank(s)"


@dataclass(frozen=True)
class RunState:
    """After step `step`, the last one whose metrics are written.

    `step` is also the position in the data, whose order is a function of seed and step; `data`: a digest of the prompts
    of each training file. `skipped_in_a_row`: per metric, optimizer steps without a finite gradient up to here.
    """

    step: int
    run_id: str
    total_steps: int
    kl_coefficient: float
    data: Mapping[str, str]
    skipped_in_a_row: Mapping[str, int]
    roles: Mapping[str, RoleState]
    versions: Mapping[str, str]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def parse_state(text: str) -> RunState:
    """The state that `to_json` wrote, every field checked. Error: `ValueError` saying which field is wrong."""
    raw = parse_json(text, STATE)
    if not isinstance(raw, dict):
        raise ValueError(f"{STATE} is damaged: it is no object")
    return RunState(
        step=_field(raw, "step", _count),
        run_id=_field(raw, "run_id", _text),
        total_steps=_field(raw, "total_steps", _count),
        kl_coefficient=_field(raw, "kl_coefficient", _number),
        data=_field(raw, "data", _table(_text)),
        skipped_in_a_row=_field(raw, "skipped_in_a_row", _table(_count)),
        roles=_field(raw, "roles", _roles),
        versions=_field(raw, "versions", _table(_text)),
    )


def _field(raw: Mapping[str, Any], name: str, parse: Callable[[Any], Value]) -> Value:
    if name not in raw:
        raise ValueError(f"{STATE} is damaged: it has no {name}")
    try:
        return parse(raw[name])
    except (TypeError, KeyError, OverflowError):
        raise ValueError(f"{STATE} is damaged: {name}={shown(raw[name])}") from None


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(value)
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _roles(value: Any) -> Mapping[str, RoleState]:
    roles = _table(_role)(value)
    # They are names of folders.
    if not all(role.isascii() and role.isidentifier() for role in roles):
        raise TypeError(value)
    return roles


def _role(value: Any) -> RoleState:
    return RoleState(_text(value["layout"]), _count(value["world_size"]))


def _table(parse: Callable[[Any], Value]) -> Callable[[Any], Mapping[str, Value]]:
    def table(value: Any) -> Mapping[str, Value]:
        if not isinstance(value, dict):
            raise TypeError(value)
        return {key: parse(each) for key, each in value.items()}

    return table
