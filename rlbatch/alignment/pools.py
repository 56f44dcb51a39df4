"""`Pool`: what the turns of one provenance show together that none of them shows alone.

Collects a bounded number of tokens while batches pass, and judges them as they come.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.drift import Drift
from rlbatch.alignment.exhibits import Exhibit, exhibit_of, joined
from rlbatch.alignment.hypotheses.distributions import distribution_finding, other_distribution
from rlbatch.alignment.hypotheses.passes import trainer_fault
from rlbatch.alignment.inquiry import Inquiry
from rlbatch.alignment.limits import (
    LEFT_MOST,
    LOOK_MEAN,
    LOOK_TOKENS,
    LOOK_TURN_TOKENS,
    OUTLIER_TOKEN,
    PREFIX_EARLY,
    PREFIX_LATE,
    PREFIX_WIDTHS,
    SPAN_FACTOR,
    SPAN_LOUD,
    SPAN_MIN_GAIN,
)
from rlbatch.alignment.measure import COLUMN
from rlbatch.alignment.tournament import WIDTH_FLOOR, widths
from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch_kernels import RESIDUAL_CLIP


@dataclass(slots=True, kw_only=True)
class Pool:
    """The segments of one provenance that no exact cause of their own explains."""

    drift: Drift = field(default_factory=Drift)
    """Of those without any cause of their own."""
    findings: list[Finding] = field(default_factory=list)
    """Of single segments: told where nothing explains all of them."""
    num_segments: int = 0
    """Of which `drift` is."""
    exhibits: list[Exhibit] = field(default_factory=list)
    """Tokens of segments drawn by current weights, up to `LOOK_TOKENS`."""
    cause: Finding | None = None
    """What explains the exhibits so far."""
    _num_looked_at: int = 0
    _num_tokens: float = 0.0
    _sum_abs_log_ratio: float = 0.0

    def look(self, inquiry: Inquiry, mine: NDArray[np.bool_]) -> None:
        """Take in the beginnings of segments, where they differ by more than an engine's own noise.

        Args:
            inquiry: the batch.
            mine: [G] segments of this pool, without an exact cause, drawn by current weights.
        """
        self._num_tokens += float(inquiry.table[mine, COLUMN["num_compared"]].sum())
        self._sum_abs_log_ratio += float(inquiry.table[mine, COLUMN["sum_abs_log_ratio"]].sum())
        if self._sum_abs_log_ratio < LOOK_MEAN * max(self._num_tokens, 1):
            return
        before = self._num_looked_at
        for index in np.flatnonzero(mine).tolist():
            room = min(LOOK_TURN_TOKENS, LOOK_TOKENS - self._num_looked_at)
            if room <= 0:
                break
            exhibit = exhibit_of(inquiry.evidence(index), max_tokens=room, is_kept=True)
            if exhibit is not None:
                self.exhibits.append(exhibit)
                self._num_looked_at += len(exhibit.inference)
        if self._num_looked_at > before:
            self.cause = self._judge()

    def _judge(self) -> Finding | None:
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
    errors = np.minimum(np.abs(whole.inference - whole.stated), RESIDUAL_CLIP)
    scaled = np.minimum(errors / widths(whole.stated), PREFIX_WIDTHS)
    # Wild tokens are told by themselves, and a prefix that differs makes none.
    tame = errors < OUTLIER_TOKEN
    early, late = tame & (whole.offset < PREFIX_EARLY), tame & (whole.offset >= PREFIX_LATE)
    between = tame & ~early & ~late
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
