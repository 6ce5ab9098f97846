"""The continuous parameter buffer: a rank's training shard in one piece of memory per dtype, experts apart.

Parameters are views of it, the last one first: the order of the buffer that Megatron-core's distributed optimizer makes
for itself (`param_data`, read in Megatron-core 0.16.1), so that a plan's pieces follow one order whichever it is. A
layer's parameters are neighbours, and a bucket of whole parameters is a slice of the memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

EXPERTS = ".experts."
"""In the names of the parameters of routed experts."""


@torch.no_grad()
def hold_together(parameters: Mapping[str, torch.nn.Parameter]) -> tuple[torch.Tensor, ...]:
    """Move parameters into buffers, keeping their values; `parameters` in the model's order. Returns the flat buffers.

    Whoever keeps the old `parameter.data` keeps old memory: call it before anything does.
    """
    kinds: dict[tuple[torch.dtype, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in reversed(list(parameters.items())):
        kinds.setdefault((parameter.dtype, EXPERTS in name), []).append(parameter)
    return tuple(_hold(members) for members in kinds.values())


def _hold(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    sizes = [parameter.numel() for parameter in parameters]
    buffer = torch.empty(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, part in zip(parameters, torch.split(buffer, sizes), strict=True):
        part.copy_(parameter.view(-1))
        parameter.data = part.view(parameter.shape)
    return buffer
