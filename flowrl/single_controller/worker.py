"""Worker: the base class of roles, and ``register``, which says how a method is dispatched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, Literal, TypeVar

import torch

from flowrl.protocol import DataProto
from flowrl.single_controller.dispatch import Broadcast, Dispatch, MeshPosition, SplitOver

F = TypeVar("F", bound=Callable[..., Any])
W = TypeVar("W", bound="Worker")
Result = Literal["batch", "nothing", "value"]


@dataclass(frozen=True)
class Place:
    """Where a role lives. The default is a role made directly, outside a pool: alone on the CPU."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pool_name: str = "none"
    run_name: str = "run"
    log_dir: Path | None = None


class Worker:
    """A role: one object per process of a pool. Subclass it, decorate the methods that drivers call with ``register``.

    ``rank``, ``world_size``, ``device``, ... are there already inside ``__init__``, and torch.distributed's default
    group of the pool is initialised by then. All methods of all roles of a pool run on one thread of their process.
    """

    libraries: ClassVar[tuple[str, ...]] = ()
    """Modules that take long to import and that drivers do not need, beside those of the parent class: processes import them
    before they make a role, without the garbage collector."""
    _place = Place()

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def world_size(self) -> int:
        return self._place.world_size

    @property
    def local_rank(self) -> int:
        """Number of this process among the pool's processes on its node."""
        return self._place.local_rank

    @property
    def device(self) -> torch.device:
        return self._place.device

    @property
    def pool_name(self) -> str:
        return self._place.pool_name

    @property
    def run_name(self) -> str:
        return self._place.run_name

    @property
    def log_dir(self) -> Path | None:
        return self._place.log_dir

    def meshes(self) -> dict[str, MeshPosition]:
        """This rank's position in every mesh that ``split_over`` names; asked once, after ``__init__``."""
        return {"world": MeshPosition(data_parallel_rank=self.rank, answers=True)}

    def close(self) -> None:
        """Hook: called in every process when the role is closed or the pool is shut down in good order."""


def libraries(worker: type[Worker]) -> list[str]:
    """Those that a class and its parents name, the parents' first. Error: ValueError for anything but a tuple of names."""
    named: list[str] = []
    for each in reversed(worker.__mro__):
        own = vars(each).get("libraries", ())
        if not (isinstance(own, tuple | list) and all(isinstance(name, str) for name in own)):
            raise ValueError(f"{each.__qualname__}.libraries={own!r} is no tuple of module names, such as ('json',)")
        named.extend(own)
    return list(dict.fromkeys(named))


def construct(worker: type[W], place: Place, *args: Any, **kwargs: Any) -> W:
    """Make a role that knows its place before ``__init__`` runs."""
    role = worker.__new__(worker)
    role._place = place
    role.__init__(*args, **kwargs)  # type: ignore[misc]
    return role


@dataclass(frozen=True)
class Registered:
    """What ``register`` noted about a method."""

    dispatch: Dispatch
    result: Result
    partner: str | None


_MARK = "__flowrl_registered__"


def register(*, dispatch: Dispatch, partner: str | None = None) -> Callable[[F], F]:
    """Make a method callable from drivers and say how: ``broadcast``, ``split_over("mesh")`` or ``rank_zero``.

    The return annotation decides how a driver sees the call: ``-> DataProto`` is a pending batch, ``-> None`` runs on
    its own and its errors surface at the next read, anything else is waited for and returned.

    partner: makes a paired call of one whose argument is a role of another pool. Once both pools are idle the method
    runs there and `partner` of that role, ``-> None``, at the same time; each gets a ``Link`` in the place of the other.

    Errors: ValueError for a method without return annotation, or one that cannot be dispatched that way.
    """

    def mark(method: F) -> F:
        name = method.__qualname__
        result = _result_of(name, method.__annotations__)
        if isinstance(dispatch, SplitOver) and result == "value":
            raise ValueError(f"{name} is split over {dispatch.mesh!r}, so it must be annotated -> DataProto or -> None")
        if dispatch == Broadcast("all") and result == "batch":
            raise ValueError(f"{name} returns a DataProto, which broadcast(answers='all') cannot join; use split_over")
        if partner is not None and not isinstance(dispatch, Broadcast):
            raise ValueError(f"{name} has a partner, so all ranks of both pools take part: use broadcast")
        method.__dict__[_MARK] = Registered(dispatch, result, partner)
        return method

    return mark


def _result_of(name: str, annotations: dict[str, Any]) -> Result:
    if "return" not in annotations:
        raise ValueError(f"registered method {name} needs a return annotation: -> DataProto, -> None or a value's type")
    answer = annotations["return"]
    # With postponed evaluation annotations are text, and their names need not be importable here.
    if answer is DataProto or (isinstance(answer, str) and answer.rpartition(".")[2] == "DataProto"):
        return "batch"
    return "nothing" if answer is None or answer == "None" else "value"


def registered(worker: type[Worker], method: str) -> Registered:
    """Errors: AttributeError saying what is callable when the method does not exist or is not registered."""
    for parent in worker.__mro__:
        if method in vars(parent):
            mark = _mark_of(vars(parent)[method])
            if mark is not None:
                return mark
            raise AttributeError(
                f"{parent.__name__}.{method} is not registered, so a driver cannot call it: decorate it with "
                f"@register(dispatch=...); callable are {registered_names(worker)}"
            )
    raise AttributeError(f"{worker.__name__} has no method {method!r}; callable are {registered_names(worker)}")


def registered_names(worker: type[Worker]) -> list[str]:
    """Names of all methods that drivers may call."""
    return sorted({name for parent in worker.__mro__ for name, member in vars(parent).items() if _mark_of(member)})


def _mark_of(member: object) -> Registered | None:
    return member.__dict__.get(_MARK) if isinstance(member, FunctionType) else None
