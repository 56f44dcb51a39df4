"""Fused routines over logits and logprobs, on any device. Imports nothing of rlbatch."""

from rlbatch_kernels.errors import DtypeError, ScaleError, ShapeError, TokenRangeError
from rlbatch_kernels.ops import PolicyRatio, alignment_stats, linear_logprobs, policy_ratio, token_logprobs
from rlbatch_kernels.stats import LAGS, RESIDUAL_CLIP, STAT_COLUMNS, column

__all__ = [
    "DtypeError",
    "LAGS",
    "PolicyRatio",
    "RESIDUAL_CLIP",
    "STAT_COLUMNS",
    "ScaleError",
    "ShapeError",
    "TokenRangeError",
    "alignment_stats",
    "column",
    "linear_logprobs",
    "policy_ratio",
    "token_logprobs",
]
