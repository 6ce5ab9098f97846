"""DataProto: a batch as a table of columns, the one thing that roles hand to each other."""

from flowrl.protocol.checks import MissingColumnError
from flowrl.protocol.columns import Block, Column, LocalBlock, Ragged, Stored
from flowrl.protocol.metric import Metric, merge_metrics
from flowrl.protocol.table import DataProto

__all__ = [
    "Block",
    "Column",
    "DataProto",
    "LocalBlock",
    "Metric",
    "MissingColumnError",
    "Ragged",
    "Stored",
    "merge_metrics",
]
