"""`list[Sample]` -> `Batch`, and back: the one place where anything is shifted.

Knows nothing of files or models.
"""

from rlbatch.collate.collation import DEFAULT_PADDING, collate, for_audit
from rlbatch.collate.place import PADDING_SIDES, Padding, PaddingSide
from rlbatch.collate.unpack import LogprobsField, unpack, with_logprobs

__all__ = [
    "DEFAULT_PADDING",
    "LogprobsField",
    "PADDING_SIDES",
    "Padding",
    "PaddingSide",
    "collate",
    "for_audit",
    "unpack",
    "with_logprobs",
]
