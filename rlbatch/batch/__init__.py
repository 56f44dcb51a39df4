"""`Batch`: the typed tensors of one micro-batch, padded or packed. Made by `rlbatch.collate` alone.

Knows nothing of models or trainers.
"""

from rlbatch.batch.buffer import FIELD_ALIGNMENT, Allocate
from rlbatch.batch.record import (
    LAYOUTS,
    NO_EXPERT,
    NO_TARGET,
    Batch,
    Layout,
    MediaTensor,
    SampleRef,
)

__all__ = [
    "Allocate",
    "Batch",
    "FIELD_ALIGNMENT",
    "LAYOUTS",
    "Layout",
    "MediaTensor",
    "NO_EXPERT",
    "NO_TARGET",
    "SampleRef",
]
