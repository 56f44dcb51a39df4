"""Faults that samples alone show."""

from dataclasses import replace

import numpy as np

from rlbatch.faults.planting import Fault, at_sampled, long_segments, with_provenances
from rlbatch.records import Sample


def _token_out_of_range(sample: Sample, rng: np.random.Generator) -> Sample:
    size = next((p.vocab_size for p in sample.provenances if p.vocab_size is not None), 2**30)
    ids = sample.token_ids.copy()
    # Not the first, where there is another: the BOS would be missing too.
    ids[int(rng.integers(min(1, len(ids) - 1), len(ids)))] = size + 13
    # It may be the last one: then it is not what stopped the turn either.
    return replace(sample, token_ids=ids, stop_reasons=())


def _logprob_missing(sample: Sample, rng: np.random.Generator) -> Sample:
    return at_sampled(sample, rng, float("nan"))


def _logprob_not_finite(sample: Sample, rng: np.random.Generator) -> Sample:
    return at_sampled(sample, rng, float("-inf"))


def _logprob_sentinel(sample: Sample, rng: np.random.Generator) -> Sample:
    return at_sampled(sample, rng, -9999.0)


def _logprob_positive(sample: Sample, rng: np.random.Generator) -> Sample:
    return at_sampled(sample, rng, float(rng.uniform(1.0, 20.0)))


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
    segments = long_segments(sample, min_length=2)
    if not segments:
        return sample
    last = segments[-1]
    stated = sample.provenances[last.turn]
    raw = stated.logprobs_mode != "raw"
    # Raw values are comparable where nothing was in force, and then no other fault is planted with this one.
    if raw and not stated.sampling.neutral:
        return sample
    turn = sample.turn.copy()
    turn[(last.start + last.stop) // 2 : last.stop] = len(sample.provenances)
    other = replace(stated, logprobs_mode="raw" if raw else "processed")
    return replace(sample, turn=turn, provenances=(*sample.provenances, other), stop_reasons=())


def _nothing_trained(sample: Sample, rng: np.random.Generator) -> Sample:
    return replace(sample, loss_mask=np.zeros_like(sample.loss_mask))


def _incomparable(sample: Sample, rng: np.random.Generator) -> Sample:
    top_p = float(rng.uniform(0.5, 0.95))
    return with_provenances(sample, lambda p: replace(p, sampling=replace(p.sampling, top_p=top_p)))


def _greedy_sampled(sample: Sample, rng: np.random.Generator) -> Sample:
    ones = np.ones_like(sample.temperature)
    greedy = with_provenances(sample, lambda p: replace(p, sampling=replace(p.sampling, temperature=0.0)))
    return replace(greedy, temperature=ones)


def _turn_prefix_broken(sample: Sample, rng: np.random.Generator) -> Sample:
    return replace(sample, sibling=sample.num_siblings, num_siblings=sample.num_siblings + 1)


def _version_gap(sample: Sample, rng: np.random.Generator) -> Sample:
    segments = long_segments(sample, min_length=3)
    if not segments:
        return sample
    segment = segments[int(rng.integers(len(segments)))]
    versions = np.where(sample.turn >= 0, np.int32(rng.integers(1, 9)), np.int32(-1))
    start = int(rng.integers(segment.start + 1, segment.stop - 1))
    versions[start : int(rng.integers(start + 1, segment.stop))] = -1
    return replace(sample, policy_version=versions)


def _version_mixed(sample: Sample, rng: np.random.Generator) -> Sample:
    segments = long_segments(sample, min_length=2)
    if not segments:
        return sample
    segment = segments[int(rng.integers(len(segments)))]
    versions = np.where(sample.turn >= 0, np.int32(rng.integers(1, 9)), np.int32(-1))
    at = int(rng.integers(segment.start + 1, segment.stop))
    versions[at : segment.stop] += np.int32(rng.choice([-1, 1, 2]))
    return replace(sample, policy_version=versions)


SOUND = (
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
    Fault(
        code="version-gap",
        story="The engine's spans leave out the tokens of one chunk.",
        corrupt=_version_gap,
    ),
    Fault(
        code="version-mixed",
        story="Weights were updated while the turn was generated.",
        corrupt=_version_mixed,
    ),
)
