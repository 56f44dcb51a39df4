"""Hypotheses on what is wrong with a suspect segment, in one visible tuple.

Each is a pure function from `Evidence` to a finding, or nothing. They run on suspects only, on the host.
"""

from collections.abc import Callable, Iterator

import numpy as np

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.exhibits import Exhibit, exhibit_of, joined
from rlbatch.alignment.hypotheses.distributions import distribution_finding, other_distribution
from rlbatch.alignment.hypotheses.passes import trainer_fault
from rlbatch.alignment.hypotheses.places import rows_permuted, shifted, shifted_from
from rlbatch.alignment.hypotheses.remainder import doubtful, unexplained
from rlbatch.alignment.hypotheses.spans import span_cause
from rlbatch.alignment.hypotheses.tokens import confident_disagreement, wrong_ids
from rlbatch.alignment.hypotheses.values import (
    impossible_value,
    sign_flipped,
    trainer_not_finite,
    trainer_positive,
    zero_filled,
)
from rlbatch.alignment.limits import (
    LOOK_TOKENS,
    OUTLIER_FACTOR,
    OUTLIER_LEAST,
    OUTLIER_MOST,
    SUSPECT_MEAN,
)
from rlbatch.errors import Finding

Hypothesis = Callable[[Evidence], Finding | None]


def another_distribution(evidence: Evidence) -> Finding | None:
    """The trainer's passes differ, or the values are of another distribution than the stated one."""
    if not evidence.comparable or not _is_off(evidence):
        return None
    exhibit = exhibit_of(evidence, max_tokens=SUSPECT_TOKENS)
    if exhibit is None:
        return None
    told = trainer_fault(_beside_first(evidence, exhibit), where=evidence.place)
    if told is not None:
        return told
    winner = other_distribution(exhibit, most_left=evidence.most_left, current=evidence.current)
    return None if winner is None else distribution_finding(winner, exhibit, where=evidence.place)


def _beside_first(evidence: Evidence, exhibit: Exhibit) -> Exhibit:
    """With the first sequence of the same pack, before which there is nothing to leak from."""
    if not evidence.context.is_packed or evidence.context.index == 0:
        return exhibit
    first = next((each for each in evidence.rows().everyone if each.context.index == 0), None)
    other = None if first is None else exhibit_of(first, max_tokens=SUSPECT_TOKENS)
    return exhibit if other is None else joined([other, exhibit])


SUSPECT_TOKENS = LOOK_TOKENS // 8
"""Tokens of one suspect for which logits are asked: in so many of one turn every cause shows."""


def _is_off(evidence: Evidence) -> bool:
    """Whether the differences are larger than what is usual, or than noise where nobody knows what is."""
    usable = evidence.usable
    if not usable.any():
        return False
    return bool(evidence.at_zero()[usable].mean() >= off_from(evidence.floor))


def off_from(floor: float | None) -> float:
    """Mean |log_ratio| of a segment, nats, from which it is off.

    Args:
        floor: what is usual among segments like it, nats; None where too few are there to say.
    """
    if floor is None:
        return SUSPECT_MEAN
    return min(max(OUTLIER_FACTOR * floor, OUTLIER_LEAST), OUTLIER_MOST)


HYPOTHESES: tuple[Hypothesis, ...] = (
    trainer_not_finite,
    sign_flipped,
    impossible_value,
    shifted_from,
    shifted,
    rows_permuted,
    another_distribution,
    zero_filled,
    wrong_ids,
    trainer_positive,
    confident_disagreement,
    span_cause,
    unexplained,
    doubtful,
)
"""By precedence: the first that finds something is told.

Shifts and other rows move true zeros onto other tokens, and a kept set of one token makes true zeros, so they
are asked about before zeros are.
"""


def hypotheses_on(evidence: Evidence) -> Iterator[Hypothesis]:
    """The hypotheses that apply: only the trainer's where nothing comparable was reported."""
    reported = evidence.comparable or np.isfinite(evidence.inference[evidence.trained]).any()
    yield from HYPOTHESES if reported else (trainer_not_finite,)
