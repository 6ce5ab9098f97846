"""The cells of the matrix: places times phases, and what else can befall a run."""

from __future__ import annotations

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
STANDALONE = ("placement=standalone_rollout", "cluster.devices=1")


@dataclass(frozen=True)
class Cell:
    """Something that happens to a run: `deed` to `place` in `phase`. `limit_seconds`: what the contract allows for the exit."""

    place: str
    phase: str
    deed: str = "SIGKILL"
    overrides: tuple[str, ...] = ()
    limit_seconds: float = 15.0
    exit_code: int = 1
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
            limit, code = (30.0, 1) if place == "Ray node" else (15.0, -9 if place == "driver" else 1)
            found.append(
                Cell(
                    place, phase, limit_seconds=limit, rank=rank, victim=victim,
                    exit_code=0 if place == "reward process" else code,
                )
            )  # fmt: skip
    apart = [Cell("rollout process", phase, overrides=STANDALONE) for phase in ("generate", "reshard")]
    other = [
        Cell("reward process", "reward"),
        Cell("Ray's GCS", "update", victim="gcs_server", limit_seconds=30.0),
        *(Cell("actor last rank", "update", deed, rank=1) for deed in ("SIGSEGV", "SIGBUS", "raise", "exhaust")),
        Cell("actor last rank", "update", "hang", ("cluster.call_timeout_seconds=60",), 75.0, rank=1),
        Cell("rollout rank 0", "generate", "hang", ("cluster.collective_timeout_seconds=30",), 45.0),
    ]
    return [*found, *apart, *other]
