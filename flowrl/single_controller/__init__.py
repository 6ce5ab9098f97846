"""The single controller: pools of processes, roles on them, and the calls between them and a driver."""

from flowrl.single_controller.call import Span
from flowrl.single_controller.cluster import Cluster
from flowrl.single_controller.device_memory import DeviceMemory
from flowrl.single_controller.dispatch import MeshPosition, broadcast, rank_zero, split_over
from flowrl.single_controller.failures import ClusterError, WorkerError
from flowrl.single_controller.group import WorkerGroup
from flowrl.single_controller.link import Link
from flowrl.single_controller.pool import ResourcePool
from flowrl.single_controller.worker import Place, Worker, construct, register

__all__ = [
    "Cluster",
    "ClusterError",
    "DeviceMemory",
    "Link",
    "MeshPosition",
    "Place",
    "ResourcePool",
    "Span",
    "Worker",
    "WorkerError",
    "WorkerGroup",
    "broadcast",
    "construct",
    "rank_zero",
    "register",
    "split_over",
]
