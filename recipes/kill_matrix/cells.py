"""The cells of the matrix: places times phases, and what else can befall a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PLACES: dict[str, tuple[int, str]] = {
    "driver": (0, "driver"),
    "actor rank 0": (0, "self"),
    "actor last rank": (1, "self"),
    "reward process": (0, "flowrl.rewards.process"),
    "Ray node": (0, "raylet/raylet"),
}
"""Rank that acts and its victim, as `Order` has them."""
CALLS = {"generate": 2, "log_probs": 2, "update": 2, "reshard": 3, "save": 2}
"""Call of a phase's method that is the one of step 2; weights are moved once before training."""
COMMON = (
    "algorithm=grpo", "kl=none", "trainer.total_steps=3", "trainer.eval_every=0", "data.prompts_per_step=8",
    "actor.minibatch_prompts=8", "reward.function=recipes.kill_matrix.order:score", "reward.num_processes=1",
)  # fmt: skip
_GRADING = ("reward function", "row", "SIGKILL", "step")
STANDALONE = ("placement=standalone_rollout", "cluster.devices=1")


@dataclass(frozen=True)
class Cell:
    """Something that happens to a run: `deed` to `place` in `phase`.

    ends: exit codes that keep the contract, each with what the last line has to say then. limit_seconds: what the contract
    allows for an exit that is not 0.
    """

    place: str
    phase: str
    ends: Mapping[int, tuple[str, ...]]
    deed: str = "SIGKILL"
    overrides: tuple[str, ...] = ()
    limit_seconds: float = 15.0
    rank: int = 0
    victim: str = "self"

    @property
    def name(self) -> str:
        return f"{self.place}/{self.phase}/{self.deed}"

    @property
    def command(self) -> tuple[str, ...]:
        """Overrides of the run."""
        save = ("trainer.save_every=1",) if self.phase == "save" else ()
        return (*COMMON, *save, *self.overrides)


def cells() -> list[Cell]:
    """All of them."""
    found = []
    for place, (rank, victim) in PLACES.items():
        for phase in CALLS:
            limit = 30.0 if place == "Ray node" else 15.0
            found.append(Cell(place, phase, _ends(place, rank), limit_seconds=limit, rank=rank, victim=victim))
    apart = [
        Cell("rollout process", phase, _named(0, "SIGKILL"), overrides=STANDALONE) for phase in ("generate", "reshard")
    ]
    deeds = {"crash": "SIGSEGV", "SIGBUS": "SIGBUS", "raise": "ArithmeticError", "exhaust": "out of memory"}
    other = [
        Cell("reward process", "reward", {1: _GRADING}),
        Cell("Ray's GCS", "update", {1: ("gcs_server", "SIGKILL", "step")}, victim="gcs_server", limit_seconds=30.0),
        *(Cell("actor last rank", "update", _named(1, words), deed, rank=1) for deed, words in deeds.items()),
        Cell(
            "actor last rank", "update", _named(1, "hang"), "hang", ("cluster.call_timeout_seconds=60",), 75.0, rank=1
        ),
        Cell(
            "rollout rank 0", "generate", _named(0, "cluster.collective_timeout_seconds"), "hang",
            ("rollout.layout.tp=2", "cluster.collective_timeout_seconds=30"), 45.0,
        ),
    ]  # fmt: skip
    return [*found, *apart, *other]


def _ends(place: str, rank: int) -> Mapping[int, tuple[str, ...]]:
    if place == "driver":
        return {-9: ()}
    if place == "reward process":
        # It grades while ranks are at work, and what it does at that moment decides.
        return {0: ("was killed by signal SIGKILL while idle; another takes its place",), 1: _GRADING}
    return {1: ("raylet", "SIGKILL")} if place == "Ray node" else _named(rank, "SIGKILL")


def _named(rank: int, words: str) -> Mapping[int, tuple[str, ...]]:
    return {1: ("role ", f"rank {rank},", "node ", "phase ", "step ", words)}
