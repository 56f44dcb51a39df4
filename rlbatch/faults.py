"""Corruptions, one a code: what goes wrong in other people's pipelines, planted on purpose into good samples.

Shared by the demonstration, the example and the tests. Knows records and nothing of the checks; magnitudes
and places are drawn from the generator that is passed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError
from rlbatch.records import Provenance, Sample, Segment, sampled_segments

Corruption = Callable[[Sample, np.random.Generator], Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to spoil samples."""

    code: str
    """Of the finding that names it."""
    story: str
    """How it comes about in real pipelines."""
    corrupt: Corruption
    """One sample in, its spoilt copy out; the sample itself where it offers no place for this fault."""

    def plant(
        self, samples: Sequence[Sample], rng: np.random.Generator, *, share: float = 1.0
    ) -> list[Sample]:
        """Copies with `share` of the samples spoilt, at least one.

        Raises:
            RecordError: there are no samples, or none offers a place for this fault.
        """
        if not samples:
            raise RecordError("plant: expected at least one sample, found none")
        planted = list(samples)
        left = max(1, round(share * len(samples)))
        for index in rng.permutation(len(samples)).tolist():
            if left:
                planted[index] = self.corrupt(samples[index], rng)
                left -= planted[index] is not samples[index]
        if all(new is old for new, old in zip(planted, samples, strict=True)):
            raise RecordError(
                f"plant: expected a place for {self.code!r}, found none in {len(samples)} samples"
            )
        return planted


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
    segments = _segments(sample, min_length=32)
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
    return shift(sample, lag) if _segments(sample, min_length=12) else sample


def _zero_filled(sample: Sample, rng: np.random.Generator) -> Sample:
    # Where the engine was nearly certain a 0 would do no harm, and would be no proof.
    open_to_it = np.flatnonzero(sample.loss_mask & (sample.inference_logprobs < -0.05))
    if not len(open_to_it):
        return sample
    count = max(1, int(rng.uniform(0.2, 0.6) * len(open_to_it)))
    return _with_logprobs(sample, rng.choice(open_to_it, count, replace=False), 0.0)


def _kld_high(sample: Sample, rng: np.random.Generator) -> Sample:
    # About 0.45 nats on every token: a capped KLD of 0.12, and no single token that is odd.
    offset = rng.uniform(0.43, 0.48, len(sample)).astype(np.float32)
    return replace(sample, inference_logprobs=sample.inference_logprobs - offset)


def _ratio_tail(sample: Sample, rng: np.random.Generator) -> Sample:
    segments = _segments(sample, min_length=4)
    if not segments:
        return sample
    segment = segments[int(rng.integers(len(segments)))]
    at = int(rng.integers(segment.start, segment.stop))
    return _with_logprobs(sample, np.array([at]), float(sample.inference_logprobs[at]) - 25.0)


def _unexplained(sample: Sample, rng: np.random.Generator) -> Sample:
    noise = -rng.uniform(0.5, 8.0, len(sample)).astype(np.float32)
    sampled = sample.turn >= 0
    return replace(sample, inference_logprobs=np.where(sampled, noise, sample.inference_logprobs))


def _token_out_of_range(sample: Sample, rng: np.random.Generator) -> Sample:
    size = next((p.vocab_size for p in sample.provenances if p.vocab_size is not None), 2**30)
    ids = sample.token_ids.copy()
    ids[int(rng.integers(len(ids)))] = size + 13
    return replace(sample, token_ids=ids)


def _logprob_missing(sample: Sample, rng: np.random.Generator) -> Sample:
    return _at_sampled(sample, rng, float("nan"))


def _logprob_not_finite(sample: Sample, rng: np.random.Generator) -> Sample:
    return _at_sampled(sample, rng, float("-inf"))


def _logprob_sentinel(sample: Sample, rng: np.random.Generator) -> Sample:
    return _at_sampled(sample, rng, -9999.0)


def _logprob_positive(sample: Sample, rng: np.random.Generator) -> Sample:
    return _at_sampled(sample, rng, float(rng.uniform(1.0, 20.0)))


def _mask_without_logprob(sample: Sample, rng: np.random.Generator) -> Sample:
    context = np.flatnonzero(sample.turn < 0)[1:]
    if not len(context):
        return sample
    mask = sample.loss_mask.copy()
    mask[context[-int(rng.integers(1, min(3, len(context)) + 1)) :]] = True
    return replace(sample, loss_mask=mask)


def _advantage_not_finite(sample: Sample, rng: np.random.Generator) -> Sample:
    advantages = sample.advantages.copy()
    advantages[sample.turn >= 0] = np.nan
    return replace(sample, advantages=advantages)


def _temperature_contradicted(sample: Sample, rng: np.random.Generator) -> Sample:
    factor = np.float32(rng.choice([0.5, 2.0]))
    return replace(sample, temperature=np.where(sample.turn >= 0, factor, np.float32(1)) * sample.temperature)


def _modes_mixed(sample: Sample, rng: np.random.Generator) -> Sample:
    # The second half of a turn becomes a turn of its own, of a server that was started differently.
    segments = _segments(sample, min_length=2)
    if not segments:
        return sample
    last = segments[-1]
    turn = sample.turn.copy()
    turn[(last.start + last.stop) // 2 : last.stop] = len(sample.provenances)
    stated = sample.provenances[last.turn]
    other = replace(stated, logprobs_mode="raw" if stated.logprobs_mode == "processed" else "processed")
    return replace(sample, turn=turn, provenances=(*sample.provenances, other))


def _nothing_trained(sample: Sample, rng: np.random.Generator) -> Sample:
    return replace(sample, loss_mask=np.zeros_like(sample.loss_mask))


def _incomparable(sample: Sample, rng: np.random.Generator) -> Sample:
    top_p = float(rng.uniform(0.5, 0.95))
    return _with_provenances(sample, lambda p: replace(p, sampling=replace(p.sampling, top_p=top_p)))


def _greedy_sampled(sample: Sample, rng: np.random.Generator) -> Sample:
    ones = np.ones_like(sample.temperature)
    greedy = _with_provenances(sample, lambda p: replace(p, sampling=replace(p.sampling, temperature=0.0)))
    return replace(greedy, temperature=ones)


def _turn_prefix_broken(sample: Sample, rng: np.random.Generator) -> Sample:
    return replace(sample, sibling=sample.num_siblings, num_siblings=sample.num_siblings + 1)


_ALL = (
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
    Fault(
        code="token-out-of-range",
        story="A padded slot of the head was sampled.",
        corrupt=_token_out_of_range,
    ),
    Fault(
        code="logprob-missing",
        story="A null in the reply became NaN.",
        corrupt=_logprob_missing,
    ),
    Fault(
        code="logprob-not-finite",
        story="The engine's logits overflowed.",
        corrupt=_logprob_not_finite,
    ),
    Fault(
        code="logprob-sentinel",
        story="A token outside the engine's own mask was reported with its marker.",
        corrupt=_logprob_sentinel,
    ),
    Fault(
        code="logprob-positive",
        story="The engine was started to report logits.",
        corrupt=_logprob_positive,
    ),
    Fault(
        code="mask-without-logprob",
        story="The mask begins at the template's header instead of the first sampled token.",
        corrupt=_mask_without_logprob,
    ),
    Fault(
        code="advantage-not-finite",
        story="A group of one was divided by its standard deviation.",
        corrupt=_advantage_not_finite,
    ),
    Fault(
        code="temperature-contradicted",
        story="The column was filled by hand with another run's temperature.",
        corrupt=_temperature_contradicted,
    ),
    Fault(
        code="modes-mixed",
        story="Two turns of one rollout came from servers that were started differently.",
        corrupt=_modes_mixed,
    ),
    Fault(
        code="nothing-trained",
        story="The mask was lost on the way.",
        corrupt=_nothing_trained,
    ),
    Fault(
        code="incomparable",
        story="Tokens were drawn with top-p, and the trainer normalises over the whole vocabulary.",
        corrupt=_incomparable,
    ),
    Fault(
        code="greedy-sampled",
        story="Evaluation rollouts got among the training data.",
        corrupt=_greedy_sampled,
    ),
    Fault(
        code="turn-prefix-broken",
        story="A chat template dropped the thinking of an earlier turn.",
        corrupt=_turn_prefix_broken,
    ),
)

FAULTS: Mapping[str, Fault] = MappingProxyType({fault.code: fault for fault in _ALL})
"""Every fault that samples can carry, by its code."""


def _segments(sample: Sample, *, min_length: int) -> list[Segment]:
    return [part for part in sampled_segments(sample.turn) if part.stop - part.start >= min_length]


def _with_logprobs(sample: Sample, at: NDArray[np.int64], value: float) -> Sample:
    logprobs = sample.inference_logprobs.copy()
    logprobs[at] = value
    return replace(sample, inference_logprobs=logprobs)


def _at_sampled(sample: Sample, rng: np.random.Generator, value: float) -> Sample:
    sampled = np.flatnonzero(sample.turn >= 0)
    return _with_logprobs(sample, rng.choice(sampled, 1), value) if len(sampled) else sample


def _with_provenances(sample: Sample, change: Callable[[Provenance], Provenance]) -> Sample:
    changed: dict[str, Any] = {"provenances": tuple(change(item) for item in sample.provenances)}
    return replace(sample, **changed)
