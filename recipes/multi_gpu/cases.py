"""What is measured on 2, 4 and 8 GPUs of one host, and with how many layers of each model: integers alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.measure.options import BenchmarkOptions, rollout_bytes, train_bytes
from flowrl.resharding.shapes import SHAPES

DENSE, EXPERTS = "dense", "experts"
MOST_MOVED_BYTES, MOST_MOVED_EXPERTS = 16 << 30, 1000
"""A generation shard, and experts of all layers, whose moves by six engines fit a part's time: a loader takes experts
one by one."""
MOST_TRAINED_BYTES = 8 << 30
"""bfloat16 weights of a model that is trained: writing and loading them then fit the part's time."""
STATE_BYTES = 18
"""A trained parameter: bfloat16, its gradient, its master copy and two moments in float32."""
BUCKETS_BYTES = 3 << 30
"""Buckets, workspaces and what a process takes beside weights."""
USABLE, TRAINED_SHARE = 0.85, 0.5
"""Shares of a device's memory: for all of a move, and for trained state beside an engine and activations."""


@dataclass(frozen=True)
class Move:
    """One pair of layouts, as the benchmark takes them. `family` is `dense` or `experts`; `against`: baselines."""

    family: str
    train: str
    rollout: str
    against: str = "all"

    @property
    def name(self) -> str:
        alone = "" if self.against == "all" else f"_{self.against}"
        return f"move_{self.family}_{self.train}_{self.rollout}{alone}"


@dataclass(frozen=True)
class Steps:
    """A training run. `words` go to `main_ppo`; the trained state is cut over `cut` devices."""

    name: str
    family: str
    cut: int
    words: tuple[str, ...]


MOVES = {
    2: (
        Move(DENSE, "tp2", "tp1"),
        Move(DENSE, "tp1", "tp2"),
        Move(DENSE, "pp2", "tp2"),
        Move(EXPERTS, "ep2", "tp2"),
        Move(EXPERTS, "ep2", "tp1"),
        Move(EXPERTS, "ep2", "tp2", "none"),
    ),
    4: (
        Move(DENSE, "tp4", "tp2"),
        Move(DENSE, "tp4", "tp1"),
        Move(DENSE, "tp2pp2", "tp2"),
        Move(DENSE, "tp2", "tp4"),
        Move(EXPERTS, "ep4", "tp2"),
        Move(EXPERTS, "ep4", "tp4"),
        Move(EXPERTS, "ep4", "tp4ep4"),
        Move(EXPERTS, "ep4", "tp4", "none"),
    ),
    8: (
        Move(EXPERTS, "ep8", "tp4", "none"),
        Move(EXPERTS, "ep8", "tp8ep8", "none"),
        Move(EXPERTS, "ep8", "tp4"),
        Move(EXPERTS, "ep8", "tp8"),
        Move(EXPERTS, "ep8", "tp8ep8"),
        Move(DENSE, "tp8", "tp4"),
        Move(DENSE, "tp8", "tp2"),
        Move(DENSE, "tp8", "tp1"),
        Move(DENSE, "tp4pp2", "tp2"),
        Move(DENSE, "tp2", "tp8"),
    ),
}
"""By the number of devices. Without baselines as many layers as fit are moved, with them fewer."""


def steps(devices: int) -> tuple[Steps, ...]:
    """Runs on so many devices: generation on the trainer's devices in another layout, and on half of them alone."""
    half = devices // 2
    cut = min(half, 2)
    together = f"cluster.devices={devices}"
    apart = ("placement=standalone_rollout", f"cluster.devices={half}", f"cluster.rollout_devices={half}")
    return (
        Steps("steps_tp", DENSE, 2, (together, "actor.layout.tp=2", "rollout.layout.tp=1")),
        Steps("steps_apart", DENSE, cut, (*apart, f"actor.layout.tp={cut}", "rollout.layout.tp=1")),
        Steps("steps_pp", DENSE, 2, (together, "actor.layout.tp=1", "actor.layout.pp=2", "rollout.layout.tp=2")),
        Steps("steps_ep", EXPERTS, 2, (together, "actor.layout.tp=1", "actor.layout.ep=2", "rollout.layout.tp=2")),
    )


def move_words(model: str, move: Move, devices: int, layers: int) -> list[str]:
    """Of the benchmark's command line. A model folder, or a shape that is kept whole, is not told its layers."""
    words = [f"world={devices}", f"model={model}", f"train={move.train}", f"rollout={move.rollout}"]
    fewer = model in SHAPES and layers < SHAPES[model].num_layers
    return [*words, f"against={move.against}", *([f"layers={layers}"] if fewer else [])]


def move_bytes(shape: ModelShape, options: BenchmarkOptions) -> int:
    """What a device needs for one process of the benchmark: a trainer, the generation shard and buckets; with baselines
    another trainer (in the libraries' own order) and Megatron-core's two receive buffers of the generation shard."""
    trained, generating = train_bytes(shape, options), rollout_bytes(shape, options, options.rollouts[0])
    trainers, shards = (2, 3) if options.against else (1, 1)
    return trainers * trained + shards * generating + BUCKETS_BYTES


def move_layers(shape: ModelShape, options: BenchmarkOptions, memory_bytes: int) -> int:
    """The most layers whose moves fit a device of so many bytes and, with baselines, the time of a part.

    Error: `ValueError` with the numbers where not one layer for each pipeline stage fits.
    """
    rollout = options.rollouts[0]
    stages = max(options.train.sizes.pp, rollout.sizes.pp)
    for layers in range(shape.num_layers, stages - 1, -1):
        kept = replace(shape, num_layers=layers)
        in_time = not options.against or (
            rollout_bytes(kept, options, rollout) <= MOST_MOVED_BYTES
            and layers * shape.num_experts <= MOST_MOVED_EXPERTS
        )
        if in_time and move_bytes(kept, options) <= USABLE * memory_bytes:
            return layers
    smallest = move_bytes(replace(shape, num_layers=stages), options)
    raise ValueError(
        f"{options.model} of {stages} layers needs {smallest / 1e9:.1f} GB on a device of {memory_bytes / 1e9:.1f} GB, of "
        f"which {USABLE:.0%} may be used; take a smaller model"
    )


def trained_layers(shape: ModelShape, cut: int, memory_bytes: int) -> int:
    """The most layers, an even number for two pipeline stages, whose trained state fits `cut` devices and whose folder
    fits the time of a part. Error: `ValueError` with the numbers where two layers do not."""
    room = TRAINED_SHARE * cut * memory_bytes
    for layers in range(shape.num_layers - shape.num_layers % 2, 1, -2):
        number = replace(shape, num_layers=layers).num_parameters
        if STATE_BYTES * number <= room and 2 * number <= MOST_TRAINED_BYTES:
            return layers
    number = replace(shape, num_layers=2).num_parameters
    raise ValueError(
        f"two layers are {number / 1e9:.1f}e9 parameters x {STATE_BYTES} bytes, {cut} devices of {memory_bytes / 1e9:.1f} GB "
        f"may hold {room / 1e9:.1f} GB of trained state, and the folder {MOST_TRAINED_BYTES / 1e9:.1f} GB; take a smaller "
        f"model"
    )
