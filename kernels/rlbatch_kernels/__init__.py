"""Fused routines over logits and logprobs, on any device. Imports nothing of rlbatch."""

from rlbatch_kernels.errors import DtypeError, GroupError, ScaleError, ShapeError, TokenRangeError
from rlbatch_kernels.ops import PolicyRatio, alignment_stats, linear_logprobs, policy_ratio, token_logprobs
from rlbatch_kernels.stats import LAGS, RESIDUAL_CLIP, STAT_COLUMNS, column
from rlbatch_kernels.truncation import NO_ID, Kept, KeptIds, Truncation
from rlbatch_kernels.vocab_parallel import VocabGroup

__all__ = [
    "DtypeError",
    "GroupError",
    "Kept",
    "KeptIds",
    "LAGS",
    "NO_ID",
    "PolicyRatio",
    "RESIDUAL_CLIP",
    "STAT_COLUMNS",
    "ScaleError",
    "ShapeError",
    "TokenRangeError",
    "Truncation",
    "VocabGroup",
    "alignment_stats",
    "column",
    "linear_logprobs",
    "policy_ratio",
    "token_logprobs",
]
