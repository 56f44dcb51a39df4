"""Two passes of the trainer over the same tokens: what they differ in is a fault of the trainer's side."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.exhibits import Exhibit
from rlbatch.alignment.limits import AGAIN_MEAN, LAG_ACCEPTED_SHARE, LEFT_MOST
from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where
from rlbatch_kernels import RESIDUAL_CLIP

Values = NDArray[np.float64]


def trainer_fault(exhibit: Exhibit, *, where: Where) -> Finding | None:
    """The trainer logprobs that were passed are not those that follow from its logits."""
    if exhibit.again is None or exhibit.own_position is None or exhibit.target_logits is None:
        return None
    apart = _mean(exhibit.trainer - exhibit.again)
    if apart < AGAIN_MEAN:
        return None
    told = f"{apart:.3g} nats from the logprobs of its logits over {len(exhibit.trainer)} tokens"
    least = min(LEFT_MOST, LAG_ACCEPTED_SHARE * apart)
    if _mean(exhibit.trainer - exhibit.target_logits) < least:
        return _told("logits-not-logprobs", where, f"{told}; the logits themselves leave nothing")
    has_next = np.isfinite(exhibit.own_position)
    if has_next.any() and _mean((exhibit.trainer - exhibit.own_position)[has_next]) < least:
        return _told("no-causal-shift", where, f"{told}; those one position later leave nothing")
    return None


def passes_differ(exhibit: Exhibit, *, where: Where) -> Finding | None:
    """Two passes over many segments differ in no way of their own: by the place in the pack, or by chance."""
    if exhibit.again is None or _mean(exhibit.trainer - exhibit.again) < AGAIN_MEAN:
        return None
    told = (
        f"{_mean(exhibit.trainer - exhibit.again):.3g} nats from the logprobs of its logits over "
        f"{len(exhibit.trainer)} tokens"
    )
    errors = np.minimum(np.abs(exhibit.trainer - exhibit.again), RESIDUAL_CLIP)
    first, later = exhibit.sequence == 0, exhibit.sequence > 0
    if first.any() and later.any():
        if errors[first].mean() < LAG_ACCEPTED_SHARE * errors[later].mean():
            by_index = ", ".join(
                f"{errors[exhibit.sequence == at].mean():.3g}" for at in np.unique(exhibit.sequence)[:6]
            )
            return _told("boundary-leak", where, f"{told}; by index in the pack {by_index}")
        return _told("dropout-on", where, told) if errors.mean() < MOST_BY_CHANCE else None
    if (exhibit.sequence >= 0).any():
        return None
    return _told("dropout-on", where, told) if errors.mean() < MOST_BY_CHANCE else None


MOST_BY_CHANCE = 0.8
"""Nats that dropout leaves between two passes: beyond, they are of other tokens."""


def leak_by_index(means: Sequence[float], *, where: Where) -> Finding | None:
    """The first sequence of a pack agrees, and all later ones do not.

    Args:
        means: mean |log_ratio| of each sequence with enough tokens, nats, in the order of the pack.
        where: the place.
    """
    first, later = means[0], np.array(means[1:])
    if len(later) < LEAK_MIN_LATER or np.median(later) < LEAK_LEAST:
        return None
    if first > LAG_ACCEPTED_SHARE * float(np.median(later)) or (later < 2 * first).any():
        return None
    by_index = ", ".join(f"{mean:.3g}" for mean in means[:6])
    return _told("boundary-leak", where, f"mean |log_ratio| by index in the pack {by_index} nats")


LEAK_MIN_LATER = 3
"""Sequences after the first: of four that are alike, the first is by far the least once in many packs."""
LEAK_FIRST_TOKENS = 32
"""Tokens of the first, which is compared with all others."""
LEAK_LEAST = 0.03
"""Mean |log_ratio| of the later ones, nats."""


def _told(code: str, where: Where, found: str) -> Finding:
    return finding(
        code, where=where, expected="trainer logprobs that a second pass over the sequence gives", found=found
    )


def _mean(differences: Values) -> float:
    return float(np.minimum(np.abs(differences), RESIDUAL_CLIP).mean())
