"""Which of several explanations fits, and whether any does: the comparison that all hypotheses share.

Residuals are taken as draws from a Laplace distribution whose width follows the token: noise in logits moves
a logprob by about (1 - p) of it, so a nearly certain token must fit nearly exactly. The logarithm of the
likelihood ratio of two explanations of n tokens is then n log(width_a / width_b), which adds up over rows:
what no row could show, a pool of rows does. Knows nothing of causes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.limits import LAG_VOTE
from rlbatch_kernels import RESIDUAL_CLIP

CERTAIN_WIDTH = 0.02
"""Share of the noise that a token of probability 1 has: rounding of the softmax."""
WIDTH_FLOOR = 1e-4
"""Nats below which widths are not compared: an engine in float32 leaves less."""
RESIDUAL_WIDTHS = 12.0
"""A token adds at most this, in widths: wild tokens speak for nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How well one family of explanations fits at its best parameter."""

    parameter: float
    gain: float
    """Log likelihood ratio over what is stated, nats."""
    width: float
    """Mean |residual|, nats, each at most 4."""
    slope: float
    """Differences over those predicted: 1 where the explanation is true, whatever the noise."""
    slope_error: float
    """Its standard error."""
    free_gain: float
    """`gain` with that slope, instead of 1."""
    num_for: int
    """Tokens that it fits better than what is stated, by a vote."""
    num_against: int
    """The same the other way."""
    num_informative: int
    """Tokens at which it predicts another value than what is stated."""


def widths(stated: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n] how much noise each token has, relative to the others."""
    wide: NDArray[np.float64] = -np.expm1(np.minimum(stated, 0)) + CERTAIN_WIDTH
    return wide


def score(residuals: NDArray[np.float64], wide: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log likelihood [...] of residuals [n, ...] up to a constant, nats."""
    scaled = np.minimum(np.abs(residuals) / wide.reshape(-1, *[1] * (residuals.ndim - 1)), RESIDUAL_WIDTHS)
    value: NDArray[np.float64] = -len(residuals) * np.log(scaled.mean(axis=0) + WIDTH_FLOOR)
    return value


def fit(
    inference: NDArray[np.float64],
    stated: NDArray[np.float64],
    predicted: NDArray[np.float64],
    parameters: NDArray[np.float64],
) -> Fit:
    """The best parameter of a family, refined between its grid's values.

    Args:
        inference: [n] nats, what the engine reported.
        stated: [n] nats, what it should have reported as things are stated.
        predicted: [n, P] nats, what it would have reported under each parameter.
        parameters: [P] rising.

    Example:
        inference = stated / ln 2, predicted [[stated / ln 2]]: gain n log(width / floor), slope 1
    """
    wide = widths(stated)
    scores = score(inference[:, None] - predicted, wide)
    best = int(scores.argmax())
    value, column = float(parameters[best]), predicted[:, best]
    top = float(scores[best])
    for other in (best - 1, best + 1):
        if not 0 <= other < len(parameters):
            continue
        shares = np.linspace(0.0, 0.6, 7)
        for step in (0.1, 0.01, 0.001):
            between = predicted[:, [best]] + shares * (predicted[:, [other]] - predicted[:, [best]])
            reached = score(inference[:, None] - between, wide)
            at = int(reached.argmax())
            if reached[at] > top:
                top, column = float(reached[at]), between[:, at]
                value = float(parameters[best] + shares[at] * (parameters[other] - parameters[best]))
            shares = np.linspace(shares[at] - step, shares[at] + step, 21).clip(0, 1)
    moved = column - stated
    differences, tame, left = (
        np.clip(each, -RESIDUAL_CLIP, RESIDUAL_CLIP)
        for each in (inference - stated, moved, inference - column)
    )
    weight = 1 / np.square(wide)
    power = max(float((weight * np.square(tame)).sum()), 1e-12)
    slope = float((weight * tame * differences).sum() / power)
    nothing = float(score(inference - stated, wide))
    better = np.abs(differences) - np.abs(left)
    return Fit(
        num_for=int(np.count_nonzero(better > LAG_VOTE)),
        num_against=int(np.count_nonzero(better < -LAG_VOTE)),
        parameter=value,
        gain=top - nothing,
        free_gain=float(score(inference - stated - slope * moved, wide)) - nothing,
        width=float(np.abs(left).mean()),
        slope=slope,
        slope_error=float(np.sqrt((np.square(weight * tame * left)).sum())) / power,
        num_informative=int(np.count_nonzero(np.abs(moved) > INFORMATIVE)),
    )


INFORMATIVE = 0.01
"""Nats by which an explanation must move a token for it to speak for or against."""
