"""Faults of place: logprobs that stand against the ids of other tokens, or of other rows."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlbatch.faults.planting import Fault, long_segments
from rlbatch.records import Sample, Segment, sampled_segments

SHOWS_IN = 16
"""Tokens in which a shift shows: fewer may all be near certain."""
SHOWS_BELOW = -0.05
"""Logprob, nats, of a token that can be told from its neighbours."""


def shift(sample: Sample, lag: int) -> Sample:
    """Logprobs moved against their ids by `lag`; the tokens at the edge that have none count as context.

    Example:
        ids [7, 8, 9] at [-1, -2, -3]: lag 1 leaves 7, 8 at [-2, -3]; lag -1 leaves 8, 9 at [-1, -2]
    """
    logprobs = sample.inference_logprobs.copy()
    turn, mask = sample.turn.copy(), sample.loss_mask.copy()
    for segment in sampled_segments(sample.turn):
        length = segment.stop - segment.start
        kept = max(0, length - abs(lag))
        first = segment.start if lag > 0 else segment.stop - kept
        source = segment.stop - kept if lag > 0 else segment.start
        logprobs[segment.start : segment.stop] = np.nan
        logprobs[first : first + kept] = sample.inference_logprobs[source : source + kept]
        outside = np.ones(length, bool)
        outside[first - segment.start : first - segment.start + kept] = False
        turn[segment.start : segment.stop][outside] = -1
        mask[segment.start : segment.stop][outside] = False
    # Lists that were cut to one length: whether the last token left is the one that stopped it, nobody says.
    return replace(sample, inference_logprobs=logprobs, turn=turn, loss_mask=mask, stop_reasons=())


def _shifted(sample: Sample, rng: np.random.Generator) -> Sample:
    # In a handful of tokens it would not show, and a larger one takes more to be told.
    if not long_segments(sample, min_length=SHOWS_IN):
        return sample
    is_long = np.count_nonzero(sample.inference_logprobs < SHOWS_BELOW) >= 2 * SHOWS_IN
    return shift(sample, int(rng.choice([-3, -2, -1, 1, 2, 3] if is_long else [-1, 1])))


def _shifted_from(sample: Sample, rng: np.random.Generator) -> Sample:
    # At each place one value stands twice, or is lost, and every later one moves along. All parts must be
    # long enough to show it.
    segments = long_segments(sample, min_length=2 * SHOWS_IN)
    if not segments:
        return sample
    segment = segments[int(rng.integers(len(segments)))]
    length = segment.stop - segment.start
    num_places = int(rng.integers(1, max(2, min(4, length // (2 * SHOWS_IN)))))
    edges = np.linspace(segment.start, segment.stop, num_places + 2)
    is_loss = bool(rng.integers(2))
    own = sample.inference_logprobs[segment.start : segment.stop]
    values = own.tolist()
    for edge in sorted(edges[1:-1], reverse=True):
        at = int(edge) - segment.start + int(rng.integers(-length // 16, length // 16 + 1))
        values[at : at + 1] = [] if is_loss else [values[at], values[at]]
    # What a lost entry leaves open at the end is filled with what was there before.
    values = [*values, *own[len(values) :].tolist()][:length]
    logprobs = sample.inference_logprobs.copy()
    logprobs[segment.start : segment.stop] = values
    return replace(sample, inference_logprobs=logprobs)


def _shifted_by_rule(samples: Sequence[Sample], rng: np.random.Generator) -> list[Sample]:
    # Each row by what its own prompt, padding or number says: a slice at the column of another row.
    prompts = np.array([_first_sampled(sample) for sample in samples])
    lengths = np.array([len(sample) for sample in samples])
    rules = (prompts - prompts.min(), lengths.max() - lengths, np.arange(len(samples)))
    sign = int(rng.choice([-1, 1]))
    for at in rng.permutation(len(rules)):
        lags = (sign * rules[at]).tolist()
        moved = [_sliced(sample, lag, rng) for sample, lag in zip(samples, lags, strict=True)]
        # One row that is off follows any rule.
        if sum(_shows(new, lag) for new, lag in zip(moved, lags, strict=True) if lag) >= 2:
            return moved
    return list(samples)


def _shows(sample: Sample, lag: int) -> bool:
    """Whether a turn has enough pairs at a lag that can be told from their neighbours."""
    parts = long_segments(sample, min_length=SHOWS_IN + abs(lag))
    values = [sample.inference_logprobs[part.start : part.stop - abs(lag)] for part in parts]
    return any(np.count_nonzero(each < SHOWS_BELOW) >= SHOWS_IN for each in values)


def _sliced(sample: Sample, lag: int, rng: np.random.Generator) -> Sample:
    """Logprobs moved by `lag`, with values of other tokens where the slice goes beyond the turn.

    Prompt and mask stay what they are, so that the rule can be seen from them.
    """
    logprobs = sample.inference_logprobs.copy()
    # A turn that is shorter than its lag has nothing left that could show it.
    segments = long_segments(sample, min_length=SHOWS_IN + abs(lag)) if lag else []
    for part in segments:
        own = sample.inference_logprobs[part.start : part.stop]
        beyond = rng.choice(own, abs(lag))
        sliced = [*own[lag:], *beyond] if lag > 0 else [*beyond, *own[:lag]]
        logprobs[part.start : part.stop] = sliced
    return replace(sample, inference_logprobs=logprobs) if segments else sample


def _rows_permuted(samples: Sequence[Sample], rng: np.random.Generator) -> list[Sample]:
    # Each row gets the values of the next one that is long enough to be told apart.
    able = [i for i, sample in enumerate(samples) if long_segments(sample, min_length=SHOWS_IN)]
    if len(able) < 2:
        return list(samples)
    step = int(rng.integers(1, len(able)))
    permuted = list(samples)
    for at, index in enumerate(able):
        permuted[index] = _with_values_of(samples[index], samples[able[(at + step) % len(able)]])
    return permuted


def _with_values_of(sample: Sample, other: Sample) -> Sample:
    """The first turn's logprobs are those of the other's; what the other has none for counts as context."""
    mine, theirs = _longest(sample), _longest(other)
    length = min(mine.stop - mine.start, theirs.stop - theirs.start)
    logprobs = sample.inference_logprobs.copy()
    turn, mask = sample.turn.copy(), sample.loss_mask.copy()
    logprobs[mine.start : mine.start + length] = other.inference_logprobs[
        theirs.start : theirs.start + length
    ]
    rest = slice(mine.start + length, mine.stop)
    logprobs[rest], turn[rest], mask[rest] = np.nan, -1, False
    return replace(sample, inference_logprobs=logprobs, turn=turn, loss_mask=mask, stop_reasons=())


def _longest(sample: Sample) -> Segment:
    return max(sampled_segments(sample.turn), key=lambda part: part.stop - part.start)


def _first_sampled(sample: Sample) -> int:
    sampled = np.flatnonzero(sample.turn >= 0)
    return int(sampled[0]) if len(sampled) else len(sample)


SHIFTS = (
    Fault(
        code="shifted",
        story="The ids were encoded again from text and the lists cut to one length.",
        corrupt=_shifted,
    ),
    Fault(
        code="shifted-from",
        story="Logprobs too many, or lost, inside the row: every later one stands against another id.",
        corrupt=_shifted_from,
    ),
    Fault(
        code="shifted-by-rule",
        story="Logprobs were sliced at a column that is right for one row of the batch only.",
        corrupt=_shifted_by_rule,
        together=True,
    ),
    Fault(
        code="rows-permuted",
        story="A queue gave the replies back in the order in which they came.",
        corrupt=_rows_permuted,
        together=True,
    ),
)
