"""Faults that only trainer logprobs show."""

from dataclasses import replace

import numpy as np

from rlbatch.faults.planting import Fault, long_segments, with_logprobs
from rlbatch.records import Sample, sampled_segments


def shift(sample: Sample, lag: int) -> Sample:
    """Logprobs moved against their ids by `lag`; the token at the edge that has none counts as context.

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
    return replace(sample, inference_logprobs=logprobs, turn=turn, loss_mask=mask)


def _shifted_from(sample: Sample, rng: np.random.Generator) -> Sample:
    # One value stands twice, and every later one against the id after its own. Both parts must be long
    # enough to show it.
    segments = long_segments(sample, min_length=32)
    if not segments:
        return sample
    segment = segments[int(rng.integers(len(segments)))]
    length = segment.stop - segment.start
    at = segment.start + int(rng.uniform(0.25, 0.5) * length)
    logprobs = sample.inference_logprobs.copy()
    logprobs[at + 1 : segment.stop] = sample.inference_logprobs[at : segment.stop - 1]
    return replace(sample, inference_logprobs=logprobs)


def _shifted(sample: Sample, rng: np.random.Generator) -> Sample:
    lag = int(rng.choice([-1, 1]))
    # In a handful of tokens it would not show.
    return shift(sample, lag) if long_segments(sample, min_length=12) else sample


def _zero_filled(sample: Sample, rng: np.random.Generator) -> Sample:
    # Where the engine was nearly certain a 0 would do no harm, and would be no proof.
    open_to_it = np.flatnonzero(sample.loss_mask & (sample.inference_logprobs < -0.05))
    if not len(open_to_it):
        return sample
    count = max(1, int(rng.uniform(0.2, 0.6) * len(open_to_it)))
    return with_logprobs(sample, rng.choice(open_to_it, count, replace=False), 0.0)


def _kld_high(sample: Sample, rng: np.random.Generator) -> Sample:
    # About 0.45 nats on every token: a capped KLD of 0.12, and no single token that is odd.
    offset = rng.uniform(0.43, 0.48, len(sample)).astype(np.float32)
    return replace(sample, inference_logprobs=sample.inference_logprobs - offset)


def _ratio_tail(sample: Sample, rng: np.random.Generator) -> Sample:
    segments = long_segments(sample, min_length=4)
    if not segments:
        return sample
    segment = segments[int(rng.integers(len(segments)))]
    at = int(rng.integers(segment.start, segment.stop))
    return with_logprobs(sample, np.array([at]), float(sample.inference_logprobs[at]) - 25.0)


def _unexplained(sample: Sample, rng: np.random.Generator) -> Sample:
    noise = -rng.uniform(0.5, 8.0, len(sample)).astype(np.float32)
    sampled = sample.turn >= 0
    return replace(sample, inference_logprobs=np.where(sampled, noise, sample.inference_logprobs))


ALIGNED = (
    Fault(
        code="shifted",
        story="The ids were encoded again from text and the lists cut to one length.",
        corrupt=_shifted,
    ),
    Fault(
        code="shifted-from",
        story="A logprob too many inside the row: every later one stands against the id before its own.",
        corrupt=_shifted_from,
    ),
    Fault(
        code="zero-filled",
        story="The engine left some logprobs out and a buffer of zeros kept its own.",
        corrupt=_zero_filled,
    ),
    Fault(
        code="unexplained",
        story="The logprobs are of other tokens altogether.",
        corrupt=_unexplained,
    ),
    Fault(
        code="kld-high",
        story="The engine runs other weights than the trainer.",
        corrupt=_kld_high,
    ),
    Fault(
        code="ratio-tail",
        story="One token that the engine held to be all but impossible.",
        corrupt=_ratio_tail,
    ),
)
