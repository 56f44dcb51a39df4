"""Faults of value: logprobs that are gone, in another unit or of other tokens, row by row."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rlbatch.faults.planting import Fault, long_segments, with_logprobs
from rlbatch.records import Sample

SHOWS_BELOW = -0.05
"""Logprob, nats, of tokens at which a value can be told from another: nearer 0 all are alike."""
MIN_SHOWING = 8
"""Such tokens that a row needs to show a change of all its values."""


def _informative(sample: Sample) -> NDArray[np.intp]:
    return np.flatnonzero(sample.loss_mask & (sample.inference_logprobs < SHOWS_BELOW))


def _zero_filled(sample: Sample, rng: np.random.Generator) -> Sample:
    # Where the engine was nearly certain a 0 would do no harm, and would be no proof.
    open_to_it = _informative(sample)
    if not len(open_to_it):
        return sample
    count = max(1, int(rng.uniform(0.2, 0.6) * len(open_to_it)))
    return with_logprobs(sample, rng.choice(open_to_it, count, replace=False), 0.0)


def _wrong_base(sample: Sample, rng: np.random.Generator) -> Sample:
    base = float(rng.choice([2.0, 10.0]))
    if len(_informative(sample)) < MIN_SHOWING:
        return sample
    return replace(sample, inference_logprobs=sample.inference_logprobs / np.float32(np.log(base)))


def _wrong_ids(sample: Sample, rng: np.random.Generator) -> Sample:
    # One to four slots, some of them neighbours, hold another id than the one drawn.
    segments = long_segments(sample, min_length=16)
    if not segments:
        return sample
    segment = segments[int(rng.integers(len(segments)))]
    size = next((p.vocab_size for p in sample.provenances if p.vocab_size), int(sample.token_ids.max()) + 1)
    ids = sample.token_ids.copy()
    first = rng.choice(np.arange(segment.start, segment.stop - 1), int(rng.integers(1, 3)), replace=False)
    slots = np.unique(np.concatenate([first, first + 1]) if rng.integers(2) else first)
    ids[slots] = (ids[slots] + rng.integers(1, size, len(slots))) % size
    # One of them may be the last: then it is not what stopped the turn either.
    return replace(sample, token_ids=ids, stop_reasons=())


def _unexplained(sample: Sample, rng: np.random.Generator) -> Sample:
    noise = -rng.uniform(0.5, 8.0, len(sample)).astype(np.float32)
    sampled = sample.turn >= 0
    return replace(sample, inference_logprobs=np.where(sampled, noise, sample.inference_logprobs))


VALUES = (
    Fault(
        code="zero-filled",
        story="The engine left some logprobs out and a buffer of zeros kept its own.",
        corrupt=_zero_filled,
    ),
    Fault(
        code="wrong-base",
        story="The engine reports bits, or a tool wrote base 10.",
        corrupt=_wrong_base,
    ),
    Fault(
        code="wrong-ids",
        story="Ids were encoded again from text, and a few came out otherwise.",
        corrupt=_wrong_ids,
        rescored=True,
    ),
    Fault(
        code="unexplained",
        story="The logprobs are of other tokens altogether.",
        corrupt=_unexplained,
    ),
)
