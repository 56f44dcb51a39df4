"""Lengths -> batches and ranks: which samples share a batch under a hard budget, and which rank gets it.

Integers only: knows nothing of what a sample is, of tensors or of files.
"""

from rlbatch.packing.bins import Room, plan_batches, too_long
from rlbatch.packing.ranks import Cost, balance, imbalance, plan_ranks
from rlbatch.packing.rows import rounded, row_tokens
from rlbatch.packing.totals import StepInfo

__all__ = [
    "Cost",
    "Room",
    "StepInfo",
    "balance",
    "imbalance",
    "plan_batches",
    "plan_ranks",
    "rounded",
    "row_tokens",
    "too_long",
]
