"""Two passes of the trainer over many segments: do they differ along the pack, or in all of it?"""

from collections.abc import Sequence

import numpy as np

from rlbatch.alignment.exhibits import Exhibit, joined
from rlbatch.alignment.hypotheses.own_list import mean as _mean
from rlbatch.alignment.hypotheses.own_list import nameless
from rlbatch.alignment.limits import LAG_ACCEPTED_SHARE
from rlbatch.alignment.subtle_limits import AGAIN_MEAN
from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where


def passes_disagree(exhibits: Sequence[Exhibit]) -> bool:
    """Whether the trainer's two passes over these segments are apart at all."""
    apart = [each.trainer - each.again for each in exhibits if each.again is not None]
    return bool(apart) and _mean(np.concatenate(apart)) >= AGAIN_MEAN


def passes_differ(exhibits: Sequence[Exhibit]) -> Finding | None:
    """Two passes over many segments differ in no way of their own: by the place in the pack, or by chance.

    Args:
        exhibits: of the step; those of a packed batch with some of its first sequence.
    """
    if not passes_disagree(exhibits):
        return None
    heard = [(each, each.trainer - each.again) for each in exhibits if each.again is not None]
    apart = [_mean(differences) for _, differences in heard]
    first = [value for (each, _), value in zip(heard, apart, strict=True) if each.index == 0]
    later = [value for (each, _), value in zip(heard, apart, strict=True) if each.index > 0]
    differences = np.concatenate([each for _, each in heard])
    told = f"{_mean(differences):.3g} nats from the logprobs of its logits over {len(differences)} tokens"
    where = heard[-1][0].place
    spared = bool(first) and max(first) < LAG_ACCEPTED_SHARE * float(np.median(later or [0]))
    if spared and len(later) >= LEAK_MIN_AGAIN and _most_differ(later):
        by_index = ", ".join(f"{value:.3g}" for value in [max(first), *later[:5]])
        return _told("boundary-leak", where, f"{told}; by index in the pack {by_index}")
    # In a pack whose first sequence nobody looked at the two look alike.
    if (later and not first) or not _most_differ(apart):
        return None
    worst = heard[int(np.argmax(apart))][0].place
    alike = sum(value < AGAIN_MEAN / 4 for value in apart)
    more = f"; {alike} of {len(heard)} turns are alike in both" if alike else ""
    return nameless(joined([each for each, _ in heard]), where=worst, more=more)


def _most_differ(apart: Sequence[float]) -> bool:
    """Whether it is a fault of the whole pass: one row that is scored otherwise has a cause of its own."""
    return sum(value >= AGAIN_MEAN / 4 for value in apart) >= MOST_SHARE * len(apart)


MOST_SHARE = 0.6
"""Of the segments, which must differ for the pass to be at fault and not some of them."""
LEAK_MIN_AGAIN = 2
"""Later segments of a pack that must differ while the first does not."""


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
