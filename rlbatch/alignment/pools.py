"""`Pool`: what the turns of one provenance show together that none of them shows alone.

Collects a bounded number of tokens while batches pass, and judges them once, when all have passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlbatch.alignment.drift import Drift
from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.exhibits import Exhibit, exhibit_of, joined
from rlbatch.alignment.hypotheses.distributions import distribution_finding, other_distribution
from rlbatch.alignment.hypotheses.passes import trainer_fault
from rlbatch.alignment.limits import (
    LEFT_MOST,
    LOOK_MEAN,
    LOOK_TOKENS,
    LOOK_TURN_TOKENS,
    PREFIX_EARLY,
    PREFIX_LATE,
    SPAN_FACTOR,
    SPAN_LOUD,
    SPAN_MIN_GAIN,
)
from rlbatch.alignment.tournament import RESIDUAL_WIDTHS, WIDTH_FLOOR, widths
from rlbatch.catalogue import finding
from rlbatch.errors import Finding


@dataclass(slots=True, kw_only=True)
class Pool:
    """The segments of one provenance that no cause of their own explains."""

    drift: Drift = field(default_factory=Drift)
    """Of all of them."""
    num_segments: int = 0
    exhibits: list[Exhibit] = field(default_factory=list)
    """Tokens of those drawn by current weights, up to `LOOK_TOKENS`."""
    num_looked_at: int = 0

    @property
    def worth_a_look(self) -> bool:
        """Whether the differences so far are larger than an engine's own noise, and room is left."""
        total = self.drift.by_age.get(0)
        if total is None or self.num_looked_at >= LOOK_TOKENS:
            return False
        return total.mean(total.sum_abs_log_ratio) >= LOOK_MEAN

    def look_at(self, evidence: Evidence) -> None:
        """Take in the beginning of one segment."""
        exhibit = exhibit_of(evidence, max_tokens=min(LOOK_TURN_TOKENS, LOOK_TOKENS - self.num_looked_at))
        if exhibit is not None:
            self.exhibits.append(exhibit)
            self.num_looked_at += len(exhibit.inference)

    def cause(self) -> Finding | None:
        """What explains all of it."""
        if not self.exhibits:
            return None
        whole = joined(self.exhibits)
        worst = max(self.exhibits, key=lambda each: float(np.abs(each.inference - each.trainer).mean()))
        told = trainer_fault(whole, where=worst.place)
        if told is not None:
            return told
        winner = other_distribution(whole, most_left=LEFT_MOST, current=True)
        if winner is not None:
            scope = f" of {len(self.exhibits)} turns of one provenance"
            return distribution_finding(winner, whole, where=worst.place, scope=scope)
        return prefix_differs(self.exhibits)


def prefix_differs(exhibits: Sequence[Exhibit]) -> Finding | None:
    """The first tokens of the turns are off, and the differences decay."""
    whole = joined(exhibits)
    errors = np.minimum(np.abs(whole.inference - whole.stated), 4.0)
    scaled = np.minimum(errors / widths(whole.stated), RESIDUAL_WIDTHS)
    early, late = whole.offset < PREFIX_EARLY, whole.offset >= PREFIX_LATE
    between = ~early & ~late
    if min(early.sum(), late.sum(), between.sum()) < PREFIX_EARLY:
        return None
    means = [float(scaled[part].mean()) for part in (early, between, late)]
    both = np.concatenate([scaled[early], scaled[late]])
    gain = len(both) * np.log(both.mean() + WIDTH_FLOOR) - sum(
        part.sum() * np.log(scaled[part].mean() + WIDTH_FLOOR) for part in (early, late)
    )
    loud, quiet = float(errors[early].mean()), float(errors[late].mean())
    if gain < SPAN_MIN_GAIN or means[0] < SPAN_FACTOR * means[2] or loud < SPAN_LOUD / 2:
        return None
    if not means[0] > means[1] > means[2]:
        return None
    return finding(
        "prefix-differs",
        where=exhibits[0].place,
        expected="differences of one size along a turn",
        found=f"mean |log_ratio| {loud:.3g} nats in the first {PREFIX_EARLY} tokens of {len(exhibits)} "
        f"turns, {float(errors[between].mean()):.3g} up to the {PREFIX_LATE}th, {quiet:.3g} later",
    )
