"""What a checkpoint holds of a role that trains: weights, exact weights, moments, schedule, random-number generators.

Tensors are stored whole under their names in a Hugging Face folder, so any layout reads what any other wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker  # type: ignore[import-untyped]

from flowrl.resharding.families import Box, Parameter, Piece, hf_tensors
from flowrl.resharding.ranks import ParallelSizes, RankPlace, TrainPlace
from flowrl.resharding.stored import Origin, origins, provided, stored_boxes
from flowrl.workers import cuda_on_cpu
from flowrl.workers.hf_weights import VALUE_HEAD
from flowrl.workers.megatron_private_files import Shard, Writing, plan_write, read
from flowrl.workers.optimizer import Optimizer
from flowrl.workers.stored_files import EXACT, FIRST, SECOND, WEIGHT, StoredReader, read_common
from flowrl.workers.weights import EXPERT, ModelWeights

FORMAT = 1
SHOWN = 5
GENERATOR = "rng."


class RoleState:
    """One role's state on this rank. `parameters`: the model's, by global name; `places`: those of all ranks."""

    def __init__(
        self,
        weights: ModelWeights,
        parameters: Mapping[str, torch.nn.Parameter],
        places: Sequence[RankPlace],
        optimizer: Optimizer,
        *,
        sizes: ParallelSizes,
        value_head: bool,
    ) -> None:
        self._weights = weights
        self._parameters = parameters
        self._places = [place.train for place in places if place.train is not None]
        self._optimizer = optimizer
        self._sizes = sizes
        self._value_head = value_head
        self._shapes = {tensor.name: tensor.shape for tensor in hf_tensors(weights.shape)}
        self._shapes[VALUE_HEAD] = (1, weights.shape.hidden_size)
        self._dtype = next(iter(parameters.values())).dtype

    def check_finite(self) -> None:
        """NUM-01. Collective. Error: `ValueError` on all ranks, naming the first tensor with a number that is not
        finite."""
        held = [shard for shard in self._shards(writing=True) if shard.tensor.is_floating_point()]
        good = torch.stack([torch.isfinite(shard.tensor).all() for shard in held]).tolist() if held else []
        bad = next((shard for shard, fine in zip(held, good, strict=True) if not fine), None)
        found: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, None if bad is None else f"{bad.key} {_text(bad.box)}")
        rank = next((rank for rank, name in enumerate(found) if name), None)
        if rank is not None:
            raise ValueError(
                f"{found[rank]} (on rank {rank}) holds a number that is not finite, so no checkpoint is written: an "
                f"earlier one is the state to go back to; look for the step in which it came up"
            )

    def num_bytes(self) -> int:
        """What this rank has to write."""
        return sum(shard.tensor.numel() * shard.tensor.element_size() for shard in self._shards(writing=True))

    def plan(self, folder: str) -> Writing:
        """Copy the state to the host and agree on who writes what of it. Collective."""
        with cuda_on_cpu.active():
            copies = [
                Shard(shard.key, shard.shape, shard.box, shard.tensor.to("cpu", copy=True).contiguous())
                for shard in (*self._shards(writing=True), *self._generators().values())
            ]
            return plan_write(copies, self._common(), folder)

    def load(self, folder: str) -> str:
        """Take the state over from a folder that `plan` wrote in any layout. Collective; a line that says what came.

        Errors: `ValueError` where something that this role needs is missing or of another shape or type, or the folder
        holds what this role does not know; then nothing has changed.
        """
        common = read_common(folder)
        there = StoredReader(folder).tensors
        self._check(folder, common, there)
        same = common["sizes"] == asdict(self._sizes) and common["world_size"] == dist.get_world_size()
        generators = self._generators() if same else {}
        same = same and all(there.get(key) == (shard.shape, torch.uint8) for key, shard in generators.items())
        with cuda_on_cpu.active(), torch.no_grad():
            self._clear()
            read([*self._shards(writing=False), *(generators.values() if same else ())], folder)
            self._optimizer.resume(common["num_steps"], common["num_taken"])
            if same:
                _set_generators({key: shard.tensor[0] for key, shard in generators.items()})
        return self._summary(common, same)

    # What lies on this rank

    def _table(self, at: TrainPlace, held: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
        """With the value head of a critic, which every rank of the last stage holds whole."""
        if not self._value_head or at.pp != self._sizes.pp - 1:
            return held
        shape = self._shapes[VALUE_HEAD]
        box = tuple((0, size) for size in shape)
        return (*held, Parameter("output_layer.weight", shape, (Piece(VALUE_HEAD, box, box),), replicated=True))

    @cached_property
    def _origins(self) -> dict[tuple[str, Box], Origin]:
        return origins((rank, self._table(at, held)) for rank, at, held in self._weights.stages())

    def _shards(self, *, writing: bool) -> Iterator[Shard]:
        """All tensors that this rank holds, or of them what this rank writes, as views."""
        rank = dist.get_rank()
        at = self._places[rank]
        steps = {id(shard.parameter): shard for shard in self._optimizer.shards()}
        for parameter in self._table(at, self._weights.stage(at)):
            local = self._parameters[parameter.name]
            alone = together = parameter.pieces
            if writing:
                expert = EXPERT.search(parameter.name) is not None
                alone, together = provided(parameter, rank, self._places, self._origins, expert=expert)
            yield from self._views(WEIGHT, local.detach(), parameter.shape, 0, alone)
            if (step := steps.get(id(local))) is not None:
                pieces = together if step.is_cut else alone
                if step.is_exact_copy:
                    yield from self._views(EXACT, step.values, parameter.shape, step.start, pieces)
                for kind in (FIRST, SECOND):
                    yield from self._views(kind, step.state[kind], parameter.shape, step.start, pieces)

    def _views(
        self, kind: str, values: torch.Tensor, shape: tuple[int, ...], start: int, pieces: Iterable[Piece]
    ) -> Iterator[Shard]:
        """`values`: elements from `start` on of a flattened parameter of `shape`."""
        flat = values.view(-1)
        for stored in stored_boxes(pieces, shape, start, start + flat.numel()):
            first = stored.start - start
            view = flat[first : first + stored.count].view(stored.size)
            yield Shard(f"{kind}.{stored.tensor}", self._shapes[stored.tensor], stored.box, view)

    def _clear(self) -> None:
        """Zero what is in no stored tensor: the padding of the vocabulary."""
        for parameter in self._parameters.values():
            parameter.zero_()
        for shard in self._optimizer.shards():
            for tensor in (shard.values, *(shard.state[kind] for kind in (FIRST, SECOND))):
                tensor.zero_()

    def _generators(self) -> dict[str, Shard]:
        """States of this process's random-number generators, each a row of a tensor [ranks, bytes] uint8."""
        rank, world = dist.get_rank(), dist.get_world_size()
        states = {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state()}
        states |= {f"megatron.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
        return {
            f"{GENERATOR}{name}": Shard(
                f"{GENERATOR}{name}", (world, len(state)), ((rank, rank + 1), (0, len(state))), state.clone()[None]
            )
            for name, state in states.items()
        }

    # What is said about it

    def _common(self) -> dict[str, Any]:
        num_steps, num_taken = self._optimizer.num_steps
        return {
            "format": FORMAT, "num_steps": num_steps, "num_taken": num_taken,
            "sizes": asdict(self._sizes), "layout": str(self._sizes), "world_size": dist.get_world_size(),
        }  # fmt: skip

    def _check(
        self, folder: str, common: Mapping[str, Any], there: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        if common.get("format") != FORMAT:
            raise ValueError(f"{folder} has format {common.get('format')!r}; this version reads format {FORMAT}")
        types = {WEIGHT: self._dtype, FIRST: torch.float32, SECOND: torch.float32}
        if self._dtype is not torch.float32:
            types[EXACT] = torch.float32
        names = {name for name, _ in self._origins}
        needed = {f"{kind}.{name}": (self._shapes[name], dtype) for kind, dtype in types.items() for name in names}
        odd = [
            f"{key} {list(there[key][0])} {there[key][1]} instead of {list(shape)} {dtype}"
            for key, (shape, dtype) in sorted(needed.items())
            if key in there and there[key] != (shape, dtype)
        ]
        known = {key for key in there if not key.startswith(GENERATOR)}
        problems = _listed("missing", sorted(set(needed) - known)) + _listed("unexpected", sorted(known - set(needed)))
        problems += _listed("of another shape or type", odd)
        if problems:
            raise ValueError(f"{folder} does not hold the state of this model: {'; '.join(problems)}")

    def _summary(self, common: Mapping[str, Any], generators: bool) -> str:
        exact = "" if self._dtype is torch.float32 else ", exact weights"
        then = f"{common['layout']} on {common['world_size']} rank(s)"
        here = f"{self._sizes} on {dist.get_world_size()}"
        random = "restored" if generators else f"not restored, as they were of {then} and this role is {here}"
        return (
            f"weights{exact}, moments of {common['num_taken']} steps, schedule at step {common['num_steps']}; "
            f"random-number generators {random}"
        )


def _set_generators(states: Mapping[str, torch.Tensor]) -> None:
    tracked = f"{GENERATOR}megatron."
    get_cuda_rng_tracker().set_states(
        {key.removeprefix(tracked): state for key, state in states.items() if key.startswith(tracked)}
    )
    torch.cuda.set_rng_state(states[f"{GENERATOR}device"])
    torch.set_rng_state(states[f"{GENERATOR}cpu"])


def _listed(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{len(names)} {what}: {', '.join(names[:SHOWN])}{more}"] if names else []


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"
