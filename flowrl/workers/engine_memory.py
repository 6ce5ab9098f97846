"""What of an engine's memory is there, and whether its weights are: the order of sleep, wake, receive and generate.

Kept on every device, so that a driver whose order is wrong fails on a laptop too, where nothing really sleeps.
"""

from __future__ import annotations

PARTS = ("weights", "kv_cache")


class EngineMemory:
    """Awake and with the weights of its folder at first. Methods raise `ValueError` with the call that is missing."""

    def __init__(self) -> None:
        self._awake = set(PARTS)
        self._filled = True

    def sleep(self) -> bool:
        """Lose everything. Whether there is memory to give back."""
        awake, self._awake, self._filled = bool(self._awake), set(), False
        return awake

    def wake(self, what: str) -> list[str]:
        """Parts of `what` (one of `PARTS`, or `all`) that must take memory again; empty where all of it is awake."""
        if what not in ("all", *PARTS):
            raise ValueError(f"cannot wake {what!r}; known: all, {', '.join(PARTS)}")
        parts = [part for part in PARTS if what in ("all", part) and part not in self._awake]
        self._awake.update(parts)
        return parts

    def check_receive(self) -> None:
        """Before weights are written."""
        if "weights" not in self._awake:
            raise ValueError(
                "the rollout's weights are asleep, so there is no memory to receive into; call rollout.wake(what='weights') "
                "before rollout.receive_weights(actor)"
            )

    def received(self) -> None:
        """Weights are complete."""
        self._filled = True

    def check_generate(self) -> None:
        """Before a response is generated."""
        asleep = [part for part in PARTS if part not in self._awake]
        if asleep:
            raise ValueError(f"the rollout's {' and '.join(asleep)} sleep; call rollout.wake() before rollout.generate")
        if not self._filled:
            raise ValueError(
                "the rollout lost its weights in rollout.sleep(); call rollout.receive_weights(actor) before rollout.generate"
            )
