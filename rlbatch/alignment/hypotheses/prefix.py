"""Does the prompt differ between engine and trainer? Then first tokens are off, and later ones ever less."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.exhibits import Exhibit, joined
from rlbatch.alignment.limits import OUTLIER_TOKEN, ZERO_NOISY
from rlbatch.alignment.subtle_limits import (
    PREFIX_BETWEEN,
    PREFIX_EARLY,
    PREFIX_FACTOR,
    PREFIX_LATE,
    PREFIX_MIN_GAIN,
    PREFIX_NOISY_FACTOR,
    PREFIX_NOISY_MIN_GAIN,
    PREFIX_NOISY_TOKENS,
    PREFIX_NOISY_UNSURE_GAIN,
    PREFIX_SHARE_LOUD,
    PREFIX_STOP,
    PREFIX_SURE_GAIN,
    PREFIX_UNSURE_GAIN,
    PREFIX_WIDTHS,
    SPAN_LOUD,
    UNSURE_BELOW,
)
from rlbatch.alignment.tournament import WIDTH_FLOOR, widths
from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch_kernels import RESIDUAL_CLIP

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profile:
    """Mean differences along the turns, in widths, and how sure it is that the first are the larger."""

    early: float
    between: float
    late: float
    gain: float
    """Log likelihood ratio, nats, of two sizes over one, for early and late tokens."""
    share_loud: float
    """Of early tokens, above twice what late ones are on average."""

    @classmethod
    def of(cls, scaled: Values, offset: NDArray[np.int64]) -> Self | None:
        """None where a part has hardly a token."""
        parts = [scaled[offset < PREFIX_EARLY], _within(scaled, offset, PREFIX_EARLY, PREFIX_LATE)]
        parts.append(_within(scaled, offset, PREFIX_LATE, PREFIX_STOP))
        if min(map(len, parts)) < PREFIX_EARLY // 2:
            return None
        # One wild token makes no beginning loud.
        most = PREFIX_WIDTHS * float(np.concatenate(parts[1:]).mean())
        early, between, late = (np.minimum(part, most) for part in parts)
        both = np.concatenate([early, late])
        gain = len(both) * np.log(both.mean() + WIDTH_FLOOR) - sum(
            len(part) * np.log(part.mean() + WIDTH_FLOOR) for part in (early, late)
        )
        means = [float(part.mean()) for part in (early, between, late)]
        share = float((early > 2 * late.mean()).mean())
        return cls(early=means[0], between=means[1], late=means[2], gain=float(gain), share_loud=share)

    def rises(self, factor: float, gain: float) -> bool:
        """Whether the beginning is so much louder, and what follows it no quieter than the rest."""
        return (
            self.gain >= gain
            and self.share_loud >= PREFIX_SHARE_LOUD
            and self.early >= factor * self.late
            and self.early > self.between >= PREFIX_BETWEEN * self.late
        )


def prefix_differs(exhibits: Sequence[Exhibit]) -> Finding | None:
    """The first tokens of the turns are off, and the differences decay."""
    whole = joined(exhibits)
    errors = np.minimum(np.abs(whole.inference - whole.stated), RESIDUAL_CLIP)
    # Wild tokens are told by themselves, and a prefix that differs makes hardly any.
    tame = errors < OUTLIER_TOKEN
    errors, offset, stated = errors[tame], whole.offset[tame], whole.stated[tame]
    scaled, unsure = errors / widths(stated), stated < UNSURE_BELOW
    profile = _Profile.of(scaled, offset)
    # Of near-certain tokens the width is a guess, and the first tokens of a turn are more often unsure.
    of_unsure = _Profile.of(scaled[unsure], offset[unsure])
    if profile is None or of_unsure is None:
        return None
    loud, between, quiet = (
        float(_within(errors, offset, *each).mean())
        for each in ((0, PREFIX_EARLY), (PREFIX_EARLY, PREFIX_LATE), (PREFIX_LATE, PREFIX_STOP))
    )
    is_noisy = quiet > ZERO_NOISY
    factor = PREFIX_NOISY_FACTOR if is_noisy else PREFIX_FACTOR
    gain = PREFIX_NOISY_MIN_GAIN if is_noisy else PREFIX_MIN_GAIN
    if is_noisy and len(errors) < PREFIX_NOISY_TOKENS:
        return None
    if loud < SPAN_LOUD / 2 or not profile.rises(factor, gain):
        return None
    unsure_gain = PREFIX_NOISY_UNSURE_GAIN if is_noisy else PREFIX_UNSURE_GAIN
    if of_unsure.gain < unsure_gain or of_unsure.early < of_unsure.late:
        return None
    # A beginning is loud by chance now and then: no error, until it is beyond doubt.
    is_doubt = profile.gain < PREFIX_SURE_GAIN
    return finding(
        "prefix-differs",
        severity="warning" if is_doubt else "error",
        where=exhibits[0].place,
        expected="differences of one size along a turn",
        found=f"mean |log_ratio| {loud:.3g} nats in the first {PREFIX_EARLY} tokens of {len(exhibits)} "
        f"turns, {between:.3g} up to the {PREFIX_LATE}th, {quiet:.3g} later",
    )


def _within(values: Values, offset: NDArray[np.int64], start: int, stop: int) -> Values:
    part: Values = values[(offset >= start) & (offset < stop)]
    return part
