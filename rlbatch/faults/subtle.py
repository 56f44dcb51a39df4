"""Faults below the noise of a healthy run, in samples: where only the structure of the differences shows."""

from dataclasses import replace

import numpy as np

from rlbatch.faults.planting import Fault, long_segments, with_logprobs, with_provenances
from rlbatch.records import Provenance, Sample

BLOCK = 16
"""Tokens of one block of an engine's prefix cache (vLLM's default)."""


MIN_DISAGREEMENTS, DISAGREES_BELOW = 4, -3.5
"""Tokens of a turn, of which fewer are noise in the tails, and their logprob before, nats.

What is said of them is 2.9 nats or more above that: noise at a KLD of 0.028 leaves the two apart that count.
"""


def temperature_apart(rng: np.random.Generator) -> float:
    """A temperature from 0.5 to 1.5 that is a tenth or more away from 1: nearer it is no worse than noise."""
    return float(rng.uniform(0.5, 0.9) if rng.integers(2) else rng.uniform(1.1, 1.5))


def restated(sample: Sample, temperature: float) -> Sample:
    """The same values, said to be processed ones at another temperature."""

    def change(stated: Provenance) -> Provenance:
        sampling = replace(stated.sampling, temperature=temperature)
        return replace(stated, logprobs_mode="processed", sampling=sampling)

    column = np.where(sample.turn >= 0, np.float32(temperature), sample.temperature)
    return replace(with_provenances(sample, change), temperature=column)


def _temperature_mismatch(sample: Sample, rng: np.random.Generator) -> Sample:
    if not long_segments(sample, min_length=4):
        return sample
    stated = max(item.divisor for item in sample.provenances)
    return restated(sample, round(stated * temperature_apart(rng), 3))


def _prefix_cache_rubbish(sample: Sample, rng: np.random.Generator) -> Sample:
    # Values of a cached prefix were never computed: rubbish from the start up to a whole number of blocks.
    segments = long_segments(sample, min_length=3 * BLOCK)
    if not segments:
        return sample
    segment = segments[int(rng.integers(len(segments)))]
    first = (segment.start + 8 + BLOCK - 1) // BLOCK
    last = (segment.stop - BLOCK) // BLOCK
    stop = BLOCK * int(rng.integers(first, last + 1))
    return _with_rubbish(sample, np.arange(segment.start, stop), rng)


def _last_tokens_wrong(sample: Sample, rng: np.random.Generator) -> Sample:
    segments = long_segments(sample, min_length=BLOCK)
    if not segments:
        return sample
    stop = segments[int(rng.integers(len(segments)))].stop
    return _with_rubbish(sample, np.arange(stop - int(rng.integers(2, 5)), stop), rng)


def _with_rubbish(sample: Sample, at: np.ndarray, rng: np.random.Generator) -> Sample:
    # Three nats or more from what was there, on the side where there is room.
    logprobs = sample.inference_logprobs.copy()
    own = logprobs[at]
    moved = rng.uniform(3.0, 8.0, len(at)).astype(np.float32)
    logprobs[at] = np.where(own - moved > -20, own - moved, own + moved)
    return replace(sample, inference_logprobs=logprobs)


def _mixed_versions(sample: Sample, rng: np.random.Generator) -> Sample:
    # From some token on other weights drew: logprobs move as logits do, and the labels say nothing of it.
    segments = long_segments(sample, min_length=64)
    if not segments:
        return sample
    segment = segments[int(rng.integers(len(segments)))]
    at = int(rng.uniform(0.3, 0.7) * (segment.stop - segment.start)) + segment.start
    return drifted(sample, slice(at, segment.stop), float(rng.uniform(1.2, 2.0)), rng)


def drifted(sample: Sample, where: slice, scale: float, rng: np.random.Generator) -> Sample:
    """Logprobs of weights that gave each token's logit another value, by `scale` nats in the spread."""
    logprobs = sample.inference_logprobs.astype(np.float64)
    part = logprobs[where]
    # A logit that moves by z moves its own logprob by (1 - p) z.
    moved = part - scale * np.expm1(part) * rng.normal(size=len(part))
    # A logprob stays below 0: what would pass it comes as near as it went beyond.
    logprobs[where] = np.where(moved < 0, moved, part * np.exp(-np.abs(moved - part)))
    return replace(sample, inference_logprobs=logprobs.astype(np.float32))


def _confident_disagreement(sample: Sample, rng: np.random.Generator) -> Sample:
    # The engine says one half or more of tokens of a turn that the trainer holds to be unlikely.
    unlikely = [
        part.start + np.flatnonzero(sample.inference_logprobs[part.start : part.stop] < DISAGREES_BELOW)
        for part in long_segments(sample, min_length=MIN_DISAGREEMENTS)
    ]
    able = [at[sample.loss_mask[at]] for at in unlikely]
    able = [at for at in able if len(at) >= MIN_DISAGREEMENTS]
    if not able:
        return sample
    chosen = able[int(rng.integers(len(able)))]
    some = rng.choice(chosen, max(MIN_DISAGREEMENTS, len(chosen) // 8), replace=False)
    logprobs = sample.inference_logprobs.copy()
    logprobs[some] = rng.uniform(-0.6, -0.1, len(some))
    return replace(sample, inference_logprobs=logprobs)


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


SUBTLE = (
    Fault(
        code="temperature-mismatch",
        story="The trainer divides by the temperature of the configuration, the engine by another.",
        corrupt=_temperature_mismatch,
        alike=True,
        rescored=True,
    ),
    Fault(
        code="prefix-cache-rubbish",
        story="The engine took the beginning from its prefix cache and reported memory it never wrote.",
        corrupt=_prefix_cache_rubbish,
    ),
    Fault(
        code="last-tokens-wrong",
        story="The last tokens were drawn ahead of their logprobs, which are of another draft.",
        corrupt=_last_tokens_wrong,
    ),
    Fault(
        code="mixed-versions",
        story="New weights arrived in the middle of a reply, and nobody wrote it down.",
        corrupt=_mixed_versions,
    ),
    Fault(
        code="confident-disagreement",
        story="The engine's kernel is wrong for some inputs.",
        corrupt=_confident_disagreement,
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
