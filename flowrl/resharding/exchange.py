"""One bucket between the ranks of a group, as collectives of its form.

Which collectives is decided here alone. Gloo's all-gather passes parts round a ring and is slower than a broadcast of
each part (docs/decisions/0007-forms-of-exchange.md); NCCL has one that is made for the links. Between two ranks an
all-gather is an exchange of one part each, which both backends do fastest as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from flowrl.resharding.steps import Step


def start(step: Step, incoming: torch.Tensor, outgoing: torch.Tensor, group: dist.ProcessGroup) -> list[Any]:
    """Set a bucket on its way; the works to wait for, one per collective.

    `outgoing` is what this rank sends, flat; `incoming` has the parts of `step.incoming`.
    """
    if not step.to_all:
        return [_exchange(incoming, outgoing, step.incoming, step.outgoing, group)]
    parts = list(torch.split(incoming, list(step.incoming))) if step.received else [outgoing[:0]] * len(step.group)
    parts[step.place] = outgoing
    if step.form == "all_gather" and len(parts) == 2:
        other = 1 - step.place
        received, sent = ([size * (place == other) for place in range(2)] for size in (step.received, step.sent))
        return [_exchange(parts[other], outgoing, received, sent, group)]
    if step.form == "all_gather" and incoming.device.type == "cuda":
        if len(set(step.incoming)) == 1:
            return [dist.all_gather_into_tensor(incoming, outgoing, group, async_op=True)]
        return [dist.all_gather(parts, outgoing, group, async_op=True)]
    senders = [place for place, part in enumerate(parts) if len(part)]
    return [dist.broadcast(parts[place], group_src=place, group=group, async_op=True) for place in senders]


def _exchange(
    incoming: torch.Tensor, outgoing: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: Any
) -> Any:
    return dist.all_to_all_single(incoming, outgoing, list(received), list(sent), group, async_op=True)
