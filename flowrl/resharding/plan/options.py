"""The words of the command: `key=value` arguments and layout strings such as `tp8pp4dp4`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.resharding.plan.move import BUCKET_BYTES
from flowrl.resharding.ranks import ParallelSizes
from flowrl.resharding.regions import DTYPE_BYTES
from flowrl.resharding.words import MOST_RANKS, output_path, parse_words, rank_number, whole_number

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
        name = match[1]
        if match.start() != place:
            break
        if name not in known:
            raise ValueError(f"{key}={text}: a {key} layout has no {name}; it has {', '.join(known)}")
        if name in found:
            raise ValueError(f"{key}={text}: {match[0]} is given twice")
        found[name] = whole_number({match[0]: match[2]}, match[0], most=MOST_RANKS)
        place = match.end()
    if place != len(text) or not text:
        raise ValueError(
            f"{key}={text}: {text[place:]!r} is no size; write sizes one after another, such as tp8pp4 "
            f"({', '.join(known)}, each with a number)"
        )
    replicas = found.pop("dp", None)
    return Layout(text, ParallelSizes(**found), replicas)


def _speed(given: dict[str, str], key: str, default: float) -> float:
    try:
        value = float(given.get(key, default))
    except ValueError:
        raise ValueError(f"{key}={given[key]} is not a number") from None
    if not 1e-6 <= value <= 1e6:
        raise ValueError(f"{key}={given[key]} must be from 1e-6 to 1e6 GB/s")
    return value


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
    if world > MOST_RANKS:
        raise ValueError(f"{what}={layout.text} are {world} ranks; a plan is made for at most {MOST_RANKS}")
    if given not in (None, world):
        raise ValueError(
            f"{what}={layout.text} are {layout.model_ranks} x dp={layout.replicas} = {world} ranks and {key}={given}; "
            f"make them equal, or leave dp out"
        )
    return world


def parse_options(arguments: Sequence[str]) -> Options:
    """The command line. Errors: `ValueError` with one message."""
    given = parse_words(arguments, KEYS, ("model", "train", "rollout"))
    dtype = given.get("dtype", "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype={dtype} is not known; known: {', '.join(DTYPE_BYTES)}")
    train = parse_layout("train", given["train"])
    rollouts = tuple(parse_layout("rollout", text.strip()) for text in given["rollout"].split(","))
    world = _world(train, "world", rank_number(given, "world") if "world" in given else None, what="train")
    rollout_world = rank_number(given, "rollout_world") if "rollout_world" in given else None
    for rollout in rollouts:
        if rollout.replicas is not None:
            key = "world" if rollout_world is None else "rollout_world"
            _world(rollout, key, rollout_world or world, what="rollout")
    return Options(
        model=given["model"],
        train=train,
        rollouts=rollouts,
        world=world,
        rollout_world=rollout_world,
        link_gb_s=_speed(given, "link_gb_s", 450.0),
        nic_gb_s=_speed(given, "nic_gb_s", 50.0),
        gpus_per_node=whole_number(given, "gpus_per_node", 8),
        element_bytes=DTYPE_BYTES[dtype],
        bucket_bytes=whole_number(given, "bucket_bytes", BUCKET_BYTES),
        out=output_path(given),
    )
