"""Figures of many log ratios in bounded memory: counts, sums, a maximum, a histogram. They merge exactly.

Nats over compared tokens; log_ratio = trainer - inference. Knows nothing of tensors or files.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

K3_CAP = 1.0
"""Most that one token adds to the gate statistic: one log_ratio of 7 in 10,000 makes a plain mean 0.109."""
EXP_CLAMP = 20.0
"""|log_ratio| is clamped to this inside exp only, so that one wild token leaves the sums finite."""

_BINS_A_DECADE = 50
_EDGES = 10.0 ** (np.arange(-10 * _BINS_A_DECADE, 5 * _BINS_A_DECADE + 1) / _BINS_A_DECADE)
"""From 1e-10 to 1e5 nats; quantiles are exact to one bin, 4.7 %."""


def k3_of(log_ratio: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """exp(x) - 1 - x in float64, never negative, x clamped only inside exp.

    expm1(x) - x cancels below |x| of about 1e-4 even in float64; there the series is exact to rounding.
    """
    x = np.asarray(log_ratio, np.float64)
    near = np.abs(x) < 1e-3
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x / 120)))
    return np.where(near, series, np.expm1(np.clip(x, -EXP_CLAMP, EXP_CLAMP)) - x)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Figures:
    """Sums over tokens; the means are properties and are 0 where there are no tokens."""

    num_tokens: int = 0
    sum_log_ratio: float = 0.0
    sum_k3: float = 0.0
    sum_k3_capped: float = 0.0
    max_abs_log_ratio: float = 0.0
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(_EDGES) + 1, np.int64))
    """Counts of |log_ratio| between the fixed edges; first and last bin are open."""

    @classmethod
    def of(cls, log_ratio: NDArray[np.floating[Any]]) -> Self:
        """Figures of [N] finite log ratios."""
        x = np.asarray(log_ratio, np.float64).ravel()
        if not len(x):
            return cls()
        size = np.abs(x)
        k3 = k3_of(x)
        return cls(
            num_tokens=len(x),
            sum_log_ratio=float(x.sum()),
            sum_k3=float(k3.sum()),
            sum_k3_capped=float(np.minimum(k3, K3_CAP).sum()),
            max_abs_log_ratio=float(size.max()),
            histogram=np.bincount(np.searchsorted(_EDGES, size), minlength=len(_EDGES) + 1).astype(np.int64),
        )

    def merge(self, other: "Figures") -> "Figures":
        """Figures of both together."""
        return Figures(
            num_tokens=self.num_tokens + other.num_tokens,
            sum_log_ratio=self.sum_log_ratio + other.sum_log_ratio,
            sum_k3=self.sum_k3 + other.sum_k3,
            sum_k3_capped=self.sum_k3_capped + other.sum_k3_capped,
            max_abs_log_ratio=max(self.max_abs_log_ratio, other.max_abs_log_ratio),
            histogram=self.histogram + other.histogram,
        )

    @property
    def k1(self) -> float:
        """Mean of -log_ratio."""
        return self._mean(-self.sum_log_ratio)

    @property
    def k3(self) -> float:
        """Mean of ratio - 1 - log_ratio: the inference KLD."""
        return self._mean(self.sum_k3)

    @property
    def inference_kld_capped(self) -> float:
        """The same with each token's part at most 1 nat: the statistic of the gate."""
        return self._mean(self.sum_k3_capped)

    def quantile(self, q: float) -> float:
        """|log_ratio| below which a share `q` of the tokens lies, to the upper edge of its bin."""
        if not self.num_tokens:
            return 0.0
        rank = min(max(int(np.ceil(q * self.num_tokens)), 1), self.num_tokens)
        at = int(np.searchsorted(np.cumsum(self.histogram), rank))
        return min(float(_EDGES[min(at, len(_EDGES) - 1)]), self.max_abs_log_ratio)

    def _mean(self, total: float) -> float:
        return total / self.num_tokens if self.num_tokens else 0.0
