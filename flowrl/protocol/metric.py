"""Figures that can be merged over ranks, slices and mini-batches without losing their denominator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """One figure: a mean as total and weight, or a sum, a maximum, a minimum (weight unused).

    Build one with ``Metric.mean(total, weight)``, ``Metric.sum(x)``, ``Metric.max(x)`` or ``Metric.min(x)``.
    """

    kind: Kind
    total: float
    weight: float = 1.0

    @classmethod
    def mean(cls, total: float, weight: float) -> Metric:
        """total / weight; total is already weighted, e.g. a sum of losses and the number of tokens."""
        return cls("mean", float(total), float(weight))

    @classmethod
    def sum(cls, x: float) -> Metric:
        return cls("sum", float(x))

    @classmethod
    def max(cls, x: float) -> Metric:
        return cls("max", float(x))

    @classmethod
    def min(cls, x: float) -> Metric:
        return cls("min", float(x))

    @property
    def value(self) -> float:
        """The figure; a mean over no weight at all is 0."""
        if self.kind != "mean":
            return self.total
        return self.total / self.weight if self.weight else 0.0

    def merge(self, other: Metric) -> Metric:
        """The figure over both sets of observations. Error: different kinds."""
        if self.kind != other.kind:
            raise ValueError(f"cannot merge a {self.kind} with a {other.kind}")
        if self.kind == "mean":
            return Metric("mean", self.total + other.total, self.weight + other.weight)
        pair = (self.total, other.total)
        if any(map(math.isnan, pair)):
            # max() and min() keep whichever of nan and a number comes first.
            return Metric(self.kind, math.nan)
        join = {"sum": pair[0] + pair[1], "max": max(pair), "min": min(pair)}
        return Metric(self.kind, join[self.kind])


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge by name. Error: one name with different kinds."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged and merged[name].kind != metric.kind:
                raise ValueError(f"metric {name!r} is a {merged[name].kind} in one part and a {metric.kind} in another")
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged
