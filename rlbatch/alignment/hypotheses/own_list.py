"""The trainer's list against the trainer's own logits: where the two differ, the engine has no part in it.

The causes that are asked for on the engine's list are asked for on this one, and have the same codes: the
code says what is wrong, the words say whose list it is. An engine's noise plays no part here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.exhibits import Exhibit, joined, second_pass
from rlbatch.alignment.hypotheses.distributions import described, other_distribution
from rlbatch.alignment.limits import LAG_MIN_PAIRS, LEFT_MOST, PATH_LAGS, ROWS_MIN_TOKENS
from rlbatch.alignment.subtle_limits import (
    AGAIN_MEAN,
    OWN_LEAST,
    OWN_LEAST_SCALE,
    OWN_LEFT_SHARE,
    OWN_SCALED_SHARE,
    SIDE_TOKENS,
)
from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where
from rlbatch_kernels import RESIDUAL_CLIP

Values = NDArray[np.float64]

EXPECTED = "trainer logprobs that follow from the model's logits"
GATHER = "gather batch.target_ids from logits[:, t] as they are, or call rlbatch.scoring.trainer_logprobs"


def trainer_fault(exhibits: Sequence[Exhibit], *, where: Where) -> Finding | None:
    """What makes the trainer's list differ from its logits; None where it does not, or nobody can say how.

    Args:
        exhibits: of one provenance.
        where: the place.
    """
    whole = joined(exhibits)
    if whole.again is None or (apart := mean(whole.trainer - whole.again)) < OWN_LEAST:
        return None
    told = _apart(whole)
    if whole.is_restless and whole.third is not None:
        between = mean(whole.third - whole.again)
        return finding(
            "dropout-on",
            where=where,
            expected="trainer logprobs that a second pass over the sequence gives",
            found=f"{told}; two passes that gave those logits are {between:.3g} nats apart",
        )
    for how in _ways(exhibits):
        there = np.isfinite(how.values)
        left = mean((whole.trainer - how.values)[there]) if there.any() else np.inf
        off = mean((whole.trainer - whole.again)[there]) if there.any() else 0.0
        if there.sum() >= LAG_MIN_PAIRS and left <= min(LEFT_MOST, OWN_LEFT_SHARE * off):
            return finding(
                how.code,
                where=where,
                expected=EXPECTED,
                found=f"{told}; {how.words} leaves {left:.3g}",
                likely=how.likely,
                fix=how.fix,
            )
    return (
        _by_distribution(whole, told, where)
        or _scaled(whole, told, where)
        or (_exchanged(exhibits, told) if apart >= AGAIN_MEAN and len(exhibits) > 1 else None)
    )


def nameless(exhibit: Exhibit, *, where: Where, more: str = "") -> Finding:
    """The list differs from the logits, and no way of doing so fits."""
    return finding("trainer-logprobs-differ", where=where, expected=EXPECTED, found=_apart(exhibit) + more)


def untold(exhibit: Exhibit, *, where: Where) -> Finding | None:
    """`nameless`, where the logits agree with the engine better than with the list."""
    if exhibit.again is None:
        return None
    apart, left = mean(exhibit.trainer - exhibit.again), mean(exhibit.inference - exhibit.again)
    return nameless(exhibit, where=where) if apart >= AGAIN_MEAN and left < apart / 2 else None


def of_trainer(found: Finding, evidence: Evidence) -> Finding:
    """A finding of places, told of the trainer's list where the engine's agrees better with the logits.

    Args:
        found: values of one list stand at other places in the other: of two lists alone, whose is not said.
        evidence: of the segment.
    """
    if evidence.ask is None:
        return found
    start = max(0, (found.where.start or 0) - evidence.first_token)
    part = evidence.part(start, start + SIDE_TOKENS)
    usable = part.usable
    if not usable.any():
        return found
    again = second_pass(part)[usable]
    apart, left = mean(part.trainer[usable] - again), mean(part.inference[usable] - again)
    if apart < AGAIN_MEAN or left >= apart / 2:
        return found
    likely, fix = _PLACES[found.code]
    more = f"; the engine's list is {left:.3g} nats from the model's logits, the trainer's {apart:.3g}"
    return replace(found, found=found.found + more, likely=likely, fix=fix)


def of_either(found: Finding) -> Finding:
    """A finding of places in all rows alike, where nobody gives logits: it may be either list."""
    likely, _ = _PLACES[found.code]
    return replace(
        found,
        likely=f"every row of the batch is so, and two lists do not say which is wrong. Either: {likely}. "
        f"Or: {found.likely}",
        fix="pass logits_for=rlbatch.scoring.logits_for(model): the model's logits say which list it is; or "
        "compare your trainer logprobs with rlbatch.scoring.trainer_logprobs(model, batch)",
    )


def is_of_places(found: Finding) -> bool:
    """Whether it says that values of one list stand at other places in the other."""
    return found.code in _PLACES


_ROLLED = (
    "the trainer's list is out of place: its logprobs were rolled, sliced or gathered at other positions"
)
_PLACES = {
    **dict.fromkeys(("shifted", "shifted-from", "shifted-by-rule"), (_ROLLED, GATHER)),
    "rows-permuted": (
        "rows of the trainer's list changed places: it is of another order, or of another micro-batch",
        "keep each micro-batch's logprobs in the order of its rows, and pass them with that batch",
    ),
}
"""Cause and fix, by code, where it is the trainer's list."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Way:
    """One way of making the trainer's list."""

    code: str
    words: str
    values: Values
    """[n] what the list would have; NaN where that is not known."""
    likely: str | None = None
    fix: str | None = None


def _ways(exhibits: Sequence[Exhibit]) -> Iterator[_Way]:
    whole = joined(exhibits)
    if whole.again is None or whole.target_logits is None or whole.own_position is None:
        return
    yield _Way(code="logits-not-logprobs", words="the logit of each token", values=whole.target_logits)
    late = [(each, each.own_position) for each in exhibits]
    yield _Way(
        code="no-causal-shift", words="the logits one position later", values=whole.own_position, fix=GATHER
    )
    yield _Way(code="no-causal-shift", words="the token before", values=_moved(late, -1), fix=GATHER)
    if whole.next_id is not None:
        yield _Way(
            code="trainer-logprobs-differ",
            words="the token after",
            values=whole.next_id,
            likely="ids were shifted twice: batch.target_ids are shifted already",
            fix=GATHER,
        )
    yield _Way(
        code="trainer-logprobs-differ",
        words="the probability of each token",
        values=np.exp(whole.again),
        likely="softmax was taken in place of log_softmax",
        fix="pass log_softmax(logits / temperature) of the targets, or rlbatch.scoring.trainer_logprobs",
    )
    own = [(each, each.again) for each in exhibits]
    for lag in sorted(PATH_LAGS, key=abs)[1:]:
        yield _Way(
            code="shifted",
            words=f"the model's logprob at lag {lag:+d}",
            values=_moved(own, lag),
            likely=_ROLLED,
            fix=GATHER,
        )


def _moved(lists: Sequence[tuple[Exhibit, Values | None]], lag: int) -> Values:
    """[n] of each token the value of the one `lag` further on in its turn; NaN where there is none."""
    moved = []
    for exhibit, values in lists:
        if values is None:
            moved.append(np.full(len(exhibit.offset), np.nan))
            continue
        at = np.searchsorted(exhibit.offset, exhibit.offset + lag)
        inside = np.minimum(at, len(values) - 1)
        is_there = exhibit.offset[inside] == exhibit.offset + lag
        moved.append(np.where(is_there, values[inside], np.nan))
    return np.concatenate(moved)


def _by_distribution(whole: Exhibit, told: str, where: Where) -> Finding | None:
    """The families that an engine's list is asked for, asked of the trainer's."""
    winner = other_distribution(replace(whole, inference=whole.trainer), most_left=LEFT_MOST, current=True)
    # No noise is between the two lists: what explains the difference explains nearly all of it.
    if winner is None or winner.fit.width > OWN_LEFT_SHARE * mean(whole.trainer - whole.stated):
        return None
    return finding(
        winner.family.code,
        where=where,
        expected=f"trainer logprobs log_softmax(logits / {whole.divisor:g}) of the targets, in nats",
        found=f"{told}; {described(winner, whole.divisor)} leaves {winner.fit.width:.3g}",
        likely="the trainer's list was computed otherwise than is stated; the engine's has no part in it",
        fix="divide logits by batch.temperature, then log_softmax in nats: rlbatch.scoring.trainer_logprobs",
    )


def _scaled(whole: Exhibit, told: str, where: Where) -> Finding | None:
    """Logprobs at the stated temperature times one number: divided once more, after the softmax."""
    if whole.again is None:
        return None
    times = float((whole.trainer * whole.again).sum() / max(float(np.square(whole.again).sum()), 1e-12))
    left, off = mean(whole.trainer - times * whole.again), mean(whole.trainer - whole.again)
    # Anything that is near zero everywhere is any logprob times nearly nothing.
    if len(whole.again) < LAG_MIN_PAIRS or left > OWN_SCALED_SHARE * off or times < OWN_LEAST_SCALE:
        return None
    return finding(
        "divided-by-temperature",
        where=where,
        expected=EXPECTED,
        found=f"{told}; the logprob at temperature {whole.divisor:g}, divided by {1 / times:.3g}, "
        f"leaves {left:.3g}",
        likely="the trainer's logprobs were divided, or multiplied, after the softmax",
    )


def _exchanged(exhibits: Sequence[Exhibit], told: str) -> Finding | None:
    """Most turns that differ have the values of other turns, at the same column or from the same start."""
    pairs = [(each, _owner(each, exhibits)) for each in exhibits if not _agrees(each)]
    found = [(each, owner) for each, owner in pairs if owner is not None]
    if not found or 2 * len(found) < len(pairs):
        return None
    each, owner = found[0]
    likely, fix = _PLACES["rows-permuted"]
    return finding(
        "rows-permuted",
        where=each.place,
        expected="each row's trainer logprobs follow from its own logits",
        found=f"{told}; {len(found)} of {len(pairs)} turns have those of another turn, this one of "
        f"{owner.place}",
        likely=likely,
        fix=fix,
    )


def _owner(exhibit: Exhibit, others: Sequence[Exhibit]) -> Exhibit | None:
    """Whose logits give an exhibit's trainer logprobs."""
    best: tuple[float, Exhibit] | None = None
    for other in others:
        if other is exhibit or other.again is None or exhibit.again is None:
            continue
        apart_starts = (exhibit.place.start or 0) - (other.place.start or 0)
        for columns in {0, apart_starts}:
            _, mine, theirs = np.intersect1d(exhibit.offset + columns, other.offset, return_indices=True)
            if len(mine) < max(ROWS_MIN_TOKENS, len(exhibit.offset) / 2):
                continue
            off = mean((exhibit.trainer - exhibit.again)[mine])
            left = mean(exhibit.trainer[mine] - other.again[theirs])
            if left <= OWN_LEFT_SHARE * off and (best is None or left < best[0]):
                best = left, other
    return None if best is None else best[1]


def _agrees(exhibit: Exhibit) -> bool:
    return exhibit.again is not None and mean(exhibit.trainer - exhibit.again) < AGAIN_MEAN


def _apart(exhibit: Exhibit) -> str:
    again = exhibit.trainer if exhibit.again is None else exhibit.again
    return (
        f"{mean(exhibit.trainer - again):.3g} nats from the logprobs of its logits over "
        f"{len(exhibit.trainer)} tokens, which are {mean(exhibit.inference - again):.3g} from the engine's"
    )


def mean(differences: Values) -> float:
    """Clipped: of |difference|, nats."""
    return float(np.minimum(np.abs(differences), RESIDUAL_CLIP).mean())
