"""Which elements of which Hugging Face tensor land where in which parameter, learnt from a model's own loader.

The loader is run once with stand-ins for the tensors of the folder. A stand-in has a shape and a dtype but no data;
it follows every view that the loader takes of it, and when the loader copies such a view into a parameter, the pair
(elements of the tensor, place in the parameter) is noted and nothing is written. Loaders that compute with the
weights cannot be recorded and are refused by tensor name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from flowrl.resharding.dtypes import side_dtype
from flowrl.resharding.families import Box, HFTensor
from flowrl.resharding.regions import num_elements

_VIEWS = frozenset(
    ("view", "_unsafe_view", "view_as", "reshape", "_reshape_alias", "flatten", "unflatten", "as_strided", "expand")
    + ("narrow", "slice", "select", "chunk", "split", "split_with_sizes", "unbind", "unsqueeze", "squeeze")
    + ("transpose", "t", "permute", "numpy_T")
)
_COPIES_OF_ALL = frozenset({"detach", "alias", "_to_copy", "clone", "contiguous"})


@dataclass(frozen=True)
class Region:
    """Elements `box` of Hugging Face tensor `tensor` live in `parameter` at storage `offset` with `stride` (elements).

    `offset` counts from the parameter's own first element.
    """

    tensor: str
    box: Box
    parameter: str
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Recording:
    """What one rank's loader does: its regions in the order of the folder, and the parameters they fill."""

    regions: tuple[Region, ...]
    dtype: torch.dtype

    @property
    def needed(self) -> dict[str, list[Box]]:
        """Tensor -> the boxes that this rank keeps, as often as it keeps them."""
        boxes: dict[str, list[Box]] = {}
        for region in self.regions:
            boxes.setdefault(region.tensor, []).append(region.box)
        return boxes


@dataclass(frozen=True)
class _Copy:
    """One noted copy: a view of a stand-in, and the storage it was copied into."""

    tensor: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: int
    target_offset: int
    target_stride: tuple[int, ...]


class _StandIn(torch.Tensor):
    """A tensor of the folder without data: `view` is a meta tensor that does the arithmetic of views."""

    view_of_all: torch.Tensor
    tensor_name: str
    copies: list[_Copy]

    @staticmethod
    def __new__(cls, view: torch.Tensor, name: str, copies: list[_Copy], device: torch.device) -> _StandIn:
        made: _StandIn = torch.Tensor._make_wrapper_subclass(
            cls,
            view.shape,
            strides=view.stride(),
            storage_offset=view.storage_offset(),
            dtype=view.dtype,
            device=device,
        )
        made.view_of_all, made.tensor_name, made.copies = view, name, copies
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def follow(self, view: Any) -> Any:
        """The stand-in for a view of this one."""
        return _StandIn(view, self.tensor_name, self.copies, self.device) if isinstance(view, torch.Tensor) else view

    def note(self, target: torch.Tensor) -> None:
        view = self.view_of_all
        if view.shape != target.shape:
            raise ValueError(f"{self.tensor_name}: shape {list(view.shape)} is copied into {list(target.shape)}")
        self.copies.append(
            _Copy(
                self.tensor_name,
                int(view.storage_offset()),
                tuple(view.shape),
                view.stride(),
                target.untyped_storage().data_ptr(),
                int(target.storage_offset()),
                target.stride(),
            )
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func.overloadpacket.__name__
        if name == "copy_" and isinstance(args[1], _StandIn) and not isinstance(args[0], _StandIn):
            args[1].note(args[0])
            return args[0]
        stand_in = next(argument for argument in args if isinstance(argument, _StandIn))
        if name in _COPIES_OF_ALL:
            return stand_in.follow(stand_in.view_of_all)
        if name in _VIEWS:
            view = func(stand_in.view_of_all, *args[1:], **(kwargs or {}))
            return tree_map(stand_in.follow, view)
        raise ValueError(f"the engine's loader computes {name} on {stand_in.tensor_name}; only views can be recorded")


def record(
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
    parameters: Mapping[str, torch.Tensor],
    tensors: Sequence[HFTensor],
) -> Recording:
    """Run `load_weights` on stand-ins for `tensors` and say what it would write into `parameters`.

    `parameters` are the model's own, by name; two names of one storage count as the first.

    Errors: `ValueError` naming the tensor where the loader refuses it (unknown name, wrong shape), computes with it,
    writes it to something that is no parameter, or takes other than a box of it; `ValueError` naming the parameters
    that no tensor fills, or those of a dtype that no move knows (`dtypes.side_dtype`).
    """
    dtype = side_dtype("the engine keeps", ((name, parameter.dtype) for name, parameter in parameters.items()))
    device = next(iter(parameters.values())).device
    copies: list[_Copy] = []
    with torch.no_grad():
        for name, shape in ((tensor.name, tensor.shape) for tensor in tensors):
            stand_in = _StandIn(torch.empty(shape, dtype=dtype, device="meta"), name, copies, device)
            try:
                load_weights([(name, stand_in)])
            except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
                reason = str(error) or type(error).__name__
                raise ValueError(f"the engine's loader refuses {name} {list(shape)}: {reason}") from error
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    for name, parameter in parameters.items():
        owners.setdefault(parameter.untyped_storage().data_ptr(), (name, parameter))
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    regions: dict[str, list[Region]] = {name: [] for name, _ in owners.values()}
    for copy in copies:
        region = _region(copy, shapes[copy.tensor], owners)
        regions[region.parameter].append(region)
    _check_filled(regions, parameters)
    ordered = {tensor.name: number for number, tensor in enumerate(tensors)}
    kept = [region for there in regions.values() for region in there if num_elements(region.box)]
    return Recording(tuple(sorted(kept, key=lambda region: ordered[region.tensor])), dtype)


def _check_filled(regions: Mapping[str, Sequence[Region]], parameters: Mapping[str, torch.Tensor]) -> None:
    """Every element of a parameter is written, except rows after the last one of a vocabulary shard (padding)."""
    unfilled = []
    for name, there in regions.items():
        filled = sum(num_elements(region.box) for region in set(there))
        padded = len(set(there)) == 1 and there[0].offset == 0
        if not there or (filled != parameters[name].numel() and not padded):
            unfilled.append(name)
    if unfilled:
        names = ", ".join(f"{name} {list(parameters[name].shape)}" for name in unfilled[:5])
        more = f" and {len(unfilled) - 5} more" if len(unfilled) > 5 else ""
        raise ValueError(
            f"the model's tensors do not fill {len(unfilled)} parameters of the engine: {names}{more}; they would keep what "
            f"the engine started with. Scales mean a quantised engine (use a folder without quantization_config); else the "
            f"family's table in flowrl/resharding/families.py lacks tensors of this model"
        )


def _region(copy: _Copy, shape: tuple[int, ...], owners: Mapping[int, tuple[str, torch.Tensor]]) -> Region:
    if copy.storage not in owners:
        raise ValueError(f"the engine's loader writes {copy.tensor} to something that is no parameter")
    name, parameter = owners[copy.storage]
    starts, rest = [], copy.offset
    strides = torch.empty(shape, device="meta").stride()
    if len(copy.shape) != len(shape) or copy.stride != strides:
        raise ValueError(f"the engine's loader takes other than a box of {copy.tensor} {list(shape)}")
    for stride in strides:
        start, rest = divmod(rest, stride)
        starts.append(start)
    box = tuple((start, start + size) for start, size in zip(starts, copy.shape, strict=True))
    return Region(copy.tensor, box, name, copy.target_offset - int(parameter.storage_offset()), copy.target_stride)


def place_of(region: Region, parameter: torch.Tensor) -> torch.Tensor:
    """The elements of `region` as a writable view of `parameter`, shaped like its box."""
    shape = [stop - start for start, stop in region.box]
    return torch.as_strided(parameter.data, shape, region.stride, parameter.storage_offset() + region.offset)


def check_names(expected: Mapping[str, Sequence[int]], given: Iterable[tuple[str, Sequence[int]]]) -> None:
    """Whether the trainer's tensors are those the engine was recorded with: same names, each once, same shapes.

    Error: one `ValueError` that lists missing, unexpected and repeated names (the first few of each, with counts) and
    tensors of another shape.
    """
    shapes: dict[str, Sequence[int]] = {}
    repeated = []
    for name, shape in given:
        if name in shapes:
            repeated.append(name)
        shapes[name] = shape
    other = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and tuple(shapes[name]) != tuple(shape)
    ]
    faults = {
        "missing": [name for name in expected if name not in shapes],
        "unexpected": [name for name in shapes if name not in expected],
        "given twice": repeated,
        "of another shape": other,
    }
    found = [f"{len(names)} {kind}: {', '.join(names[:5])}" for kind, names in faults.items() if names]
    if found:
        raise ValueError(f"the trainer's tensors are not the engine's; {'; '.join(found)}")
