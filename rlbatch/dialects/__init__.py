"""Batches in the names and shapes of other trainers, and back: TRL, verl, prime-rl, tinker.

Each dialect is renaming and moving, no arithmetic. Knows no trainer's code.
"""

from rlbatch.dialects.convert import DIALECTS, as_dict, from_dict
from rlbatch.dialects.dialect import Dialect

__all__ = ["DIALECTS", "Dialect", "as_dict", "from_dict"]
