"""Hypotheses on what is wrong with a suspect segment, in two visible tuples.

Each is a pure function from `Evidence` to a finding, or nothing. They run on suspects only, on the host.
"""

from collections.abc import Callable

import numpy as np

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.exhibits import Exhibit, exhibit_of
from rlbatch.alignment.hypotheses.distributions import (
    Winner,
    distribution_finding,
    is_hopeless,
    other_distribution,
)
from rlbatch.alignment.hypotheses.own_list import trainer_fault, untold
from rlbatch.alignment.hypotheses.places import rows_permuted, shifted, shifted_from
from rlbatch.alignment.hypotheses.remainder import doubtful, unexplained, unlike_its_peers
from rlbatch.alignment.hypotheses.spans import last_tokens_wrong, span_cause
from rlbatch.alignment.hypotheses.tokens import confident_disagreement, wrong_ids
from rlbatch.alignment.hypotheses.values import (
    impossible_value,
    sign_flipped,
    trainer_not_finite,
    trainer_positive,
    zero_filled,
)
from rlbatch.alignment.hypotheses.versions import versions_mixed
from rlbatch.alignment.limits import OUTLIER_FACTOR, OUTLIER_LEAST, OUTLIER_MOST, SUSPECT_MEAN
from rlbatch.alignment.subtle_limits import FAMILY_SINGLE_SHARE, LOOK_TOKENS
from rlbatch.errors import Finding
from rlbatch_kernels import RESIDUAL_CLIP

__all__ = [
    "EXACT",
    "Hypothesis",
    "SINGLE",
    "SUSPECT_TOKENS",
    "another_distribution",
    "first_found",
    "off_from",
]

Hypothesis = Callable[[Evidence], Finding | None]


def another_distribution(evidence: Evidence) -> Finding | None:
    """The trainer's passes differ, or the values are of another distribution than the stated one."""
    if not evidence.comparable or not _is_off(evidence):
        return None

    winners: dict[int, Winner | None] = {}

    def winner_of(exhibit: Exhibit) -> Winner | None:
        num_tokens = len(exhibit.inference)
        if num_tokens not in winners:
            winners[num_tokens] = None if is_hopeless(exhibit) else _winner(evidence, exhibit)
        return winners[num_tokens]

    exhibit = exhibit_of(
        evidence,
        max_tokens=SUSPECT_TOKENS,
        is_enough=lambda seen: is_hopeless(seen) or winner_of(seen) is not None,
    )
    if exhibit is None:
        return None
    told = trainer_fault([exhibit], where=evidence.place) or untold(exhibit, where=evidence.place)
    if told is not None or not evidence.current:
        # Weights that have moved since are another distribution, whatever was reported.
        return told
    winner = winner_of(exhibit)
    return None if winner is None else distribution_finding(winner, exhibit, where=evidence.place)


def _winner(evidence: Evidence, exhibit: Exhibit) -> Winner | None:
    off = np.minimum(np.abs(exhibit.inference - exhibit.stated), RESIDUAL_CLIP).mean()
    # One turn is little to go by: what leaves nearly all of the differences explains none of them.
    most_left = min(evidence.most_left, FAMILY_SINGLE_SHARE * float(off))
    return other_distribution(exhibit, most_left=most_left, current=evidence.current)


SUSPECT_TOKENS = LOOK_TOKENS // 8
"""Tokens of one suspect for which logits are asked: in so many of one turn every cause shows."""


def _is_off(evidence: Evidence) -> bool:
    """Whether the differences are larger than what is usual, or than noise where nobody knows what is."""
    usable = evidence.usable
    if not usable.any():
        return False
    mean = evidence.at_zero()[usable].mean()
    return bool(mean >= min(off_from(evidence.floor), SUSPECT_MEAN))


def off_from(floor: float | None) -> float:
    """Mean |log_ratio| of a segment, nats, from which it is off.

    Args:
        floor: what is usual among segments like it, nats; None where too few are there to say.
    """
    if floor is None:
        return SUSPECT_MEAN
    return min(max(OUTLIER_FACTOR * floor, OUTLIER_LEAST), OUTLIER_MOST)


EXACT: tuple[Hypothesis, ...] = (
    trainer_not_finite,
    sign_flipped,
    impossible_value,
    shifted_from,
    shifted,
    rows_permuted,
)
"""Of single segments, by precedence: the first that finds something is told. They hold at any noise.

Shifts and other rows move true zeros onto other tokens, so they are asked about before zeros are.
"""

SINGLE: tuple[Hypothesis, ...] = (
    wrong_ids,
    another_distribution,
    zero_filled,
    trainer_positive,
    versions_mixed,
    confident_disagreement,
    last_tokens_wrong,
    span_cause,
    unexplained,
    doubtful,
    unlike_its_peers,
)
"""Of single segments that neither those explain nor what all segments of their provenance show together."""


def first_found(evidence: Evidence, hypotheses: tuple[Hypothesis, ...]) -> Finding | None:
    """What the first hypothesis finds that finds anything; only the trainer's where nothing was reported."""
    if not evidence.comparable and not np.isfinite(evidence.inference[evidence.trained]).any():
        hypotheses = tuple(each for each in hypotheses if each is trainer_not_finite)
    results = (hypothesis(evidence) for hypothesis in hypotheses)
    return next((found for found in results if found is not None), None)
