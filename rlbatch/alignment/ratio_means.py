"""`ratio-mean-off`: values that cannot be those of the distribution that was sampled, told without logits.

Tokens drawn from q have E[p / q] = 1 for any distribution p of the trainer, near or far, where q leaves out
no token and the engine's values are those of q. Renormalised over a kept set, the mean ratio is the mass that
p gives the set. Penalties, and a temperature with values to match, leave out no token and do not show here.

A trainer that was trained on these very tokens is not any p: it likes those better that earned a reward. So
of older data, on which it may have been, only a mean below 1 is told.
"""

import math
from collections.abc import Iterator, Mapping

from rlbatch.alignment.drift import Sums, age_text
from rlbatch.alignment.limits import RATIO_ERRORS, RATIO_LEAST, RATIO_MIN_TOKENS
from rlbatch.catalogue import finding
from rlbatch.errors import Finding

_LIKELY_ABOVE = "raw logprobs, or values changed on their way, taken for those that were sampled from"
_FIX_ABOVE = "state the logprobs_mode that the engine runs in; pass logits_for, which names more causes"


def ratio_findings(by_age: Mapping[int, Sums]) -> Iterator[Finding]:
    """`ratio-mean-off` for each age whose mean importance ratio is not 1."""
    for age, sums in sorted(by_age.items()):
        if sums.num_drawn < RATIO_MIN_TOKENS:
            continue
        below = sums.sum_drawn_below / sums.num_drawn
        error = mean_error(sums)
        if age != 0 and below < 0:
            continue
        if abs(below) >= RATIO_LEAST and abs(below) >= RATIO_ERRORS * error:
            yield finding(
                "ratio-mean-off",
                expected="a mean importance ratio of 1, whatever the trainer's weights, of values of the "
                "distribution that was sampled",
                found=f"{1 - below:.4g} +- {error:.2g} over {int(sums.num_drawn)} tokens of {age_text(age)}",
                likely=None if below > 0 else _LIKELY_ABOVE,
                fix=None if below > 0 else _FIX_ABOVE,
            )


def mean_error(sums: Sums) -> float:
    """Standard error of the mean ratio, if it is 1.

    Then no token says which way a later one of its segment will be off: their ratios are dependent, and yet
    without correlation, so that squares add up over tokens.

    Example:
        ratios 0.5, 1, 1.5, 1: squares of 1 - ratio add up to 0.5, and the error is sqrt(0.5) / 4 = 0.177
    """
    return math.sqrt(max(sums.sum_drawn_squared, 0.0)) / sums.num_drawn
