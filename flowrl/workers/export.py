"""Writing a role's weights as a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from flowrl.workers.hf_weights import FolderWriter, write_weights

if TYPE_CHECKING:
    from flowrl.workers.engine import Engine


def export_folder(engine: Engine, folder: str, bucket_bytes: int) -> None:
    """Write the model's weights and every other file of the folder it came from. Collective.

    Rank 0 receives whole tensors bucket by bucket and writes each at once.
    """
    buckets = engine.weights.gather(engine.hf_tensors, bucket_bytes, reader=0)
    if dist.get_rank() == 0:
        writer = FolderWriter(engine.folder.path, folder)
        write_weights(writer, engine.folder, buckets)
    else:
        for _ in buckets:
            pass
    value_head = engine.whole_value_head()
    if dist.get_rank() == 0:
        if value_head is not None:
            writer.add_value_head(value_head)
        writer.finish()
    # A rank that returns knows that the folder is there.
    dist.barrier()
