"""Reward functions: found by name, checked, and run in processes of their own with a time limit.

A user's file imports `batched` from here inside a reward process, so this module stays light: no torch, no numpy.
"""

from flowrl.rewards.function import batched

__all__ = ["batched"]
