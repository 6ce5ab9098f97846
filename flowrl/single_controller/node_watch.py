"""Notices a node that is down or cut off, which Ray's own health check reports only after about a minute."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

ROUND_SECONDS = 5.0
"""A node has this long to answer a connection: time for three attempts of TCP (after 0, 1 and 3 s)."""
SILENT_ROUNDS = 3
"""A node that does not answer in so many rounds in a row is lost."""
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)
_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH)


@dataclass
class _Node:
    endpoint: tuple[str, int]
    answered: bool = False
    silent_rounds: int = 0
    attempt: socket.socket | None = None
    refusal: int = 0


class NodeWatch:
    """Connects to the raylet of every node once a round. The kernel answers for it, so a busy node is no lost node, and
    a refused connection is an answer too: that a raylet ended is for Ray to say.

    Nothing waits here and there is no thread: `silent` is to be called often, and rounds are as long as its callers
    leave between them, at least `ROUND_SECONDS`.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._round_began = 0.0

    def add(self, endpoints: Mapping[str, tuple[str, int]]) -> None:
        """Watch these nodes too; host and port of their raylets by the address that they are called by."""
        for name, endpoint in endpoints.items():
            self._nodes.setdefault(name, _Node(endpoint))

    def silent(self) -> list[str]:
        """Nodes that have answered once, and then not for `SILENT_ROUNDS` rounds."""
        if time.monotonic() - self._round_began >= ROUND_SECONDS:
            for node in self._nodes.values():
                self._end_round(node)
                self._begin_round(node)
            self._round_began = time.monotonic()
        return [name for name, node in self._nodes.items() if node.silent_rounds >= SILENT_ROUNDS]

    def gone(self, name: str, tries: int = 1) -> bool:
        """Whether nothing listens where this node's raylet did: it refuses a connection, or so many of a second each lead
        nowhere."""
        for _ in range(tries if name in self._nodes else 0):
            try:
                socket.create_connection(self._nodes[name].endpoint, timeout=1).close()
                return False
            except ConnectionRefusedError:
                return True
            except OSError as error:
                if error.errno not in (None, *_LOST):  # None: the second is over. Others are of this machine.
                    return False
        return name in self._nodes

    def _begin_round(self, node: _Node) -> None:
        family = socket.AF_INET6 if ":" in node.endpoint[0] else socket.AF_INET
        node.attempt = socket.socket(family, socket.SOCK_STREAM)
        node.attempt.setblocking(False)
        # Mostly EINPROGRESS: the outcome is read at the round's end.
        node.refusal = node.attempt.connect_ex(node.endpoint)

    def _end_round(self, node: _Node) -> None:
        if node.attempt is None:
            return
        with node.attempt as attempt:
            poll = select.poll()
            poll.register(attempt, select.POLLOUT)
            outcome = node.refusal
            if outcome in (0, errno.EINPROGRESS):
                outcome = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if poll.poll(0) else errno.ETIMEDOUT
        node.attempt = None
        if outcome in _ANSWERS:
            node.answered, node.silent_rounds = True, 0
        elif outcome in _LOST and node.answered:
            node.silent_rounds += 1
        # Other errors (no port free, not permitted) are of this machine and say nothing of the node.

    def close(self) -> None:
        """Ends attempts under way; watches nothing any more."""
        for node in self._nodes.values():
            if node.attempt is not None:
                node.attempt.close()
        self._nodes = {}
