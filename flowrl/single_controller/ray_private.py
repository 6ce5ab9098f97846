"""The parts of Ray that are not public API. Read in ray 2.60; `test_ray_private` fails when they change."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import ray
import ray._private.ray_constants
import ray._private.state
import ray._private.worker
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.exceptions import RayError

logger = logging.getLogger("flowrl.ray")
_ANSWER_SECONDS = 10
_AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """By node id, what nobody holds now. The public API knows only the sum over all nodes."""
    free: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
    return free


def ended_processes() -> Mapping[str, int]:
    """Exit codes of the processes of a Ray that this process started and that are gone, by kind (`raylet`, ...)."""
    node = ray._private.worker._global_node
    return {} if node is None else {kind: process.returncode for kind, process in node.dead_processes()}


def pids_of_own_ray() -> list[int]:
    """Of the processes that `ended_processes` is about, while they live."""
    node = ray._private.worker._global_node
    return [] if node is None else [process.pid for _, process in node.live_processes()]


def raylet_address(node_id: str) -> tuple[str, int]:
    """Host and port of the raylet of a node."""
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    return node["NodeManagerAddress"], int(node["NodeManagerPort"])


def control_store_answers() -> bool:
    """Whether Ray's GCS answers a question within `_ANSWER_SECONDS`. One that hangs takes connections still, and some of Ray's
    calls wait for it without a limit (`ray.shutdown`) or for a minute."""
    try:
        ray._private.worker.global_worker.gcs_client.internal_kv_exists(b"flowrl", None, timeout=_ANSWER_SECONDS)
    except RayError:
        return False
    return True


def leave_lost_ray() -> None:
    """Without a word to a Ray that is gone: its client would wait a minute for an answer and then end this process, and it
    crashes at the interpreter's end. An exception that nothing catches still ends the process with its traceback, code 1.
    """
    atexit.unregister(ray._private.worker.shutdown)

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ray._private.worker.normal_excepthook(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    sys.excepthook = end


def keep_ray_off_the_console() -> None:
    """Ray's listener prints the raylet's complaints even with log_to_driver=False; send them to a logger instead."""

    def to_logger(data: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        for line in data["lines"]:
            logger.debug("(%s) %s", data.get("pid", "ray"), line)

    assert "print_to_stdstream" in vars(ray._private.worker), "Ray's worker module changed"
    ray._private.worker.print_to_stdstream = to_logger


@contextmanager
def confined() -> Iterator[None]:
    """A Ray started inside, at 127.0.0.1, stays at that address and demands a token that its own processes inherit.

    Ray itself replaces a loopback address by that of the network, except on systems where it supports no clusters; and
    it would write a token of its own, readable by all, into the user's home.
    """
    constants, before = ray._private.ray_constants, {name: os.environ.pop(name, None) for name in _AUTHENTICATION}
    assert "ENABLE_RAY_CLUSTER" in vars(constants), "Ray's constants changed"
    enabled = constants.ENABLE_RAY_CLUSTER
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    constants.ENABLE_RAY_CLUSTER = False
    forget_token()
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def forget_token() -> None:
    """Ray reads mode and token of authentication once in a process; now it reads the environment again."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def serialized_bytes(value: Any) -> int:
    """Bytes that Ray writes for a value given to or returned by a call, buffers beside the pickle included."""
    worker = ray._private.worker.global_worker
    return int(worker.get_serialization_context().serialize(value).total_bytes)
