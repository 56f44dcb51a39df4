"""Two passes of the trainer over the same tokens: what they differ in is a fault of the trainer's side."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.exhibits import Exhibit
from rlbatch.alignment.limits import LAG_ACCEPTED_SHARE, LEFT_MOST
from rlbatch.alignment.subtle_limits import AGAIN_MEAN
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


def untold_pass(exhibit: Exhibit, *, where: Where) -> Finding | None:
    """The trainer's logits agree with the engine and its logprobs do not: the engine has no part in it."""
    if exhibit.again is None:
        return None
    apart, left = _mean(exhibit.trainer - exhibit.again), _mean(exhibit.inference - exhibit.again)
    if apart < AGAIN_MEAN or left > LAG_ACCEPTED_SHARE * apart:
        return None
    return _told(
        "unexplained",
        where,
        f"{apart:.3g} nats from the logprobs of its logits over {len(exhibit.trainer)} tokens, which are "
        f"{left:.3g} from the engine's",
    )


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
    if (later and not first) or not _most_differ(apart) or _mean(differences) >= MOST_BY_CHANCE:
        return None
    alike = sum(_is_spared(each) for each, _ in heard)
    if alike:
        # Dropout spares no row; more than that is not known here.
        worst = heard[int(np.argmax(apart))][0].place
        return _told("unexplained", worst, f"{told}; {alike} of {len(heard)} turns are alike in both passes")
    return _told("dropout-on", where, told)


def _is_spared(exhibit: Exhibit) -> bool:
    """Whether two passes agree on a segment with enough tokens that dropout would have moved."""
    if exhibit.again is None:
        return False
    moved = exhibit.again < UNCERTAIN
    differences = (exhibit.trainer - exhibit.again)[moved]
    return len(differences) >= SPARED_MIN and _mean(differences) < AGAIN_MEAN / 4


def _most_differ(apart: Sequence[float]) -> bool:
    """Whether it is a fault of the whole pass: one row that is scored otherwise has a cause of its own."""
    return sum(value >= AGAIN_MEAN / 4 for value in apart) >= MOST_SHARE * len(apart)


MOST_SHARE = 0.6
"""Of the segments, which must differ for the pass to be at fault and not some of them."""
LEAK_MIN_AGAIN = 2
"""Later segments of a pack that must differ while the first does not."""
UNCERTAIN = -0.2
"""Nats: dropout hardly moves tokens that are likelier."""
SPARED_MIN = 16
"""Such tokens: together they differ as the rest does, if they are dropped out as the rest is."""
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
