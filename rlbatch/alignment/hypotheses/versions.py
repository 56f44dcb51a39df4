"""Did other weights draw the rest of a turn? Then differences grow at some token, and stay as large.

Asked of tokens that are no near-certainties, whose differences are cut where the tails of noise begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.exhibits import Exhibit
from rlbatch.alignment.subtle_limits import (
    RUBBISH_MEAN,
    SPAN_LOUD,
    UNSURE_BELOW,
    VERSION_FACTOR,
    VERSION_MIN_GAIN,
    VERSION_MIN_TOKENS,
    VERSION_POOL_FACTOR,
    VERSION_POOL_GAIN,
    VERSION_POOL_NOISE,
    VERSION_POOL_TURNS,
    VERSION_ROW_COST,
    VERSION_SHARE,
    VERSION_SURE_GAIN,
    VERSION_UNSURE_TOKENS,
    VERSION_WIDTHS,
)
from rlbatch.alignment.tournament import WIDTH_FLOOR, widths
from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch_kernels import RESIDUAL_CLIP

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The token of a turn at which the size of the differences changes most."""

    at: int
    """Index of the first value after it, among those that were given."""
    is_louder_after: bool
    gain: float
    """Log likelihood ratio, nats, of two sizes over one."""
    factor: float
    """The larger size over the smaller."""
    loud: float
    """Mean clipped |difference| of the louder part, nats."""
    quiet: float
    is_throughout: bool
    """Both halves of the louder part are louder than the quiet one, in many tokens."""

    @classmethod
    def of(cls, inference: Values, stated: Values) -> Self | None:
        """None where there are too few tokens.

        Args:
            inference: [n] nats, of tokens that are unsure on either side, in order.
            stated: [n] nats.
        """
        errors = np.minimum(np.abs(inference - stated), RESIDUAL_CLIP)
        if len(errors) < 2 * VERSION_UNSURE_TOKENS:
            return None
        scaled = errors / widths(stated)
        scaled = np.minimum(scaled, VERSION_WIDTHS * max(float(np.median(scaled)), WIDTH_FLOOR))
        num = np.arange(1, len(scaled))
        before = np.cumsum(scaled)[:-1]
        first, second = before / num, (scaled.sum() - before) / (len(scaled) - num)
        gains = len(scaled) * np.log(scaled.mean() + WIDTH_FLOOR) - (
            num * np.log(first + WIDTH_FLOOR) + (len(scaled) - num) * np.log(second + WIDTH_FLOOR)
        )
        inner = slice(VERSION_UNSURE_TOKENS - 1, len(num) - VERSION_UNSURE_TOKENS + 1)
        split = VERSION_UNSURE_TOKENS - 1 + int(gains[inner].argmax())
        is_after = bool(second[split] > first[split])
        parts = [(errors[: split + 1], scaled[: split + 1]), (errors[split + 1 :], scaled[split + 1 :])]
        (loud, loud_scaled), (quiet, quiet_scaled) = parts[is_after], parts[not is_after]
        usual = float(quiet_scaled.mean()) + WIDTH_FLOOR
        halves = np.array_split(loud_scaled, 2)
        return cls(
            at=split + 1,
            is_louder_after=is_after,
            gain=float(gains[split]),
            factor=float(loud_scaled.mean()) / usual,
            loud=float(loud.mean()),
            quiet=float(quiet.mean()),
            is_throughout=all(
                half.mean() >= VERSION_FACTOR * usual
                and (half > VERSION_FACTOR * usual).mean() >= VERSION_SHARE
                for half in halves
            ),
        )


def versions_mixed(evidence: Evidence) -> Finding | None:
    """The differences of one turn are of one size up to a token, and of another from it on."""
    if not evidence.comparable or not evidence.current:
        return None
    at = np.flatnonzero(evidence.usable & _unsure(evidence.inference, evidence.trainer))
    change = Change.of(evidence.inference[at], evidence.trainer[at])
    if change is None or change.gain < VERSION_MIN_GAIN or not change.is_throughout:
        return None
    # Rubbish is of no weights at all.
    if not SPAN_LOUD <= change.loud < RUBBISH_MEAN or change.factor < VERSION_FACTOR:
        return None
    edge, length = int(at[change.at]), len(evidence.trained)
    if min(edge, length - edge) < VERSION_MIN_TOKENS or _labelled(evidence.versions, edge):
        return None
    start, stop = (edge, length) if change.is_louder_after else (0, edge)
    known = np.unique(evidence.versions[evidence.versions >= 0])
    labels = f"version {', '.join(map(str, known.tolist()))} throughout" if len(known) else "no version"
    return finding(
        "mixed-versions",
        severity="error" if change.gain >= VERSION_SURE_GAIN else "warning",
        where=evidence.part(start, stop).place,
        expected="differences of one size along a turn",
        found=f"mean |log_ratio| of unsure tokens {change.loud:.3g} nats in these {stop - start} tokens, "
        f"{change.quiet:.3g} in the other {length - stop + start} of the turn; the labels say {labels}",
    )


def versions_mixed_in_pool(exhibits: Sequence[Exhibit]) -> Finding | None:
    """The same of many turns, each with its own token, none of which need show it alone."""
    changes = []
    for each in exhibits:
        kept = _unsure(each.inference, each.stated)
        change = Change.of(each.inference[kept], each.stated[kept])
        changes += [] if change is None else [(change, each)]
    rising = [
        (change, each)
        for change, each in changes
        if change.is_louder_after and change.is_throughout and change.factor >= VERSION_POOL_FACTOR
    ]
    if len(rising) < VERSION_POOL_TURNS:
        return None
    # Turns without a change speak against it, those that are louder before it for another cause.
    risen = {id(change) for change, _ in rising}
    gains = [(change.gain - VERSION_ROW_COST, id(change) in risen) for change, _ in changes]
    said = sum(gain if is_rising else min(gain, 0.0) for gain, is_rising in gains)
    # Without noise each turn says it alone, and what else spoils all that follows it too.
    is_noisy = np.median([change.quiet for change, _ in rising]) >= VERSION_POOL_NOISE
    if not is_noisy or said < VERSION_POOL_GAIN:
        return None
    worst, exhibit = max(rising, key=lambda pair: pair[0].gain)
    return finding(
        "mixed-versions",
        where=exhibit.place,
        expected="differences of one size along a turn",
        found=f"in {len(rising)} of {len(changes)} turns differences grow at some token and stay so; in this "
        f"one mean |log_ratio| of unsure tokens is {worst.quiet:.3g} nats before it, {worst.loud:.3g} after",
    )


def _unsure(inference: Values, stated: Values) -> NDArray[np.bool_]:
    unsure: NDArray[np.bool_] = np.fmin(inference, stated) < UNSURE_BELOW
    return unsure


def _labelled(versions: NDArray[np.int64], edge: int) -> bool:
    """Whether the labels change near the edge, so that they say it themselves."""
    near = versions[max(0, edge - VERSION_MIN_TOKENS) : edge + VERSION_MIN_TOKENS]
    return bool((near != near[0]).any())
