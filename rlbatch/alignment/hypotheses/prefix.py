"""Does the prompt differ between engine and trainer? Then first tokens are off, and later ones ever less.

Asked by ranks: how large a difference is among those of equally certain tokens, against where in its turn it
is. Whatever the noise and its tails are, without a cause the two know nothing of each other.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.exhibits import Exhibit, joined
from rlbatch.alignment.subtle_limits import (
    PREFIX_EARLY,
    PREFIX_ERRORS,
    PREFIX_FACTOR,
    PREFIX_FADES,
    PREFIX_LATE,
    PREFIX_LEAST,
    PREFIX_LOUD,
    PREFIX_LOUD_ERRORS,
    PREFIX_NOISY_FACTOR,
    PREFIX_QUIET,
    PREFIX_QUIET_ERRORS,
    PREFIX_SHARE_LOUD,
    PREFIX_STRATA,
    PREFIX_STRATUM,
    PREFIX_SURE_ERRORS,
    RUBBISH_MEAN,
    UNSURE_BELOW,
)
from rlbatch.alignment.tournament import widths
from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch_kernels import RESIDUAL_CLIP

Values = NDArray[np.float64]


def prefix_differs(exhibits: Sequence[Exhibit]) -> Finding | None:
    """The first tokens of the turns are off, and the differences decay."""
    whole = joined(exhibits)
    errors = np.minimum(np.abs(whole.inference - whole.stated), RESIDUAL_CLIP)
    early, late = errors[whole.offset < PREFIX_EARLY], errors[whole.offset >= PREFIX_LATE]
    if min(len(early), len(late)) < PREFIX_EARLY:
        return None
    loud, quiet = float(early.mean()), float(late.mean())
    if loud >= RUBBISH_MEAN:
        # Values of no weights at all: another prompt moves them, and each is still its own token's.
        return None
    # One or two wild tokens make no beginning loud.
    if (early > max(2 * quiet, PREFIX_LEAST)).mean() < PREFIX_SHARE_LOUD:
        return None
    scaled = errors / widths(whole.stated)
    fading = standard_errors_of_fading(scaled, whole.offset, whole.stated)
    # Of near-certain tokens much noise leaves little as well.
    unsure = (whole.offset >= PREFIX_LATE) & (whole.stated < UNSURE_BELOW)
    is_quiet = bool(unsure.any()) and float(scaled[unsure].mean()) <= PREFIX_QUIET
    # Other weights differ more where there is little to go by.
    if not is_quiet and loud < PREFIX_NOISY_FACTOR * quiet:
        return None
    if loud < PREFIX_LEAST or fading < _errors_needed(loud, quiet, is_quiet=is_quiet):
        return None
    return finding(
        "prefix-differs",
        # A beginning is loud by chance now and then: no error, until it is beyond doubt.
        severity="error" if fading >= PREFIX_SURE_ERRORS else "warning",
        where=max(exhibits, key=_loudness).place,
        expected="differences of one size along a turn",
        found=f"mean |log_ratio| {loud:.3g} nats in the first {PREFIX_EARLY} tokens of {len(exhibits)} "
        f"turns, {quiet:.3g} from the {PREFIX_LATE}th on: {fading:.1f} standard errors from a chance order",
    )


def _errors_needed(loud: float, quiet: float, *, is_quiet: bool) -> float:
    """Standard errors of fading that tell: fewer beneath an engine's own noise, which excuses little."""
    if not is_quiet or loud < PREFIX_FACTOR * quiet:
        return PREFIX_ERRORS
    return PREFIX_LOUD_ERRORS if loud >= PREFIX_LOUD else PREFIX_QUIET_ERRORS


def _loudness(exhibit: Exhibit) -> float:
    """Mean |log_ratio| of the first tokens, nats; 0 where it has none of them."""
    early = exhibit.offset < PREFIX_EARLY
    apart = np.minimum(np.abs(exhibit.inference - exhibit.stated)[early], RESIDUAL_CLIP)
    return float(apart.mean()) if early.any() else 0.0


def standard_errors_of_fading(scaled: Values, offset: NDArray[np.int64], stated: Values) -> float:
    """By how many standard errors the first tokens of turns have the larger differences.

    A linear rank statistic: scores of ranks, which are those of a Laplace distribution, times a weight that
    fades along the turn. Ranks are among tokens of like certainty; mean and variance are those of all orders.

    Args:
        scaled: [n] |differences|, in widths.
        offset: [n] which token of its turn each is.
        stated: [n] nats.
    """
    weight = np.exp(-offset / PREFIX_FADES)
    num_strata = int(np.clip(len(scaled) // PREFIX_STRATUM, 1, PREFIX_STRATA))
    total = variance = 0.0
    for tokens in np.array_split(np.argsort(stated, kind="stable"), num_strata):
        count = len(tokens)
        rank = np.empty(count)
        rank[np.argsort(scaled[tokens], kind="stable")] = np.arange(count)
        score = -np.log1p(-(rank + 0.5) / count)
        score -= score.mean()
        apart = weight[tokens] - weight[tokens].mean()
        total += float((score * apart).sum())
        variance += float(np.square(score).sum() * np.square(apart).sum()) / max(count - 1, 1)
    return total / float(np.sqrt(max(variance, 1e-12)))
