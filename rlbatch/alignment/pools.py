"""`Pool`: what the turns of one provenance show together that none of them shows alone.

Collects a bounded number of tokens while batches pass, and judges them as they come.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.drift import Drift, chosen_rows
from rlbatch.alignment.exhibits import Exhibit, exhibit_of, joined
from rlbatch.alignment.hypotheses.distributions import distribution_finding, other_distribution
from rlbatch.alignment.hypotheses.own_list import trainer_fault
from rlbatch.alignment.hypotheses.prefix import prefix_differs
from rlbatch.alignment.hypotheses.versions import versions_mixed_in_pool
from rlbatch.alignment.inquiry import Inquiry
from rlbatch.alignment.limits import LEFT_MOST
from rlbatch.alignment.measure import COLUMN
from rlbatch.alignment.subtle_limits import (
    LOOK_BEGINNING_FACTOR,
    LOOK_BEGINNING_MEAN,
    LOOK_MEAN,
    LOOK_SHORT_MEAN,
    LOOK_SIDED_MEAN,
    LOOK_SIDED_SHARE,
    LOOK_TOKENS,
    LOOK_TURN_TOKENS,
)
from rlbatch.errors import Finding


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
    """What explains the exhibits so far; a warning leaves open whether it is all."""
    _beginnings: list[Exhibit] = field(default_factory=list)
    """The same without logits, where only the first tokens stand out."""
    _seen: "_Seen" = field(default_factory=lambda: _Seen())

    @property
    def is_explained(self) -> bool:
        """Whether nothing else need be said of the segments."""
        return self.cause is not None and self.cause.severity == "error"

    def look(self, inquiry: Inquiry, mine: NDArray[np.bool_]) -> None:
        """Take in the beginnings of segments, where they differ by more than an engine's own noise.

        Args:
            inquiry: the batch.
            mine: [G] segments of this pool, without an exact cause, drawn by current weights.
        """
        self._seen.add(inquiry, mine)
        if self._seen.is_off:
            if self._take_in(inquiry, mine, self.exhibits, asking=True):
                self._tell(self._judge())
        elif self._seen.begins_off and self._take_in(inquiry, mine, self._beginnings, asking=False):
            self._tell(prefix_differs(self._beginnings))

    def _tell(self, cause: Finding | None) -> None:
        """Keep a cause; an error stays, for nobody judges again what it explained, whatever follows."""
        if not self.is_explained or (cause is not None and cause.severity == "error"):
            self.cause = cause

    def _take_in(
        self, inquiry: Inquiry, mine: NDArray[np.bool_], kept: list[Exhibit], *, asking: bool
    ) -> bool:
        """Whether there was something to keep that there is room for."""
        before = len(kept)
        for index in np.flatnonzero(mine).tolist():
            room = min(LOOK_TURN_TOKENS, LOOK_TOKENS - sum(len(each.inference) for each in kept))
            if room <= 0:
                break
            evidence = inquiry.evidence(index)
            # What is made without logits is of no use to whoever asks for them.
            asked = evidence if asking else replace(evidence, ask=None, windows={})
            exhibit = exhibit_of(asked, max_tokens=room, is_kept=asking)
            kept += [] if exhibit is None else [exhibit]
        return len(kept) > before

    def _judge(self) -> Finding | None:
        worst = max(self.exhibits, key=lambda each: float(np.abs(each.inference - each.trainer).mean()))
        told = trainer_fault(self.exhibits, where=worst.place)
        if told is not None:
            return told
        whole = joined(self.exhibits)
        winner = other_distribution(whole, most_left=LEFT_MOST, current=True)
        if winner is not None:
            scope = f" of {len(self.exhibits)} turns of one provenance"
            return distribution_finding(winner, whole, where=worst.place, scope=scope)
        return prefix_differs(self.exhibits) or versions_mixed_in_pool(self.exhibits)


_SEEN = [
    COLUMN[name]
    for name in (
        *("num_compared", "sum_abs_log_ratio", "sum_log_ratio"),
        *("first_num_compared", "first_sum_abs_log_ratio"),
    )
]


@dataclass(slots=True, kw_only=True)
class _Seen:
    """Sums of the table by which it is decided whether to look: they cost nothing."""

    num: float = 0.0
    signed: float = 0.0
    size: float = 0.0
    """Of |log_ratio|, nats."""
    num_first: float = 0.0
    """Tokens in first windows of turns that have further ones, and the next the same of later windows."""
    num_later: float = 0.0
    size_first: float = 0.0
    size_later: float = 0.0

    def add(self, inquiry: Inquiry, mine: NDArray[np.bool_]) -> None:
        """Count the segments of a batch, but for those whose sums are beyond any float."""
        all_sizes = inquiry.table[:, COLUMN["sum_abs_log_ratio"]]
        columns = chosen_rows(inquiry.table, mine & np.isfinite(all_sizes))[:, _SEEN]
        num, size, signed, num_first, size_first = columns.sum(axis=0).tolist()
        self.num += num
        self.size += size
        self.signed += signed
        # Turns of one window have no later ones.
        goes_on = columns[:, 0] > columns[:, 3]
        num, size, signed, num_first, size_first = chosen_rows(columns, goes_on).sum(axis=0).tolist()
        self.num_first += num_first
        self.size_first += size_first
        self.num_later += num - num_first
        self.size_later += size - size_first

    @property
    def is_off(self) -> bool:
        """More than an engine's own noise leaves, or less but nearly all of it on one side."""
        mean = self.size / max(self.num, 1)
        one_sided = abs(self.signed) >= LOOK_SIDED_SHARE * self.size
        return mean >= LOOK_MEAN or (one_sided and mean >= LOOK_SIDED_MEAN)

    @property
    def begins_off(self) -> bool:
        """The first window of the turns is louder than their later ones, or there are none."""
        if not self.num_later:
            return self.size >= LOOK_SHORT_MEAN * max(self.num, 1)
        first, later = self.size_first / max(self.num_first, 1), self.size_later / max(self.num_later, 1)
        return first >= max(LOOK_BEGINNING_MEAN, LOOK_BEGINNING_FACTOR * later)
