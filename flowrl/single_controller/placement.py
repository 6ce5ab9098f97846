"""Whether and how devices fit on nodes: arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_CPUS_PER_DEVICE = 0.1
GPU_DEVICE_CPUS = 0.1


@dataclass(frozen=True)
class NodeResources:
    """Resources of one node; ``free`` is what nobody holds now."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


def devices_on(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How many bundles fit into a node's resources."""
    # In hundredths, so that 2.0 / 0.1 is 20 and not 19.
    return min(round(node.get(name, 0.0) * 100) // max(1, round(need * 100)) for name, need in bundle.items())


def cpu_share(node_cpus: Sequence[float], devices: int) -> float:
    """CPUs of one CPU device: the largest share, in hundredths, of which ``devices`` fit on the nodes; 0 if none does."""
    hundredths = [int(round(cpus * 100)) for cpus in node_cpus]
    candidates = sorted({total // k for total in hundredths for k in range(1, devices + 1)}, reverse=True)
    for share in candidates:
        if share > 0 and sum(total // share for total in hundredths) >= devices:
            return share / 100
    return 0.0


def bundle_for(
    device: str, devices: int, nodes: Sequence[NodeResources], cpus_per_device: float | None
) -> dict[str, float]:
    """Resources of one device. Error: ValueError when a CPU device would get less than 0.1 CPU."""
    if device == "cuda":
        return {"GPU": 1.0, "CPU": GPU_DEVICE_CPUS if cpus_per_device is None else cpus_per_device}
    node_cpus = [node.total.get("CPU", 0.0) for node in nodes]
    share = cpu_share(node_cpus, devices) if cpus_per_device is None else cpus_per_device
    if share < MIN_CPUS_PER_DEVICE:
        raise ValueError(
            f"cluster.devices={devices} on {sum(node_cpus):g} CPUs is {share:g} CPUs each, under the least, "
            f"{MIN_CPUS_PER_DEVICE:g}; at most {sum(devices_on({'CPU': c}, {'CPU': MIN_CPUS_PER_DEVICE}) for c in node_cpus)} devices fit"
        )
    return {"CPU": share}


def shortfall(
    pool: str, devices: int, bundle: Mapping[str, float], nodes: Sequence[NodeResources], free: bool
) -> str | None:
    """The arithmetic of a request that does not fit (counting free or all resources), or None when it fits."""
    fits = [devices_on(node.free if free else node.total, bundle) for node in nodes]
    if sum(fits) >= devices:
        return None
    wanted = ", ".join(f"{name} {need:g}" for name, need in sorted(bundle.items()))
    lines = [f"pool {pool!r} asks for {devices} devices of ({wanted}) each; there is room for {sum(fits)}:"]
    for node, room in zip(nodes, fits, strict=True):
        has = ", ".join(
            f"{name} {node.total.get(name, 0.0):g} ({node.free.get(name, 0.0):g} free)" for name in sorted(bundle)
        )
        lines.append(f"  node {node.address}: {has}: room for {room}")
    most = f"cluster.devices={sum(fits)}" if sum(fits) else "fewer devices"
    remedy = f"use {most}, or add nodes"
    if "GPU" in bundle and not any(node.total.get("GPU", 0.0) for node in nodes):
        remedy = "no node has a GPU: use cluster.device=cpu"
    elif free:
        remedy += ", or wait until other jobs on this cluster end (cluster.placement_timeout_seconds)"
    return "\n".join([*lines, f"  {remedy}"])
