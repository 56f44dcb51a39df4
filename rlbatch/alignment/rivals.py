"""Would other weights look like this as well? By what only they do, or only a named distribution does.

Whatever the trainer's weights are, its probability over the reported one is 1 on average in every context,
as tokens were drawn from what was reported. Values that are no distribution, or one over a kept set, have
another mean, which is known in every context. Knows nothing of codes.
"""

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.exhibits import Exhibit
from rlbatch.alignment.subtle_limits import RIVAL_HALF, RIVAL_RATIO, RIVAL_RATIO_ERRORS, RIVAL_RATIO_MOST
from rlbatch.alignment.tournament import CERTAIN_WIDTH

Values = NDArray[np.float64]


def turn_of(offset: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n] number of the turn of each token, by its place in its turn, which begins anew.

    Example:
        offset 0 1 2 0 1 -> 0 0 0 1 1
    """
    number: NDArray[np.int64] = np.cumsum(np.diff(offset, prepend=-1) <= 0)
    return number


def ratio_slope(exhibit: Exhibit, collision: Values, column: Values) -> tuple[float, float]:
    """How much of the mean ratio that an explanation predicts is there, and its standard error over turns.

    0 where other weights did it, 1 where the explanation holds.

    Args:
        exhibit: n tokens.
        collision: [n] sums of squared probabilities.
        column: [n] nats, what was reported by the explanation; its ratio must not depend on the token drawn.

    Example:
        a kept set of mass 0.9 in every context, ratios of mean 0.9 -> 1; of mean 1 -> 0
    """
    log_ratio = np.minimum(exhibit.stated - exhibit.inference, np.log(RIVAL_RATIO_MOST))
    missing = np.expm1(np.minimum(exhibit.stated - column, np.log(RIVAL_RATIO_MOST)))
    turn = turn_of(exhibit.offset)
    weighed = missing / (np.maximum(1 - collision, 0) + CERTAIN_WIDTH)
    seen = np.bincount(turn, weights=weighed * np.expm1(log_ratio))
    whole = np.bincount(turn, weights=weighed * missing)
    power = max(float(whole.sum()), 1e-12)
    slope = float(seen.sum()) / power
    return slope, float(np.sqrt(np.square(seen - slope * whole).sum())) / power


def has_ratio(exhibit: Exhibit, collision: Values, column: Values) -> bool:
    """Whether the mean ratio is the one that the explanation predicts, and not that of other weights."""
    slope, error = ratio_slope(exhibit, collision, column)
    return slope >= RIVAL_RATIO and slope >= RIVAL_RATIO_ERRORS * error


def halves_agree(gains: Values, turn: NDArray[np.int64]) -> bool:
    """Whether every other turn says it, and those between say it too.

    Args:
        gains: [n] nats that each token says for the explanation.
        turn: [n] of which turn it is.
    """
    first, second = (float(gains[turn % 2 == side].sum()) for side in (0, 1))
    return min(first, second) >= RIVAL_HALF * (first + second)
