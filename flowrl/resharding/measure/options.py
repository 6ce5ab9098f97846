"""The words of the benchmark's command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.config.model_shape import ModelShape
from flowrl.resharding.needs import check_rollout
from flowrl.resharding.plan.options import Layout, parse_layout
from flowrl.resharding.plan.tables import check_train
from flowrl.resharding.ranks import ParallelSizes, check_world
from flowrl.resharding.regions import DTYPE_BYTES
from flowrl.resharding.shapes import SHAPES, LatentShape
from flowrl.resharding.words import output_path, parse_words, rank_number, whole_number

FLOWRL = "flowrl"
BASELINES = ("per_tensor_gather", "bucketed_gather", "vanilla_grouping", "gather_all", "megatron_refit")
KEYS = {
    "world": "ranks, each a process; training and generation share them",
    "model": "a named shape (weights coded by index) or a Hugging Face folder",
    "layers": "of a named shape, where not all of them are wanted (all)",
    "train": "for example tp4pp2 or tp2ep4; sizes tp, pp, ep, etp and, if you like, dp",
    "rollout": "for example tp2,tp2pp2,tp4ep4; sizes tp, pp, ep (1 or tp) and, if you like, dp",
    "against": f"baselines to run beside flowrl: all, or some of {','.join(BASELINES)} (none)",
    "repeat": "timed moves of every engine (10)",
    "dtype": "of weights on both sides: bfloat16 (default) or float32",
    "backend": "nccl, or gloo, over which ranks may share GPUs: for correctness, not for speed (nccl on cuda, gloo on cpu)",
    "device": "cpu or cuda (cuda where torch sees enough GPUs, else cpu)",
    "out": "folder for results.json, results.md and results.png (nothing is written without it)",
}
USAGE = """python -m flowrl.resharding.benchmark world=N model=NAME train=LAYOUT rollout=LAYOUT[,LAYOUT...] [key=value ...]

Moves real weights from Megatron-core shards into vLLM's parameters over real processes, and measures it.

""" + "".join(f"{key:<10}{text}\n" for key, text in KEYS.items())
PROCESS_BYTES = 300 << 20
"""What a forked process takes beside weights."""


@dataclass(frozen=True)
class BenchmarkOptions:
    """`device` and `backend` are empty, `layers` and `out` None where not given; `against` lists baselines in their fixed
    order."""

    world: int
    model: str
    layers: int | None
    train: Layout
    rollouts: tuple[Layout, ...]
    against: tuple[str, ...]
    repeat: int
    dtype: str
    device: str
    backend: str
    out: Path | None

    @property
    def label(self) -> str:
        """What results call the model."""
        return self.model if self.layers is None else f"{self.model} of {self.layers} layers"


def parse_options(arguments: Sequence[str]) -> BenchmarkOptions:
    """The command line. Errors: `ValueError` with one message."""
    given = parse_words(arguments, KEYS, ("world", "model", "train", "rollout"))
    dtype, device = given.get("dtype", "bfloat16"), given.get("device", "")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype={dtype} is not known; known: {', '.join(DTYPE_BYTES)}")
    if device not in ("", "cpu", "cuda"):
        raise ValueError(f"device={device} is not known; known: cpu, cuda")
    backend = given.get("backend", "")
    if backend not in ("", "nccl", "gloo") or (backend == "nccl" and device == "cpu"):
        raise ValueError(f"backend={backend} with device={device or 'auto'} is not known; known: nccl (cuda), gloo")
    world = rank_number(given, "world")
    train = parse_layout("train", given["train"])
    rollouts = tuple(parse_layout("rollout", text.strip()) for text in given["rollout"].split(","))
    for layout in (train, *rollouts):
        _check_layout(layout, world)
    for rollout in rollouts:
        check_world(world, train.sizes, rollout.sizes)
    return BenchmarkOptions(
        world=world,
        model=given["model"],
        layers=whole_number(given, "layers") if "layers" in given else None,
        train=train,
        rollouts=rollouts,
        against=_baselines(given.get("against", "")),
        repeat=whole_number(given, "repeat", 10, most=100_000),
        dtype=dtype,
        device=device,
        backend=backend,
        out=output_path(given),
    )


def _baselines(text: str) -> tuple[str, ...]:
    if text in ("", "none"):
        return ()
    if text == "all":
        return BASELINES
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in BASELINES]
    if unknown:
        raise ValueError(f"against={text}: no baseline {unknown[0]!r}; known: all, {', '.join(BASELINES)}")
    return tuple(name for name in BASELINES if name in names)


def _check_layout(layout: Layout, world: int) -> None:
    sizes = layout.sizes
    if sizes.cp > 1 or sizes.vpp > 1:
        raise ValueError(
            f"layout {layout.text}: the benchmark runs tp, pp, ep, etp and dp; python -m flowrl.resharding.plan predicts "
            f"the rest"
        )
    if layout.replicas is not None and layout.replicas * layout.model_ranks != world:
        raise ValueError(
            f"layout {layout.text} are {layout.model_ranks} x dp={layout.replicas} ranks and world={world}; leave dp out"
        )


def kept_shape(shape: ModelShape, options: BenchmarkOptions) -> ModelShape:
    """The shape with the layers that are wanted. Errors: `ValueError` for a folder, or for more layers than it has."""
    if options.layers is None:
        return shape
    if options.model not in SHAPES:
        raise ValueError(f"layers={options.layers}: model={options.model} is a folder, whose weights are moved whole")
    if options.layers > shape.num_layers:
        raise ValueError(f"layers={options.layers}: {options.model} has {shape.num_layers}; take at most those")
    return replace(shape, num_layers=options.layers)


def check_model(shape: ModelShape, options: BenchmarkOptions) -> None:
    """Errors: `ValueError` with the numbers where the model cannot be built or cut by one of the layouts."""
    if isinstance(shape, LatentShape):
        raise ValueError(
            f"model={options.model} ({shape.architecture}) cannot be built here; python -m flowrl.resharding.plan predicts "
            f"its moves"
        )
    check_train(shape, options.train.sizes)
    for layout in options.rollouts:
        check_rollout(shape, layout.sizes)


def _shard_bytes(shape: ModelShape, options: BenchmarkOptions, sizes: ParallelSizes, experts_over: int) -> int:
    """Bytes of a rank's shard with experts cut or spread over so many ranks; embedding and head are spread evenly."""
    experts = shape.num_layers * shape.num_experts * 3 * shape.hidden_size * shape.expert_ffn_size
    elements = (shape.num_parameters - experts) // sizes.tp + experts // experts_over
    return elements // sizes.pp * DTYPE_BYTES[options.dtype]


def train_bytes(shape: ModelShape, options: BenchmarkOptions) -> int:
    """Bytes of a rank's training shard."""
    sizes = options.train.sizes
    return _shard_bytes(shape, options, sizes, sizes.ep * sizes.etp)


def rollout_bytes(shape: ModelShape, options: BenchmarkOptions, rollout: Layout) -> int:
    """Bytes of a rank's generation shard."""
    return _shard_bytes(shape, options, rollout.sizes, rollout.sizes.tp)


def needed_bytes(shape: ModelShape, options: BenchmarkOptions, rollout: Layout) -> int:
    """Memory of all ranks together while nothing moves."""
    shards = train_bytes(shape, options) + rollout_bytes(shape, options, rollout)
    return options.world * (shards + PROCESS_BYTES)


def check_memory(shape: ModelShape, options: BenchmarkOptions, rollout: Layout, memory_bytes: int) -> None:
    """Error: `ValueError` with the arithmetic where the processes of one host do not fit its memory."""
    needed = needed_bytes(shape, options, rollout)
    if needed > memory_bytes:
        parts = [train_bytes(shape, options) / 1e9, rollout_bytes(shape, options, rollout) / 1e9]
        raise ValueError(
            f"{options.model} from {options.train.text} to {rollout.text}: {options.world} ranks x ({parts[0]:.2f} GB "
            f"trained + {parts[1]:.2f} GB generating + {PROCESS_BYTES / 1e9:.2f} GB) = {needed / 1e9:.1f} GB, and this machine has "
            f"{memory_bytes / 1e9:.1f} GB; take a smaller model or more rollout tp"
        )


def refit_refusal(shape: ModelShape, options: BenchmarkOptions, rollout: Layout, memory_bytes: int) -> str | None:
    """Why Megatron-core's own move cannot run here, or None.

    It allocates a receive buffer for every piece of the new model and a second one in its gloo transport, all at once:
    twice the generation shards beside both models. (Contiguous copies of sent columns come on top.)
    """
    if shape.num_experts:
        return "its planner numbers experts by the names of grouped matrices, which need Transformer Engine"
    if shape.tied and rollout.sizes.pp > 1 and options.train.sizes.pp == 1:
        return "a tied head on its own pipeline stage has no source of its name in a model of one stage"
    extra = 2 * options.world * rollout_bytes(shape, options, rollout)
    needed = needed_bytes(shape, options, rollout) + extra
    if needed > memory_bytes:
        return (
            f"needs {needed_bytes(shape, options, rollout) / 1e9:.1f} GB for both models + 2 x {options.world} x "
            f"{rollout_bytes(shape, options, rollout) / 1e9:.2f} GB of buffers alive at once = {needed / 1e9:.1f} GB, and this "
            f"machine has {memory_bytes / 1e9:.1f} GB"
        )
    return None
