"""Does a planted fault show at all? Only where it moves enough tokens by more than the noise is it counted.

A gate cannot name what the values do not say. Knows how far each token was moved, and nothing of checks.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.tournament import INFORMATIVE, RESIDUAL_WIDTHS, widths
from rlbatch.faults import NoPlaceError, Scored
from rlbatch.records import Sample, sampled_segments

MOVED_BY = 2.0
"""Times the noise by which a fault must move a token for it to speak: noise reaches that once in seven."""
SHOWS_IN_ROW = 16
"""Such tokens that one spoilt row must have; where fewer values are touched, as at the end of a turn, all.

Wrong ids spoil what follows them too: with too little of that, one looks like a wild token of the noise.
"""
SHOWS_IN_POOL = 64.0
"""Nats that all rows together must say for a fault of a whole run, however little each token says."""

FADES_IN, FADES_TO = 16, 2.0
"""First tokens of a turn that say what is said of another prompt, each twice as much as a later one."""
FADES_SHARE = 0.1
"""Share of them that must be informative: it is many tokens that fade, and few are wild ones."""


def require_shows(before: Sequence[Scored], after: Sequence[Scored], *, in_pool: bool) -> None:
    """Refuse a case that says too little for anybody to name its fault.

    Args:
        before: the good rows, scored.
        after: the same, in order, with the fault in some of them.
        in_pool: the fault is of a whole run, and what rows say of it adds up.

    Raises:
        NoPlaceError: each row has fewer than `SHOWS_IN_ROW` informative tokens, or all say too little.
    """
    noise = noise_of(before)
    spoilt = [(old, new) for old, new in zip(before, after, strict=True) if new is not old]
    if in_pool:
        if sum(said_nats(old, new, noise) for old, new in spoilt) >= SHOWS_IN_POOL:
            return
    elif any(_row_shows(old, new, noise) for old, new in spoilt):
        return
    raise NoPlaceError("plant: expected a fault that moves more than noise does, found one that hides in it")


def require_fades(before: Sequence[Scored], after: Sequence[Scored]) -> None:
    """Refuse a prompt that differs and is not forgotten: that is what other weights look like.

    Args:
        before: the good rows, scored.
        after: the same, in order, with other prompts.

    Raises:
        NoPlaceError: the first tokens of the turns say too little, in too few of them, or not twice as much
            each as later ones.
    """
    noise = noise_of(before)
    said, is_early, is_informative = [], [], []
    for old, new in zip(before, after, strict=True):
        moved = np.minimum(moved_by(old, new, noise), RESIDUAL_WIDTHS)
        for part in sampled_segments(new.sample.turn[-len(moved) :]):
            own = moved[part.start : part.stop]
            said.append(own + np.expm1(-own))
            is_informative.append(own > MOVED_BY)
            is_early.append(np.arange(len(own)) < FADES_IN)
    nats, early = np.concatenate(said), np.concatenate(is_early)
    informative = np.concatenate(is_informative)[early]
    later = float(nats[~early].mean()) if not early.all() else 0.0
    fades = nats[early].mean() >= FADES_TO * later and informative.mean() >= FADES_SHARE
    if nats[early].sum() < SHOWS_IN_POOL or not fades:
        raise NoPlaceError("plant: expected a prompt that first tokens depend on, found one that fades not")


def _row_shows(before: Scored, after: Scored, noise: float) -> bool:
    informative, touched = informative_tokens(before, after, noise), _touched(before.sample, after.sample)
    if 0 < touched.sum() < SHOWS_IN_ROW:
        return bool(informative[touched].all())
    return bool(informative.sum() >= SHOWS_IN_ROW)


def noise_of(rows: Sequence[Scored]) -> float:
    """Mean |log_ratio| of good rows over the width of each token, as the diagnosis has widths."""
    scaled = [np.abs(_log_ratio(row)) / widths(row.trainer_logprobs) for row in rows]
    return float(np.nanmean(np.concatenate(scaled)))


def informative_tokens(before: Scored, after: Scored, noise: float) -> NDArray[np.bool_]:
    """[N] tokens of a row that a planted fault moves by more than noise does; the last N of both rows.

    Args:
        before: the good row, with its noise.
        after: the spoilt one, with the same.
        noise: what `noise_of` says of good rows.

    Example:
        noise 0.1, token of probability 0.5: moved by 0.11 nats or more it speaks, by 0.05 it does not
    """
    informative: NDArray[np.bool_] = moved_by(before, after, noise) > MOVED_BY
    return informative


def said_nats(before: Scored, after: Scored, noise: float) -> float:
    """What the tokens of a row say for the fault, nats: the log likelihood ratio that is to be expected.

    A Laplace distribution of width 1 that is moved by x: x + exp(-x) - 1.
    """
    moved = moved_by(before, after, noise)
    moved = np.minimum(moved, RESIDUAL_WIDTHS)
    return float((moved + np.expm1(-moved)).sum())


def moved_by(before: Scored, after: Scored, noise: float) -> NDArray[np.float64]:
    """[N] how far a planted fault moves each token, in widths of the noise; the last N of both rows.

    Rows are compared from their ends: a fault may take tokens from the prompt, or put some there. Infinite
    where a value was lost, 0 where a token is trained in one of them only.
    """
    old, new = _log_ratio(before), _log_ratio(after)
    length = min(len(old), len(new))
    old, new, mask = old[-length:], new[-length:], after.sample.loss_mask[-length:]
    wide = widths(np.nan_to_num(before.trainer_logprobs[-length:]))
    apart = np.abs(new - old) / np.maximum(INFORMATIVE / MOVED_BY, noise * wide)
    return np.where(np.isfinite(apart), apart, np.where(np.isfinite(old) & mask, np.inf, 0.0))


def _log_ratio(row: Scored) -> NDArray[np.float64]:
    """[T] trainer - inference; NaN where the token is not trained, or one of them is not finite."""
    inference = row.sample.inference_logprobs.astype(np.float64)
    known = row.sample.loss_mask & np.isfinite(row.trainer_logprobs) & np.isfinite(inference)
    return np.where(known, row.trainer_logprobs, np.nan) - np.where(known, inference, np.nan)


def _touched(old: Sample, new: Sample) -> NDArray[np.bool_]:
    """[N] trained tokens whose logprob is another one; the last N of both rows."""
    length = min(len(old), len(new))
    before, after = (each.inference_logprobs[-length:] for each in (old, new))
    other = ~((before == after) | (np.isnan(before) & np.isnan(after)))
    touched: NDArray[np.bool_] = other & new.loss_mask[-length:]
    return touched
