"""The words of the command: `key=value` arguments and layout strings such as `tp8pp4dp4`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.resharding.plan.move import BUCKET_BYTES
from flowrl.resharding.ranks import ParallelSizes
from flowrl.resharding.regions import DTYPE_BYTES

_TOKEN = re.compile(r"(etp|vpp|tp|pp|dp|cp|ep)([0-9]+)")
_TRAIN, _ROLLOUT = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp"), ("tp", "pp", "ep", "dp")


@dataclass(frozen=True)
class Layout:
    """A layout string: sizes, and data-parallel replicas where it names them."""

    text: str
    sizes: ParallelSizes
    replicas: int | None

    @property
    def model_ranks(self) -> int:
        return self.sizes.tp * self.sizes.cp * self.sizes.pp


@dataclass(frozen=True)
class Options:
    """`world` ranks train; `rollout_world` other ranks generate, or None where the same ranks do both.

    Speeds are of one rank in one direction, in units of 1e9 bytes per second.
    """

    model: str
    train: Layout
    rollouts: tuple[Layout, ...]
    world: int
    rollout_world: int | None
    link_gb_s: float
    nic_gb_s: float
    gpus_per_node: int
    element_bytes: int
    bucket_bytes: int
    out: Path | None


KEYS = {
    "model": "a named shape or a Hugging Face folder",
    "train": "for example tp8pp4dp4; sizes tp, cp, pp, vpp, ep, etp and, if you like, dp",
    "rollout": "for example tp4,tp8pp2,tp8ep8; sizes tp, pp, ep (1 or tp) and, if you like, dp",
    "world": "ranks that train, where `train` has no dp",
    "rollout_world": "further ranks that generate; left out, the training ranks generate",
    "link_gb_s": "speed between ranks of a node, GB/s per rank and direction (450)",
    "nic_gb_s": "speed between nodes, GB/s per rank and direction (50)",
    "gpus_per_node": "ranks of a node (8)",
    "dtype": "on the wire, the narrower of both sides: bfloat16 (default) or float32",
    "bucket_bytes": f"most that a rank receives and sends at a time ({BUCKET_BYTES})",
    "out": "write the figures as JSON to this file",
}
USAGE = """python -m flowrl.resharding.plan model=NAME train=LAYOUT rollout=LAYOUT[,LAYOUT...] [key=value ...]

Plans the move of a model's weights from a training layout to generation layouts; nothing runs.

""" + "".join(f"{key:<15}{text}\n" for key, text in KEYS.items())
USAGE += """
The same ranks train and generate:     model=llama-70b train=tp8pp4dp4 rollout=tp8,tp4
Generation has 64 ranks of its own:    model=llama-70b train=tp8pp4dp4 rollout=tp8,tp4 rollout_world=64
"""


def parse_layout(key: str, text: str) -> Layout:
    """A layout string. Errors: `ValueError` naming the part that is not understood."""
    known = _TRAIN if key == "train" else _ROLLOUT
    found: dict[str, int] = {}
    place = 0
    for match in _TOKEN.finditer(text):
        name, size = match[1], int(match[2])
        if match.start() != place:
            break
        if name not in known:
            raise ValueError(f"{key}={text}: a {key} layout has no {name}; it has {', '.join(known)}")
        if name in found or size < 1:
            raise ValueError(f"{key}={text}: {match[0]} is {'given twice' if name in found else 'less than 1'}")
        found[name] = size
        place = match.end()
    if place != len(text) or not text:
        raise ValueError(
            f"{key}={text}: {text[place:]!r} is no size; write sizes one after another, such as tp8pp4 "
            f"({', '.join(known)}, each with a number)"
        )
    replicas = found.pop("dp", None)
    return Layout(text, ParallelSizes(**found), replicas)


def _number(given: dict[str, str], key: str, default: float) -> float:
    try:
        value = float(given.get(key, default))
    except ValueError:
        raise ValueError(f"{key}={given[key]} is not a number") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"{key}={given[key]} must be more than 0")
    return value


def _whole(given: dict[str, str], key: str, default: int) -> int:
    value = _number(given, key, default)
    if value != int(value):
        raise ValueError(f"{key}={given[key]} must be a whole number")
    return int(value)


def _world(layout: Layout, key: str, given: int | None, *, what: str) -> int:
    """Ranks of a side, from the layout's own replicas or the argument `key`."""
    if layout.replicas is None:
        if given is None:
            raise ValueError(
                f"{what}={layout.text} does not say how many ranks there are; add dp<replicas> to it or give {key}="
                f"<a multiple of {layout.model_ranks}>"
            )
        return given
    world = layout.model_ranks * layout.replicas
    if given not in (None, world):
        raise ValueError(
            f"{what}={layout.text} are {layout.model_ranks} x dp={layout.replicas} = {world} ranks and {key}={given}; "
            f"leave one out"
        )
    return world


def parse_options(arguments: Sequence[str]) -> Options:
    """The command line. Errors: `ValueError` with one message."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in KEYS or not equals:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"; did you mean {near[0]}=...?" if near else ""
            raise ValueError(f"unknown argument {argument!r}{hint}; known: {', '.join(KEYS)} (each as key=value)")
        if key in given:
            raise ValueError(f"{key} is given twice: {given[key]} and {value}")
        given[key] = value
    missing = [key for key in ("model", "train", "rollout") if not given.get(key)]
    if missing:
        raise ValueError(f"missing: {', '.join(f'{key}=...' for key in missing)}; --help shows an example")
    dtype = given.get("dtype", "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype={dtype} is not known; known: {', '.join(DTYPE_BYTES)}")
    train = parse_layout("train", given["train"])
    rollouts = tuple(parse_layout("rollout", text.strip()) for text in given["rollout"].split(","))
    world = _world(train, "world", _whole(given, "world", 1) if "world" in given else None, what="train")
    rollout_world = _whole(given, "rollout_world", 1) if "rollout_world" in given else None
    for rollout in rollouts:
        if rollout.replicas is not None:
            _world(rollout, "rollout_world", rollout_world or world, what="rollout")
    return Options(
        model=given["model"],
        train=train,
        rollouts=rollouts,
        world=world,
        rollout_world=rollout_world,
        link_gb_s=_number(given, "link_gb_s", 450.0),
        nic_gb_s=_number(given, "nic_gb_s", 50.0),
        gpus_per_node=_whole(given, "gpus_per_node", 8),
        element_bytes=DTYPE_BYTES[dtype],
        bucket_bytes=_whole(given, "bucket_bytes", BUCKET_BYTES),
        out=Path(given["out"]) if "out" in given else None,
    )
