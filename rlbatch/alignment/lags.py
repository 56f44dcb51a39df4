"""Does another lag than 0 explain a segment, its end, or stretches of it? Margins and witnesses: `limits`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.limits import (
    LAG_ACCEPTED_SHARE,
    LAG_FROM_MIN_VOTES,
    LAG_MIN_PAIRS,
    LAG_MIN_VOTES,
    LAG_VOTE,
    LEFT_MOST,
    PATH_BLOCK,
    PATH_LAGS,
    PATH_SWITCH,
    PATH_VERIFIED_SHARE,
    WIDE_LAGS,
    WIDE_MIN_VOTES,
)
from rlbatch_kernels import LAGS


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
    """The lag that explains all of the evidence: a small one, or one of any size where no small one does."""
    near = _best_of(evidence, LAGS, min_votes)
    off = evidence.at_zero()[evidence.usable]
    if near is not None or not len(off) or off.mean() < LEFT_MOST:
        return near
    middle = _best_of(evidence, PATH_LAGS, max(min_votes, LAG_FROM_MIN_VOTES))
    if middle is not None:
        return middle
    most = min(WIDE_LAGS, len(evidence.trained) - LAG_MIN_PAIRS)
    return _best_of(evidence, range(-most, most + 1), max(min_votes, WIDE_MIN_VOTES))


def _best_of(evidence: Evidence, lags: Sequence[int], min_votes: int) -> Shift | None:
    residuals = evidence.residuals(lags)
    if 0 not in residuals or len(residuals) < 2:
        return None
    lag = min(residuals, key=lambda key: (residuals[key], abs(key)))
    # Strictly: where all values are alike, every lag fits exactly.
    if lag == 0 or residuals[lag] >= LAG_ACCEPTED_SHARE * residuals[0]:
        return None
    if evidence.comparable and residuals[lag] > evidence.most_left:
        return None
    if len(evidence.at_lag(lag)[0]) < LAG_MIN_PAIRS or not _witnessed(evidence, lag, min_votes):
        return None
    near = residuals[lag] / LAG_ACCEPTED_SHARE
    rivals = tuple(key for key, value in residuals.items() if key not in (0, lag) and value <= near)
    return Shift(lag=lag, rivals=rivals, start=0, stop=len(evidence.trained))


def shift_path(evidence: Evidence) -> tuple[Shift, ...]:
    """The stretches that other lags explain, where lag 0 explains the rest; none where that does not hold.

    Example:
        trainer [a, b, c, d, e, ...], inference [a, b, x, c, d, ...]: lag -1 from entry 3 on
    """
    path = _with_witnesses(evidence, list(_stretches(evidence)))
    if len(path) < 2:
        return ()
    found: list[Shift] = []
    num_moved = 0
    for start, stop, lag in path:
        part = evidence.part(start, stop)
        if lag == 0:
            if evidence.comparable and part.usable.any() and part.at_zero()[part.usable].mean() > LEFT_MOST:
                return ()
            continue
        num_moved += stop - start
        shift = _best_of(part, PATH_LAGS, LAG_FROM_MIN_VOTES)
        if shift is not None and (shift.lag == lag or lag in shift.rivals):
            found.append(Shift(lag=lag, rivals=_others(shift, lag), start=start, stop=stop))
    if sum(shift.stop - shift.start for shift in found) < PATH_VERIFIED_SHARE * num_moved:
        return ()
    return tuple(found)


def _with_witnesses(evidence: Evidence, path: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The path without stretches at lag 0 in which nothing speaks against the lag beside them."""
    kept: list[tuple[int, int, int]] = []
    for at, (start, stop, lag) in enumerate(path):
        neighbours = [each[2] for each in path[max(0, at - 1) : at + 2] if each[2]]
        if lag == 0 and neighbours and not _speaks_for_zero(evidence.part(start, stop), neighbours[-1]):
            lag = neighbours[-1]
        if kept and kept[-1][2] == lag:
            start = kept.pop()[0]
        kept.append((start, stop, lag))
    return kept


def _speaks_for_zero(evidence: Evidence, lag: int) -> bool:
    at, errors = evidence.at_lag(lag)
    votes = np.count_nonzero(errors - evidence.at_zero()[at] > LAG_VOTE)
    return bool(votes >= LAG_FROM_MIN_VOTES)


def _others(shift: Shift, lag: int) -> tuple[int, ...]:
    return tuple(key for key in (shift.lag, *shift.rivals) if key != lag)


def _stretches(evidence: Evidence) -> Iterator[tuple[int, int, int]]:
    """(start, stop, lag) of the path of lags that costs least, changes of lag included."""
    costs = _costs(evidence)
    length = costs.shape[1]
    starts = np.arange(0, length, PATH_BLOCK)
    path = _cheapest(np.add.reduceat(costs, starts, axis=1))
    edges = [0]
    states = [int(path[0])]
    for block in np.flatnonzero(np.diff(path)) + 1:
        before, after = costs[path[block - 1]], costs[path[block]]
        low = max(edges[-1], int(starts[block]) - PATH_BLOCK)
        high = min(length, int(starts[block]) + PATH_BLOCK)
        # Before the edge the old lag pays, from it on the new one.
        paid = np.concatenate([[0.0], np.cumsum(before[low:high])]) - np.concatenate(
            [[0.0], np.cumsum(after[low:high])]
        )
        edges.append(low + int(paid.argmin()))
        states.append(int(path[block]))
    for start, stop, state in zip(edges, [*edges[1:], length], states, strict=True):
        if stop > start:
            yield start, stop, PATH_LAGS[state]


def _costs(evidence: Evidence) -> NDArray[np.float64]:
    """[lags, N] what each entry pays at each lag; one that has no pair pays nothing at lag 0, else a vote."""
    costs = np.full((len(PATH_LAGS), len(evidence.trained)), LAG_VOTE)
    for state, lag in enumerate(PATH_LAGS):
        at, errors = evidence.at_lag(lag)
        costs[state, at] = errors
    costs[:, ~evidence.usable] = 0.0
    return costs


def _cheapest(costs: NDArray[np.float64]) -> NDArray[np.intp]:
    """[blocks] state of each block on the cheapest path through costs [states, blocks]."""
    num_states, num_blocks = costs.shape
    came_from = np.empty((num_blocks, num_states), np.intp)
    stay = np.arange(num_states)
    total = costs[:, 0].copy()
    # To begin at another lag than 0 is a change too.
    total[np.array(PATH_LAGS) != 0] += PATH_SWITCH
    for block in range(1, num_blocks):
        best = int(total.argmin())
        switched = total[best] + PATH_SWITCH
        came_from[block] = np.where(total <= switched, stay, best)
        total = np.minimum(total, switched) + costs[:, block]
    path = np.empty(num_blocks, np.intp)
    path[-1] = int(total.argmin())
    for block in range(num_blocks - 1, 0, -1):
        path[block - 1] = came_from[block, path[block]]
    return path


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
