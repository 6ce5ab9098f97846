"""From measurements to findings: limits and words, no processes."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from flowrl.checks.node import NodeFacts

Level = Literal["ok", "warn", "fail"]
ABSENT = "absent"

STACK = (
    "flowrl", "ray", "torch", "megatron-core", "vllm", "transformers", "tensordict", "tokenizers", "safetensors", "numpy"
)  # fmt: skip
"""Packages that are compared where there is no lock file."""
MAX_SKEW_SECONDS = 1.0
MIN_OPEN_FILES = 4096
MIN_SHARED_MEMORY = 1 << 30
MIN_MEMORY = 2 << 30
STATE_BYTES_PER_WEIGHT_BYTE = 8
"""A checkpoint of actor and critic at most: exact weights and two moments in float32, twice, from bfloat16 weights."""
CHECKPOINTS = 3
"""That lie there at once: those that are kept by default, and the next one."""
SLOW_SHARE = 0.5
MIN_GIGABYTES_PER_SECOND = {"cpu": 0.05, "cuda": 1.0}
_SHOWN = 4
_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's: `remedy` is empty for what is well."""

    level: Level
    name: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5}{self.name:<13}{self.text}" + (f"; {self.remedy}" if self.remedy else "")


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when something failed."""
    return int(any(finding.level == "fail" for finding in findings))


def locked_versions(lock: str) -> dict[str, str]:
    """Version by package of the text of a lock file."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", lock, flags=re.MULTILINE))


def versions(facts: Mapping[str, NodeFacts], locked: Mapping[str, str], lock_name: str) -> list[Finding]:
    """Every node against the lock file, or against the first node where there is none."""
    first = next(iter(facts.values()))
    wanted = locked or first.versions
    wrong = [
        f"node {node} has {name} {got.versions[name]}, not {version}"
        for node, got in facts.items()
        for name, version in wanted.items()
        if got.versions[name] != version
    ]
    python = _same("python", {node: got.python for node, got in facts.items()}, "use one Python on all nodes")
    found = [python] if python.level == "fail" else []
    than = lock_name if locked else "the first node"
    if wrong:
        # Another version than the lock's may well work; another one than the other nodes' does not.
        level: Level = "fail" if any(got.versions != first.versions for got in facts.values()) else "warn"
        return [*found, Finding(level, "versions", _some(wrong), f"install what {than} has")]
    text = f"{len(wanted)} packages as in {than} on {len(facts)} node(s), Python {first.python}"
    return [*found, Finding("ok", "versions", text)]


def devices(by_node: Mapping[str, Sequence[str]]) -> Finding:
    """by_node: what each rank of a node computes on."""
    counted = {
        node: ", ".join(f"{n} x {kind}" for kind, n in Counter(kinds).items()) for node, kinds in by_node.items()
    }
    text = "; ".join(f"node {node}: {kinds}" for node, kinds in counted.items())
    kinds = {kind for found in by_node.values() for kind in found}
    if len(kinds) > 1:
        return Finding("warn", "devices", text, "the slowest kind sets the pace: use nodes of one kind")
    return Finding("ok", "devices", text)


def model(facts: Mapping[str, NodeFacts], path: str) -> Finding:
    remedy = "put the folder on shared storage, or copy it to the same path of every node"
    return _same("model", {node: got.digest for node, got in facts.items()}, remedy, f"{path} is the same on")


def environment(facts: Mapping[str, NodeFacts]) -> Finding:
    """Variables of NCCL and gloo as the workers have them."""
    shown = {
        node: " ".join(f"{name}={value}" for name, value in got.environment.items()) or "none of NCCL_*, GLOO_*"
        for node, got in facts.items()
    }
    text = "; ".join(f"node {node}: {each}" for node, each in shown.items())
    # gloo's interface may have another name on every node.
    named = {
        node: {k: v for k, v in got.environment.items() if k != "GLOO_SOCKET_IFNAME"} for node, got in facts.items()
    }
    if any(each != next(iter(named.values())) for each in named.values()):
        return Finding("warn", "environment", text, "set the same variables before `ray start` on every node")
    return Finding("ok", "environment", text)


def at_least(name: str, got: Mapping[str, int], least: int, unit: int, unit_name: str, remedy: str) -> Finding:
    """A warning for nodes that have less than `least`."""
    low = {node: value for node, value in got.items() if value < least}
    shown = [f"node {node}: {_number(value / unit)}{unit_name}" for node, value in (low or got).items()]
    if low:
        return Finding("warn", name, f"{_some(shown)} is under {_number(least / unit)}{unit_name}", remedy)
    return Finding("ok", name, _some(shown))


def memory(facts: Mapping[str, NodeFacts]) -> list[Finding]:
    return [
        at_least(
            "memory", {node: got.free_memory for node, got in facts.items()}, MIN_MEMORY, _GIB, " GiB free",
            "end other programs",
        ),
        at_least(
            "/dev/shm", {node: got.free_shared_memory for node, got in facts.items()}, MIN_SHARED_MEMORY, _GIB,
            " GiB free", "give the container more (docker --shm-size, a memory-backed emptyDir at /dev/shm)",
        ),
        at_least(
            "open files", {node: got.open_files for node, got in facts.items()}, MIN_OPEN_FILES, 1, "",
            "ulimit -n 65536 before `ray start`",
        ),
    ]  # fmt: skip


def disk(free: int, weights: int) -> Finding:
    """free: bytes in `run.dir`. weights: bytes of the model's."""
    need = weights * STATE_BYTES_PER_WEIGHT_BYTE
    text = f"{free / _GIB:.3g} GiB free in run.dir; a checkpoint may take {need / _GIB:.3g} GiB"
    if free < need * CHECKPOINTS:
        return Finding("warn", "disk", text, "free some, or keep fewer checkpoints")
    return Finding("ok", "disk", text)


def shared(
    folder: str,
    node_of: Sequence[str],
    wrote: Sequence[bool],
    reads: Sequence[Sequence[int]],
    driver_reads: Sequence[int],
) -> Finding:
    """By rank: its node, whether it could write into the folder, and the ranks whose files it saw there."""
    wrong = {node for node, able in zip(node_of, wrote, strict=True) if not able}
    everyone = list(range(len(node_of)))
    wrong |= {node for node, seen in zip(node_of, reads, strict=True) if list(seen) != everyone}
    wrong |= {node_of[rank] for rank in everyone if rank not in driver_reads}
    if wrong:
        text = f"node(s) {', '.join(sorted(wrong))} do not share {folder} with the driver"
        return Finding("fail", "run.dir", text, "run.dir must lie on storage that all nodes mount at the same path")
    return Finding("ok", "run.dir", f"{folder}: each of {len(set(node_of))} node(s) reads what the others wrote")


def skew(seconds: Mapping[str, float], uncertain: float) -> Finding:
    """Each node's clock minus the driver's, known to +- `uncertain`."""
    worst = max(seconds, key=lambda node: abs(seconds[node]))
    text = f"node {worst} is {seconds[worst]:+.3f} s off the driver (+- {uncertain:.3f})"
    if abs(seconds[worst]) > MAX_SKEW_SECONDS + uncertain:
        return Finding("warn", "clocks", text, "timelines will not line up: run an NTP client on all nodes")
    return Finding("ok", "clocks", text)


def rendezvous(sums: Sequence[float], seconds: float, backend: str) -> Finding:
    right = len(sums) * (len(sums) + 1) / 2
    if any(each != right for each in sums):
        return Finding(
            "fail", "rendezvous", f"all-reduce gave {list(sums)}, not {right:g}", "check the network's hardware"
        )
    return Finding(
        "ok", "rendezvous", f"{len(sums)} ranks met over {backend}; all-reduce is right, first one {seconds:.2f} s"
    )


def bandwidth(gigabytes_per_second: Mapping[str, float], device: str) -> Finding:
    """By pair, in words."""
    if not gigabytes_per_second:
        return Finding("ok", "bandwidth", "one rank, nothing to send")
    slowest = min(gigabytes_per_second, key=lambda pair: gigabytes_per_second[pair])
    low, middle = gigabytes_per_second[slowest], statistics.median(gigabytes_per_second.values())
    shown = [f"{pair}: {speed:.3g} GB/s" for pair, speed in gigabytes_per_second.items()]
    if low < MIN_GIGABYTES_PER_SECOND[device] or low < SLOW_SHARE * middle:
        text = f"{slowest}: {low:.3g} GB/s (median of {len(shown)} pairs: {middle:.3g})"
        return Finding(
            "warn", "bandwidth", text, "check NCCL_SOCKET_IFNAME, NCCL_IB_HCA, GLOO_SOCKET_IFNAME and the link"
        )
    return Finding("ok", "bandwidth", _some(shown))


def _same(name: str, values: Mapping[str, Hashable], remedy: str, text: str = "the same on") -> Finding:
    """Whether all nodes have one value, and it is not absent."""
    counted = Counter(values.values())
    usual = counted.most_common(1)[0][0]
    odd = [f"node {node}" for node, value in values.items() if value != usual or value == ABSENT]
    if not odd:
        return Finding("ok", name, f"{text} {len(values)} node(s)")
    return Finding("fail", name, f"{_some(odd)}: absent or other than on the other nodes", remedy)


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _some(texts: Sequence[str]) -> str:
    more = f", and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more
