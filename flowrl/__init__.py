"""flowrl: reinforcement learning of language models, one driver over groups of SPMD workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.protocol import DataProto
    from flowrl.single_controller import ResourcePool, Worker, WorkerGroup, register

__all__ = ["DataProto", "ResourcePool", "Worker", "WorkerGroup", "register"]


def __getattr__(name: str) -> Any:
    # Late, so that reading the configuration (`--help`, a typo) does not pay for torch and ray.
    if name == "DataProto":
        from flowrl.protocol import DataProto

        return DataProto
    if name in __all__:
        from flowrl import single_controller

        return vars(single_controller)[name]
    raise AttributeError(f"module 'flowrl' has no attribute {name!r}")
