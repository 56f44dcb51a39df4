"""Fused routines over logits and logprobs, on any device. Imports nothing of rlbatch."""

from rlbatch_kernels.alignment import (
    AlignmentStats,
    PolicyGradient,
    PolicyRatio,
    alignment_stats,
    alignment_stats_and_policy_gradient,
    alignment_stats_and_ratio,
    count_outside,
    policy_ratio,
)
from rlbatch_kernels.backends import last_backend
from rlbatch_kernels.errors import (
    BackendError,
    BackendWarning,
    DtypeError,
    GroupError,
    ScaleError,
    ShapeError,
    TokenRangeError,
)
from rlbatch_kernels.ops import TokenStatistics, linear_logprobs, token_logprobs, token_statistics
from rlbatch_kernels.per_token import PolicyLoss
from rlbatch_kernels.stats import LAGS, RESIDUAL_CLIP, STAT_COLUMNS, WINDOW, WINDOW_LEAST, column
from rlbatch_kernels.truncation import NO_ID, Kept, KeptIds, Truncation
from rlbatch_kernels.vocab_parallel import VocabGroup

__all__ = [
    "AlignmentStats",
    "BackendError",
    "BackendWarning",
    "DtypeError",
    "GroupError",
    "Kept",
    "KeptIds",
    "LAGS",
    "NO_ID",
    "PolicyGradient",
    "PolicyLoss",
    "PolicyRatio",
    "RESIDUAL_CLIP",
    "STAT_COLUMNS",
    "ScaleError",
    "ShapeError",
    "TokenRangeError",
    "TokenStatistics",
    "Truncation",
    "VocabGroup",
    "WINDOW",
    "WINDOW_LEAST",
    "alignment_stats",
    "alignment_stats_and_policy_gradient",
    "alignment_stats_and_ratio",
    "column",
    "count_outside",
    "last_backend",
    "linear_logprobs",
    "policy_ratio",
    "token_logprobs",
    "token_statistics",
]
