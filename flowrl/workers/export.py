"""Writing a role's weights as a Hugging Face folder."""

from __future__ import annotations

import logging

import torch.distributed as dist

from flowrl.workers.engine import Engine
from flowrl.workers.hf_weights import FolderWriter

logger = logging.getLogger(__name__)


def export_folder(engine: Engine, folder: str, bucket_bytes: int) -> None:
    """Write the model's weights and every other file of the folder it came from. Collective.

    Rank 0 receives whole tensors bucket by bucket and writes each at once, in the type that the original folder has, so
    a model that did not learn is exported bit for bit (where the engine's type is as wide as the folder's).
    """
    buckets = engine.weights.gather(engine.hf_tensors, bucket_bytes, reader=0)
    if dist.get_rank() == 0:
        source = engine.folder
        writer = FolderWriter(source.path, folder)
        narrowed = set()
        for bucket in buckets:
            dtypes = {name: source.dtype(name) for name, _ in bucket}
            narrowed |= {dtype for name, tensor in bucket if (dtype := dtypes[name]).itemsize < tensor.element_size()}
            writer.add((name, tensor.to(dtypes[name])) for name, tensor in bucket)
        if narrowed:
            logger.info("exported as %s, the type of %s", ", ".join(map(str, narrowed)), source.path)
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
