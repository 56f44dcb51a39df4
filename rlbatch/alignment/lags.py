"""Does another lag than 0 explain a segment, or its end? Margins and witnesses, as `limits` has them."""

from dataclasses import dataclass

import numpy as np

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.limits import (
    LAG_ACCEPTED_SHARE,
    LAG_FLOOR,
    LAG_FROM_MIN_VOTES,
    LAG_MIN_PAIRS,
    LAG_MIN_VOTES,
    LAG_VOTE,
)
from rlbatch_kernels import LAGS

STRETCHES = (16, 32, 64, 128)
"""Lengths in which a shift that heals again is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """A lag that explains what lag 0 does not."""

    lag: int
    rivals: tuple[int, ...]
    """Other lags but 0 that fit nearly as well: the row repeats itself, and which it is cannot be told."""
    start: int
    """First entry of the evidence for which it holds."""
    stop: int
    """One past the last."""


def whole_shift(evidence: Evidence, *, min_votes: int = LAG_MIN_VOTES) -> Shift | None:
    """The lag that explains all of the evidence."""
    residuals = evidence.residuals()
    if 0 not in residuals or len(residuals) < 2:
        return None
    length = len(evidence.trained)
    lag = min(residuals, key=lambda key: (residuals[key], abs(key)))
    # Strictly: where all values are alike, every lag fits exactly.
    if lag == 0 or residuals[lag] >= LAG_ACCEPTED_SHARE * residuals[0]:
        return None
    if evidence.comparable and residuals[lag] > LAG_FLOOR:
        return None
    if len(evidence.at_lag(lag)[0]) < LAG_MIN_PAIRS or not _witnessed(evidence, lag, min_votes):
        return None
    near = residuals[lag] / LAG_ACCEPTED_SHARE
    rivals = tuple(key for key, value in residuals.items() if key not in (0, lag) and value <= near)
    return Shift(lag=lag, rivals=rivals, start=0, stop=length)


def shift_from(evidence: Evidence) -> Shift | None:
    """The lag that explains the evidence from some entry on, where lag 0 explains what comes before.

    Example:
        trainer [a, b, c, d, e, ...], inference [a, b, x, c, d, ...]: lag -1 from entry 3 on
    """
    at_zero = evidence.at_zero()
    before = np.concatenate([[0.0], np.cumsum(at_zero)])[:-1]
    best_cost, lag, start = np.inf, 0, 0
    for candidate in (key for key in LAGS if key):
        at, errors = evidence.at_lag(candidate)
        spread = np.zeros_like(at_zero)
        spread[at] = errors
        cost = before + np.cumsum(spread[::-1])[::-1]
        place = int(cost.argmin())
        if cost[place] < best_cost:
            best_cost, lag, start = float(cost[place]), candidate, place
    length = len(at_zero)
    if length - start < LAG_MIN_PAIRS or not _holds_before(evidence.part(0, start), lag):
        return None
    end = whole_shift(evidence.part(start, length), min_votes=LAG_FROM_MIN_VOTES)
    if end is None or end.lag != lag:
        return None
    return Shift(lag=lag, rivals=end.rivals, start=start, stop=length)


def shift_within(evidence: Evidence) -> Shift | None:
    """The lag that explains one stretch, where lag 0 explains what comes before and after."""
    before = np.concatenate([[0.0], np.cumsum(evidence.at_zero())])
    best_gain, best = 0.0, None
    for lag in (key for key in LAGS if key):
        at, errors = evidence.at_lag(lag)
        spread = np.zeros(len(evidence.trained))
        spread[at] = errors
        at_lag = np.concatenate([[0.0], np.cumsum(spread)])
        for size in (size for size in STRETCHES if size < len(evidence.trained)):
            zero, other = before[size:] - before[:-size], at_lag[size:] - at_lag[:-size]
            gains = np.where(other < LAG_ACCEPTED_SHARE * zero, zero - other, 0.0)
            start = int(gains.argmax())
            if gains[start] > best_gain:
                best_gain, best = float(gains[start]), (start, start + size, lag)
    if best is None:
        return None
    start, stop, lag = best
    found = whole_shift(evidence.part(start, stop), min_votes=LAG_FROM_MIN_VOTES)
    return None if found is None else Shift(lag=found.lag, rivals=found.rivals, start=start, stop=stop)


def _holds_before(evidence: Evidence, lag: int) -> bool:
    """Whether lag 0 explains the beginning, and its own witnesses speak against the lag found for the end."""
    at, errors = evidence.at_lag(lag)
    if not len(at):
        return False
    at_zero = evidence.at_zero()
    if evidence.comparable and at_zero[evidence.usable].mean() > LAG_FLOOR:
        return False
    return int(np.count_nonzero(errors - at_zero[at] > LAG_VOTE)) >= LAG_FROM_MIN_VOTES


def _witnessed(evidence: Evidence, lag: int, min_votes: int) -> bool:
    """Whether single tokens speak for the lag, on each side of the pairs, and hardly any against it.

    Pairs at a lag leave out an edge of each list. Without witnesses on both sides, one odd value at an edge
    would be explained by being left out.
    """
    at, errors = evidence.at_lag(lag)
    at_zero = evidence.at_zero()
    for side in (at_zero[at], at_zero[at + lag]):
        votes_for = np.count_nonzero(side - errors > LAG_VOTE)
        votes_against = np.count_nonzero(errors - side > LAG_VOTE)
        if votes_for < min_votes or votes_against > votes_for * LAG_ACCEPTED_SHARE:
            return False
    return True
