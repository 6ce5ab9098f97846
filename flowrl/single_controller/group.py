"""WorkerGroup: a role on all processes of a pool, seen by the driver as one object typed as the worker class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import ray

from flowrl.protocol import DataProto, merge_metrics
from flowrl.single_controller.call import Call
from flowrl.single_controller.dispatch import (
    Broadcast,
    Mesh,
    SplitOver,
    balanced_rows,
    gather_order,
    neighbouring_rows,
)
from flowrl.single_controller.link import LinkArgument
from flowrl.single_controller.pool import ResourcePool
from flowrl.single_controller.process import Answer, Command, RoleArgument
from flowrl.single_controller.worker import Registered, Worker, libraries, registered

W = TypeVar("W", bound=Worker)
Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class WorkerGroup:
    """Made by ``spawn``. Calling a registered method of the worker class dispatches it to the pool's processes."""

    def __init__(self, pool: ResourcePool, worker: type[Worker], name: str, arguments: Arguments) -> None:
        pool.check_usable()
        if name in pool.roles:
            raise ValueError(f"pool {pool.name!r} has a role {name!r} already; its roles are {list(pool.roles)}")
        if not (isinstance(worker, type) and issubclass(worker, Worker)):
            raise ValueError(f"{worker!r} is not a subclass of Worker")
        libraries(worker)  # So that what is wrong with them is told here, before any process is asked.
        self._pool, self._worker, self._name = pool, worker, name
        self._meshes: dict[str, Mesh] = {}
        self._links: dict[WorkerGroup, tuple[LinkArgument, LinkArgument]] = {}
        self._closed = False
        payload = ray.put(self._sent(arguments))
        self._construction = pool.cluster.calls.submit(
            pool,
            name,
            "__init__",
            lambda: {r: pool.actor(r).construct.remote(name, worker, payload) for r in range(pool.devices)},
        )
        pool.roles[name] = self

    @staticmethod
    def spawn(pool: ResourcePool, worker: type[W], *args: Any, name: str | None = None, **kwargs: Any) -> W:
        """Make ``worker(*args, **kwargs)`` in every process of the pool; the result is typed as the worker.

        Returns at once; errors of ``__init__`` surface at the next read or ``cluster.wait()``. name: unique on the
        pool, the class's name by default.
        """
        return cast(W, WorkerGroup(pool, worker, name or worker.__name__, (args, kwargs)))

    @staticmethod
    def close_all(pool: ResourcePool) -> None:
        """Close every role of a pool, last made first; the pool stays and can take new roles."""
        for group in reversed(list(pool.roles.values())):
            group.close()

    def close(self) -> None:
        """Close the role in all processes and let it go; the pool stays. Idempotent."""
        if self._closed or self._pool.failed:
            return
        self._closed = True
        pool, name = self._pool, self._name
        del pool.roles[name]
        calls = pool.cluster.calls
        calls.wait(
            calls.submit(pool, name, "close", lambda: {r: pool.actor(r).drop.remote(name) for r in range(pool.devices)})
        )

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self, name, registered(self._worker, name))

    def __repr__(self) -> str:
        return f"WorkerGroup({self._worker.__name__} as {self._name!r} on {self._pool.devices} processes of pool {self._pool.name!r})"

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            f"worker group {self._name!r} lies inside an argument; give it as an argument of its own to reach the role object"
        )

    def _mesh(self, name: str) -> Mesh:
        if not self._meshes:
            answers = self._pool.cluster.calls.wait(self._construction)
            by_rank = [answers[rank].value for rank in range(self._pool.devices)]
            self._meshes = {mesh: Mesh.of(mesh, [p[mesh] for p in by_rank]) for mesh in by_rank[0]}
        if name not in self._meshes:
            raise ValueError(f"role {self._name!r} has no mesh {name!r}; meshes() gave {sorted(self._meshes)}")
        return self._meshes[name]

    def _sent(self, arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = arguments
        return [self._sent_one(a) for a in args], {name: self._sent_one(a) for name, a in kwargs.items()}

    def _sent_one(self, argument: Any) -> Any:
        if not isinstance(argument, WorkerGroup):
            return argument
        if argument._pool is not self._pool:
            raise ValueError(
                f"role {argument._name!r} lives on pool {argument._pool.name!r}, so it cannot be handed to a role of "
                f"pool {self._pool.name!r} as an object; methods that were registered with a partner work across pools"
            )
        return RoleArgument(self._pool.key, argument._name)

    def _link(self, other: WorkerGroup) -> tuple[LinkArgument, LinkArgument]:
        """Of the other role and this one, made at their first paired call: what the other's pool and this one's get."""
        if other not in self._links:
            pools = ((other._pool.name, other._pool.devices), (self._pool.name, self._pool.devices))
            roles = ((other._pool.name, other._name), (self._pool.name, self._name))
            host, port = other._pool.host_link(self._pool)
            self._links[other] = (
                LinkArgument(roles, host, port, pools, 0),
                LinkArgument(roles, host, port, pools, other._pool.devices),
            )
        return self._links[other]

    def _send(
        self,
        method: str,
        command: Command,
        payloads: Mapping[int, Any],
        answering: Sequence[int],
        linked: frozenset[str] = frozenset(),
    ) -> Call:
        """Start a method on the ranks that have a payload. `linked`: as of a `Call`."""
        if self._closed:
            raise ValueError(f"role {self._name!r} is closed")
        silent = Command(command.role, command.method, command.result, False, command.same_rows)
        pool = self._pool

        def send() -> dict[int, Any]:
            return {
                rank: pool.actor(rank).call.remote(command if rank in answering else silent, payload)
                for rank, payload in payloads.items()
            }

        return pool.cluster.calls.submit(pool, self._name, method, send, linked)


class _Method:
    """A registered method of a group, bound to its dispatch."""

    def __init__(self, group: WorkerGroup, name: str, mark: Registered) -> None:
        self._group, self._name, self._mark = group, name, mark

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dispatch = self._mark.dispatch
        if isinstance(dispatch, SplitOver):
            return self._split(dispatch, args, kwargs)
        ranks = range(self._group._pool.devices) if isinstance(dispatch, Broadcast) else [0]
        every = dispatch == Broadcast("all")
        if self._mark.partner is not None:
            args, kwargs = self._start_partner(self._mark.partner, args, kwargs)
        payload = self._group._sent((args, kwargs))
        sent = ray.put(payload) if len(ranks) > 1 else payload
        links = [each for each in (*args, *kwargs.values()) if isinstance(each, LinkArgument)]
        linked = frozenset(name for link in links for name, _ in link.pools)
        call = self._group._send(
            self._name, self._command(False), dict.fromkeys(ranks, sent), list(ranks) if every else [0], linked
        )
        if self._mark.result == "nothing":
            return None
        calls = self._group._pool.cluster.calls
        if self._mark.result == "batch":
            return DataProto.pending(lambda: cast(DataProto, calls.wait(call)[0].value))
        answers = calls.wait(call)
        return [answers[rank].value for rank in ranks] if every else answers[0].value

    def _start_partner(
        self, partner: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Where an argument is a role of another pool, start its half of the paired call and put the link in its place."""
        here = self._group
        others = [a for a in (*args, *kwargs.values()) if isinstance(a, WorkerGroup) and a._pool is not here._pool]
        if len(others) != 1:
            return args, kwargs
        other = others[0]
        mark = registered(other._worker, partner)
        if mark.result != "nothing" or not isinstance(mark.dispatch, Broadcast):
            raise ValueError(f"{other._worker.__name__}.{partner} must be broadcast and -> None to be a partner")
        # Neither half waits inside a collective for calls that the other pool has to finish first.
        here._pool.cluster.calls.wait_idle(here._pool, other._pool)
        theirs, ours = here._link(other)
        _Method(other, partner, mark)(theirs)

        def put(argument: Any) -> Any:
            return ours if argument is other else argument

        return tuple(put(a) for a in args), {name: put(a) for name, a in kwargs.items()}

    def _command(self, same_rows: bool) -> Command:
        return Command(self._group._name, self._name, self._mark.result, True, same_rows)

    def _split(self, dispatch: SplitOver, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DataProto | None:
        group = self._group
        mesh = group._mesh(dispatch.mesh)
        keys: list[int | str] = [*range(len(args)), *kwargs]
        everything: dict[int | str, Any] = {key: args[key] if isinstance(key, int) else kwargs[key] for key in keys}
        which = next((key for key in keys if isinstance(everything[key], DataProto)), None)
        if which is None:
            raise ValueError(
                f"{group._worker.__name__}.{self._name} is split over {dispatch.mesh!r} but got no DataProto"
            )
        batch: DataProto = everything[which]
        if not len(batch):
            raise ValueError(f"{group._worker.__name__}.{self._name} was given a batch of 0 rows; at least 1")
        if dispatch.balance is None:
            slices = neighbouring_rows(len(batch), mesh.num_slices)
        else:
            slices = balanced_rows(batch.lengths(dispatch.balance).tolist(), mesh.num_slices)
        payloads: dict[int, Any] = {}
        for number, rows in enumerate(slices):
            part = {**everything, which: batch.rows(rows)}
            payload = group._sent(([part[i] for i in range(len(args))], {name: part[name] for name in kwargs}))
            ranks = mesh.ranks_of(number)
            payloads.update(dict.fromkeys(ranks, ray.put(payload) if len(ranks) > 1 else payload))
        answering = [mesh.answering_rank(number) for number in range(mesh.num_slices)]
        call = group._send(self._name, self._command(self._mark.result == "batch"), payloads, answering)
        if self._mark.result == "nothing":
            return None
        calls = group._pool.cluster.calls
        return DataProto.pending(lambda: _joined(calls.wait(call), answering, slices))


def _joined(answers: Mapping[int, Answer], answering: Sequence[int], slices: Sequence[Sequence[int]]) -> DataProto:
    """The slices' answers as one table in input order; metrics of all slices merged."""
    parts = [cast(DataProto, answers[rank].value) for rank in answering]
    # A slice without rows may have columns of another type (nothing tells it which); only its metrics count.
    table = DataProto.concat([part for part in parts if len(part)]).reorder(gather_order(slices))
    return table.with_metrics(merge_metrics(part.metrics for part in parts))
