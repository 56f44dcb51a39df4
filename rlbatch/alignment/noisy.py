"""How well explanations fit beneath much noise: what noise in the trainer's logits does to a logprob.

Logits that are moved at random, by a standard deviation s, move the logprob of a drawn token of probability p
by s sqrt(1 - 2 p + c) around a mean of s^2 (1/2 - 2 p + 3/2 c), c being the sum of squared probabilities: the
trainer is lower than the engine on average, which looks like a kept set. That mean goes with every
explanation, by the s that it leaves itself. A Student distribution of the differences lets few tokens have
most of the noise. Near-certain tokens are left out, of which rounding has as large a share. Knows nothing of
causes.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

FREEDOM = 4.0
"""Degrees of freedom: of Gaussian noise it wastes little, and few wild tokens do not decide."""
VARIANCE = 1.5
"""Variance of Gaussian noise over the squared scale fitted to it: 0.23 is found as 0.24 to 0.27."""
MOST_LEAN = 0.5
"""Variance in logits up to which the mean is followed: at a KLD of 0.028 it is 0.23."""
ITERATIONS = 6
"""Of the scale, from the median of the squares."""
BETWEEN = 4
"""Steps between two values of a grid, about the best of them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Noise:
    """What noise of one size in all logits does to n tokens."""

    spread: Values
    """[n] its standard deviation in the logprob, in that size."""
    lean: Values
    """[n] its mean, in that size squared."""

    @classmethod
    def of(cls, stated: Values, collision: Values) -> Self:
        """[n] trainer logprobs, nats, and sums of squared probabilities."""
        own = np.exp(stated)
        return cls(
            spread=np.sqrt(np.maximum(1 - 2 * own + collision, 0)) + 1e-3,
            lean=0.5 - 2 * own + 1.5 * collision,
        )

    def score(self, residuals: Values) -> tuple[Values, Values]:
        """Log likelihood [P] of residuals [n, P], nats, up to a constant; and variance [P] in the logits."""
        said, variance = self.said(residuals)
        value: Values = said.sum(axis=0)
        return value, variance

    def said(self, residuals: Values) -> tuple[Values, Values]:
        """Log likelihood [n, P] of each residual, nats, up to a constant; and variance [P] in the logits."""
        scaled, lean = residuals / self.spread[:, None], (self.lean / self.spread)[:, None]
        apart = np.square(scaled)
        squared = np.median(apart, axis=0) + 1e-8
        for _ in range(ITERATIONS):
            apart = np.square(scaled - np.minimum(VARIANCE * squared, MOST_LEAN) * lean)
            weight = (FREEDOM + 1) / (FREEDOM + apart / squared)
            squared = (weight * apart).mean(axis=0) + 1e-8
        value: Values = -0.5 * np.log(squared) - (FREEDOM + 1) / 2 * np.log1p(apart / (FREEDOM * squared))
        return value, VARIANCE * squared

    def mean(self, variance: float) -> Values:
        """[n] nats that the trainer is lower on average."""
        lower: Values = self.lean * min(variance, MOST_LEAN)
        return lower


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyFit:
    """An explanation with the noise that it leaves."""

    score: float
    """Log likelihood, nats, up to what all explanations of the same tokens share."""
    parameter: float
    place: float
    """Of the parameter in its grid: 2.25 is a quarter of the way from the third value to the fourth."""
    variance: float
    """Of the noise in the logits."""


def noisy_fit(inference: Values, predicted: Values, parameters: Values, noise: Noise) -> NoisyFit:
    """The best parameter, refined between the values of the grid.

    Args:
        inference: [n] nats.
        predicted: [n, P] nats.
        parameters: [P] rising.
        noise: of the n tokens.
    """
    scores, _ = noise.score(inference[:, None] - predicted)
    best = int(scores.argmax())
    first, last = max(0, best - 1), min(len(parameters) - 1, best + 1)
    places = np.linspace(first, last, BETWEEN * (last - first) + 1)
    columns = np.stack([between(predicted, place) for place in places], axis=1)
    scores, variances = noise.score(inference[:, None] - columns)
    at = int(scores.argmax())
    return NoisyFit(
        score=float(scores[at]),
        parameter=float(between(parameters, places[at])),
        place=float(places[at]),
        variance=float(variances[at]),
    )


def between(grid: Values, place: float) -> Values:
    """The column of a grid [..., P] at a place between two of its own."""
    low = min(int(place), grid.shape[-1] - 1)
    high = min(low + 1, grid.shape[-1] - 1)
    column: Values = grid[..., low] + (place - low) * (grid[..., high] - grid[..., low])
    return column
