"""Calls under way: the driver waits for the one it needs and notices whatever fails first."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    WorkerCrashedError,
)

from flowrl.single_controller.call import PROCESS, Call, Span
from flowrl.single_controller.failures import (
    COLLECTIVE_TIMEOUT,
    LOST_PEER,
    ClusterError,
    WorkerError,
    death_cause,
    log_tail,
    readable,
)
from flowrl.single_controller.health import RayWatch
from flowrl.single_controller.host_memory import ResidentSizes, oom_kills
from flowrl.single_controller.node_watch import ROUND_SECONDS, SILENT_ROUNDS, NodeWatch
from flowrl.single_controller.patience import Patience
from flowrl.single_controller.process import Answer
from flowrl.single_controller.stacks import standing, suspects

if TYPE_CHECKING:
    from flowrl.single_controller.pool import ResourcePool

logger = logging.getLogger("flowrl")
_DEATH_GRACE_SECONDS = 1.0
_LOST_PEER_SECONDS = 20.0
"""Ray tells the end of a process within moments, and that of a whole node after up to 15 s."""
_GONE_TRIES = 3
_POLL_SECONDS = 1.0
_SHOWN_RANKS = 8
_DEATHS = (ActorDiedError, ActorUnavailableError, NodeDiedError, OutOfMemoryError, WorkerCrashedError)


class Calls:
    """All outstanding calls of a cluster's pools. A failure anywhere ends the wait for anything."""

    def __init__(self, timeout_seconds: float | None, ray_watch: RayWatch, node: str) -> None:
        """timeout_seconds: of one call; None is no limit. node: the driver's address."""
        self._timeout_seconds = timeout_seconds
        self._ray_watch = ray_watch
        self._node = node
        self._patience = Patience(timeout_seconds)
        self._sizes = ResidentSizes()
        self._looked = 0.0
        self._outstanding: list[Call] = []
        self._pools: list[ResourcePool] = []
        self._spans: list[Span] = []
        self._phase: tuple[str | None, int | None] = (None, None)
        self._oom_kills = oom_kills()
        self.nodes = NodeWatch()

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        before = self._phase
        self._phase = (name, step)
        try:
            yield
        finally:
            self._phase = before

    def watch(self, pool: ResourcePool) -> None:
        self._pools.append(pool)

    def forget(self, pool: ResourcePool) -> None:
        self._pools = [other for other in self._pools if other is not pool]
        self._outstanding = [call for call in self._outstanding if call.pool is not pool]

    def submit(
        self,
        pool: ResourcePool,
        role: str,
        method: str,
        send: Callable[[], dict[int, Any]],
        linked: frozenset[str] = frozenset(),
    ) -> Call:
        """``send`` starts the method and returns a reference by rank. Errors: an earlier failure, at once."""
        self.poll()
        pool.check_usable()
        call = Call(pool, role, method, *self._phase, refs=send(), linked=linked)
        self._outstanding.append(call)
        return call

    def wait(self, call: Call) -> dict[int, Answer]:
        """Answers by rank. Errors: WorkerError of the first rank of any outstanding call that died or raised."""
        while not call.done:
            call.pool.check_usable()
            self._step(_POLL_SECONDS)
        return call.answers

    def wait_idle(self, *pools: ResourcePool) -> None:
        """Until these pools have nothing outstanding."""
        for call in [each for each in self._outstanding if each.pool in pools]:
            self.wait(call)

    def wait_all(self) -> None:
        """Until nothing is outstanding."""
        for call in list(self._outstanding):
            self.wait(call)
        self.poll()

    def poll(self) -> None:
        """Take in what has finished or failed, without waiting."""
        if self._outstanding or self._pools:
            self._step(0)

    def drain_spans(self) -> list[Span]:
        self.poll()
        spans, self._spans = self._spans, []
        return spans

    def check_ray(self, look: bool = False) -> None:
        """look: now, not as of the last second. Errors: ClusterError when Ray itself is gone; nothing more is asked of it
        then."""
        problem = self._ray_watch.problem(look)
        if problem is None:
            return
        running = self._outstanding[0] if self._outstanding else None
        phase, step = ((running.phase or running.method), running.step) if running else self._phase
        error = ClusterError(problem, phase, step)
        for pool in self._pools:
            pool.lose(error)
        self._outstanding, self._pools = [], []
        raise error

    def _running(self) -> list[Call]:
        """A pool runs one call after the other: the first of each is the one that it is at."""
        return list({call.pool: call for call in reversed(self._outstanding)}.values())

    def _look(self) -> None:
        """Every second, beside the answers: nodes, the sizes of processes, calls that last too long."""
        now = time.monotonic()
        if now - self._looked < _POLL_SECONDS:
            return
        self._looked = now
        self._check_nodes()
        for process in (pool.process(rank) for pool in self._pools for rank in range(pool.devices)):
            if process.node == self._node:
                self._sizes.look(process.pid)
        self._patience.look(self._running(), now)
        for call, seconds in self._patience.slow(now):
            logger.warning(
                "%s has run %s for %.0f s%s; ranks %s of %d have not answered",
                call.role, call.method, seconds, "" if call.step is None else f" in step {call.step}",
                _ranks(call.pending), len(call.refs),
            )  # fmt: skip
        overdue = self._patience.overdue(now)
        if overdue is not None:
            self._hung(
                overdue, overdue.pending, f"no answer within cluster.call_timeout_seconds={self._timeout_seconds:g}"
            )

    def _step(self, timeout: float) -> None:
        self.check_ray()
        self._look()
        owners: dict[Any, tuple[ResourcePool, int, Call | None]] = {}
        for pool in self._pools:
            owners.update({ref: (pool, rank, None) for rank, ref in pool.watch_refs().items()})
        for call in self._outstanding:
            owners.update({ref: (call.pool, rank, call) for rank, ref in call.refs.items() if rank not in call.answers})
        if not owners:
            return
        # A bounded wait, repeated: Python's signal handlers run between two of them.
        ready, _ = ray.wait(list(owners), num_returns=1, timeout=timeout, fetch_local=False)
        if ready:
            ready, _ = ray.wait(list(owners), num_returns=len(owners), timeout=0, fetch_local=False)
        try:
            answers = ray.get(ready)
        except RayError:
            # One of them failed: take them one by one, those first that may be a cause of the others.
            for ref in sorted(ready, key=lambda ref: self._innocent(ref, *owners[ref][:2])):
                self._take(ref, *owners[ref])
            return
        for ref, answer in zip(ready, answers, strict=True):
            self._note(answer, *owners[ref])

    def _check_nodes(self) -> None:
        """Errors: WorkerError of the first process on a node that does not answer, one with a call under way first."""
        silent = self.nodes.silent()
        lost = [(p, rank) for p in self._pools for rank in range(p.devices) if p.process(rank).node in silent]
        for pool, rank in sorted(lost, key=lambda each: self._unanswered(*each) is None):
            node = pool.process(rank).node
            cause = f"node {node} is down or cut off: no answer for {ROUND_SECONDS * SILENT_ROUNDS:.0f} s"
            self._fail(pool, rank, self._unanswered(pool, rank), cause, "")

    def _unanswered(self, pool: ResourcePool, rank: int) -> Call | None:
        """The first call that this rank has not answered. Answers that are there and were not taken in yet are, first."""
        for call in [c for c in self._outstanding if c.pool is pool and rank in c.refs and rank not in c.answers]:
            if not ray.wait([call.refs[rank]], timeout=0, fetch_local=False)[0]:
                break
            try:
                self._note(ray.get(call.refs[rank]), pool, rank, call)
            except RayError:
                break
        return next((c for c in self._outstanding if c.pool is pool and rank in c.refs and rank not in c.answers), None)

    def _take(self, ref: Any, pool: ResourcePool, rank: int, call: Call | None) -> None:
        try:
            answer = ray.get(ref)
        except _DEATHS as error:
            self._died(pool, rank, call, error)
        except RayError as error:
            if call is None:
                raise
            self._raised(pool, rank, call, error)
        self._note(answer, pool, rank, call)

    def _note(self, answer: Answer, pool: ResourcePool, rank: int, call: Call | None) -> None:
        if call is None:
            return
        call.answers[rank] = answer
        if call.done:
            self._outstanding.remove(call)
            self._spans.append(call.span())

    def _raised(self, pool: ResourcePool, rank: int, call: Call, error: RayError) -> None:
        text = readable(str(error))
        lost_peer = bool(LOST_PEER.search(text))
        self._name_the_cause(pool, rank, lost_peer)
        if COLLECTIVE_TIMEOUT.search(text):
            self._collective_timed_out(rank, call, text)
        cause = next((line for line in reversed(text.strip().splitlines()) if line.strip()), "unknown error").strip()
        if lost_peer:
            cause += f" (no process of the run was seen to end within {_LOST_PEER_SECONDS:.0f} s)"
        self._fail(pool, rank, call, cause, text)

    def _innocent(self, ref: Any, pool: ResourcePool, rank: int) -> bool:
        """Whether this rank has answered, or failed because a peer is gone."""
        try:
            ray.get(ref)
        except RayError as error:
            lines = log_tail(pool.process(rank)) if isinstance(error, _DEATHS) else [str(error)]
            return any(LOST_PEER.search(line) for line in lines)
        return True

    def _name_the_cause(self, pool: ResourcePool, rank: int, lost_peer: bool) -> None:
        """When a process dies, the collectives of its peers raise before the death is known here: looks for one among those
        that `rank`, which failed, may have met. lost_peer: it says itself that one is gone. Then Ray is given time to tell,
        a node where nothing answers is as good as told, and what another rank raises may be why it left. Errors: WorkerError
        of the one that failed first."""
        pools = [pool, *(each for each in {other.pool for other in self._outstanding} if each is not pool)]
        watched: dict[Any, tuple[ResourcePool, int, Call | None]]
        watched = {ref: (each, other, None) for each in pools for other, ref in each.watch_refs().items()}
        if lost_peer:
            watched |= {ref: (c.pool, other, c) for c in self._running() for other, ref in c.refs.items()}
        watched = {ref: who for ref, who in watched.items() if who[:2] != (pool, rank)}
        deadline = time.monotonic() + (_LOST_PEER_SECONDS if lost_peer else _DEATH_GRACE_SECONDS)
        while watched and time.monotonic() < deadline:
            ready, _ = ray.wait(list(watched), num_returns=1, timeout=0.1, fetch_local=False)
            for ref in ready:
                each, other, call = watched.pop(ref)
                if not self._innocent(ref, each, other):
                    self._take(ref, each, other, call)
            self.check_ray()
            if lost_peer:
                self._name_a_lost_node([who[:2] for who in watched.values()])

    def _name_a_lost_node(self, processes: Sequence[tuple[ResourcePool, int]]) -> None:
        """Errors: WorkerError of the first of these processes whose node is gone, one with a call under way first."""
        first: dict[str, tuple[ResourcePool, int]] = {}
        for pool, rank in sorted(processes, key=lambda each: self._unanswered(*each) is None):
            first.setdefault(pool.process(rank).node, (pool, rank))
        for node, (pool, rank) in first.items():
            if self.nodes.gone(node, tries=_GONE_TRIES):
                self.check_ray(look=True)
                cause = f"Ray on node {node} is gone, and with it its processes (the node, or all of it killed)"
                self._fail(pool, rank, self._unanswered(pool, rank), cause, "")

    def _died(self, pool: ResourcePool, rank: int, call: Call | None, error: RayError) -> None:
        self.check_ray(look=True)
        # A process is at the first call that it has not answered, whichever of them is told first.
        call = self._unanswered(pool, rank) or call
        tail = log_tail(pool.process(rank))
        if call is not None and any(COLLECTIVE_TIMEOUT.search(line) for line in tail):
            self._collective_timed_out(rank, call, "\n".join(tail))
        if any(LOST_PEER.search(line) for line in tail):
            self._name_the_cause(pool, rank, lost_peer=True)
        memory = self._sizes.figures(pool.process(rank).pid)
        # The kernel counts a kill a moment after the process is gone.
        cause = death_cause(str(error), tail, oom_kills() - self._oom_kills, memory)
        if self.nodes.gone(pool.process(rank).node):
            cause = f"Ray on node {pool.process(rank).node} is gone, and with it its processes (the node, or all of it killed): {cause}"
        self._fail(pool, rank, call, cause, "")

    def _collective_timed_out(self, rank: int, call: Call, text: str) -> None:
        """Names the ranks that the others waited for, where there are any: those that neither answered nor failed."""
        refs = {ref: other for other, ref in call.refs.items() if other not in call.answers and other != rank}
        ready = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)[0] if refs else []
        hung = [other for ref, other in refs.items() if ref not in ready]
        found = COLLECTIVE_TIMEOUT.search(text)
        if hung and found:
            self._hung(
                call, hung, f"rank {rank} waited longer than cluster.collective_timeout_seconds for it ({found[0]})"
            )

    def _hung(self, call: Call, pending: list[int], cause: str) -> None:
        """Ends the run, naming where the ranks stand that have not answered. Their logs get the stacks of all threads."""
        # What hangs may be the other half of a paired call.
        calls = [call, *(other for other in self._running() if other.pool is not call.pool)]
        ranks = {each: pending if each is call else each.pending for each in calls}
        stacks = {each: each.pool.dump_stacks() for each in calls}
        guilty = next((each for each in calls if suspects(ranks[each], stacks[each])), call)
        named = suspects(ranks[guilty], stacks[guilty]) or ranks[guilty]
        lines = ["all stacks are in the logs"]
        for each in calls:
            lines.append(
                f"{each.role}.{each.method}: ranks {_ranks(ranks[each])} of {len(each.refs)} have not answered"
            )
            for rank in ranks[each][:_SHOWN_RANKS]:
                lines.append(f"  rank {rank} (pid {each.pool.process(rank).pid}) {standing(rank, stacks[each])}")
        where = (
            f"ranks {_ranks(named)} of {len(guilty.refs)} hang; rank {named[0]} {standing(named[0], stacks[guilty])}"
        )
        self._fail(guilty.pool, named[0], guilty, f"{cause}; {where}", "\n".join(lines))

    def _fail(self, pool: ResourcePool, rank: int, call: Call | None, cause: str, detail: str) -> None:
        phase, step = (call.phase, call.step) if call else self._phase
        self._oom_kills = oom_kills()  # the next failure may have another cause
        error = WorkerError(
            role=call.role if call else "+".join(pool.roles) or PROCESS,
            pool=pool.name,
            process=pool.process(rank),
            method=call.method if call else "none (between calls)",
            phase=phase,
            step=step,
            cause=cause,
            detail=detail,
        )
        # A pool that meets this one in collectives may wait for the failed rank for ever; others go on with what they do.
        for broken in {pool, *(other.pool for other in self._outstanding if pool.name in other.linked)}:
            broken.fail(error)
            self.forget(broken)
        raise error


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    return shown if len(ranks) <= _SHOWN_RANKS else f"{shown}, ... ({len(ranks)} in all)"
