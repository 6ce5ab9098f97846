"""Which prompts a step gets: a pure function of table size, step size, seed and step number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]


class StepOrder:
    """Epoch after epoch of shuffled prompts, cut into steps; an epoch's last, incomplete part goes on in the next.

    A step never holds a prompt twice: where it spans two epochs, prompts of the new one that the step already has
    change places with prompts that come later. Each epoch stays a permutation.
    """

    def __init__(self, num_prompts: int, prompts_per_step: int, seed: int, shuffle: bool) -> None:
        if prompts_per_step > num_prompts:
            raise ValueError(f"{num_prompts} prompts are fewer than prompts_per_step={prompts_per_step}")
        self._size = num_prompts
        self._per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._orders: tuple[Order, Order] = (np.empty(0, np.int64), np.empty(0, np.int64))

    def step(self, step: int) -> Order:
        """Indices [prompts_per_step] of step `step`, counted from 1."""
        start = (step - 1) * self._per_step
        epoch, position = divmod(start, self._size)
        this, following = self._epochs(epoch)
        part = this[position : position + self._per_step]
        return np.concatenate([part, following[: self._per_step - len(part)]])

    def _epochs(self, epoch: int) -> tuple[Order, Order]:
        """The orders of an epoch and the one after; each depends on the one before, so they are made in sequence."""
        if epoch < self._epoch or self._epoch < 0:
            self._epoch, first = 0, self._shuffled(0)
            self._orders = (first, self._joined(first, 0))
        while self._epoch < epoch:
            self._epoch += 1
            self._orders = (self._orders[1], self._joined(self._orders[1], self._epoch))
        return self._orders

    def _shuffled(self, epoch: int) -> Order:
        if not self._shuffle:
            return np.arange(self._size)
        return np.random.default_rng([self._seed, epoch]).permutation(self._size)

    def _joined(self, before: Order, epoch: int) -> Order:
        """The order of epoch + 1, so that the step which begins in `before` (epoch `epoch`) has no prompt twice."""
        order = self._shuffled(epoch + 1)
        head = (
            -((epoch + 1) * self._size) % self._per_step
        )  # positions of the new epoch that belong to the old one's last step
        if head == 0:
            return order
        taken = set(before[self._size - (self._per_step - head) :].tolist())
        repeated = [i for i in range(head) if int(order[i]) in taken]
        later = iter(i for i in range(head, self._size) if int(order[i]) not in taken)
        for i in repeated:
            j = next(later)
            order[i], order[j] = order[j], order[i]
        return order
