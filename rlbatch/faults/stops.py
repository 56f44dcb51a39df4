"""Faults at the tokens that begin and end a turn, and of the precision that its logprobs were kept in."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.faults.planting import Fault, long_segments, with_provenances
from rlbatch.records import TOKEN_FIELDS, Sample, Segment

BF16_BITS = np.uint32(0xFFFF0000)
"""What of a float32 a bf16 keeps."""

MIN_DISTINCT = 16
"""Fewer values do not show what they were rounded to."""


def _taken(sample: Sample, at: NDArray[np.intp]) -> Sample:
    """A copy that has, in this order, these tokens of the sample, with everything about them."""
    columns: dict[str, Any] = {
        spec.name: getattr(sample, spec.name)[at]
        for spec in TOKEN_FIELDS
        if getattr(sample, spec.name) is not None
    }
    if sample.routed_experts is not None:
        columns["routed_experts"] = sample.routed_experts[at[:-1]]
    return replace(sample, **columns)


def _with_bos_stated(sample: Sample) -> Sample:
    return with_provenances(sample, lambda each: replace(each, bos_token_id=int(sample.token_ids[0])))


def _bos_doubled(sample: Sample, rng: np.random.Generator) -> Sample:
    return _taken(_with_bos_stated(sample), np.concatenate([[0], np.arange(len(sample))]))


def _bos_missing(sample: Sample, rng: np.random.Generator) -> Sample:
    # The token that is first then must be one of the prompt, and another one.
    if len(sample) < 3 or sample.turn[1] >= 0 or sample.token_ids[0] == sample.token_ids[1]:
        return sample
    return _taken(_with_bos_stated(sample), np.arange(1, len(sample)))


def _last_long_segment(sample: Sample) -> Segment | None:
    segments = long_segments(sample, min_length=4)
    return segments[-1] if segments else None


def _with_eos_stated(sample: Sample, token_id: int) -> Sample:
    # Other turns may have ended with other ids: what stopped those is no longer said.
    stated = with_provenances(sample, lambda each: replace(each, eos_token_ids=(token_id,)))
    return replace(stated, stop_reasons=())


def _mask_drops_eos(sample: Sample, rng: np.random.Generator) -> Sample:
    segment = _last_long_segment(sample)
    if segment is None or not sample.loss_mask[segment.stop - 2]:
        return sample
    last = int(sample.token_ids[segment.stop - 1])
    sampled_ids = sample.token_ids[sample.turn >= 0]
    # What stands elsewhere too is no stop token here.
    if np.count_nonzero(sampled_ids == last) > 1:
        return sample
    mask = sample.loss_mask.copy()
    mask[segment.stop - 1] = False
    return replace(_with_eos_stated(sample, last), loss_mask=mask)


def _stop_overrun(sample: Sample, rng: np.random.Generator) -> Sample:
    segment = _last_long_segment(sample)
    if segment is None:
        return sample
    ids = sample.token_ids.copy()
    stop_id = int(ids[segment.stop - 1])
    ids[int(rng.integers(segment.start, segment.stop - 1))] = stop_id
    reasons: list[Any] = [None] * len(sample.provenances)
    reasons[segment.turn] = "stop"
    return replace(_with_eos_stated(sample, stop_id), token_ids=ids, finish_reasons=tuple(reasons))


def _stop_lost(sample: Sample, rng: np.random.Generator) -> Sample:
    # From ids and logprobs alike, so that every count agrees.
    segment = _last_long_segment(sample)
    if segment is None or segment.stop != len(sample):
        return sample
    ids = sample.token_ids[segment.start :]
    # A stop token before the last one did not stop the turn, and what did is another matter.
    if np.isin(ids[:-1], (ids[-1], *sample.provenances[segment.turn].eos_token_ids)).any():
        return sample
    finish: list[Any] = [None] * len(sample.provenances)
    stop: list[Any] = [None] * len(sample.provenances)
    finish[segment.turn], stop[segment.turn] = "stop", int(ids[-1])
    stopped = replace(sample, finish_reasons=tuple(finish), stop_reasons=tuple(stop))
    return _taken(stopped, np.arange(len(sample) - 1))


def _low_precision(sample: Sample, rng: np.random.Generator) -> Sample:
    rounded = (sample.inference_logprobs.view(np.uint32) & BF16_BITS).view(np.float32)
    for segment in long_segments(sample, min_length=MIN_DISTINCT):
        values = rounded[segment.start : segment.stop]
        if len(np.unique(values[values < 0])) >= MIN_DISTINCT:
            return replace(sample, inference_logprobs=rounded)
    return sample


STOPS = (
    Fault(
        code="bos-doubled",
        story="The template writes BOS and the tokenizer adds another.",
        corrupt=_bos_doubled,
        rescored=True,
    ),
    Fault(
        code="bos-missing",
        story="Neither the template nor the tokenizer added BOS.",
        corrupt=_bos_missing,
        rescored=True,
    ),
    Fault(
        code="mask-drops-eos",
        story="Pad and EOS are one id, and the mask was made from ids.",
        corrupt=_mask_drops_eos,
    ),
    Fault(
        code="stop-overrun",
        story="The engine reports tokens that it drafted past the stop token.",
        corrupt=_stop_overrun,
        rescored=True,
    ),
    Fault(
        code="finish-mismatch",
        story="The ids were encoded again from text, without the stop token, and the last logprob was cut.",
        corrupt=_stop_lost,
        rescored=True,
    ),
    Fault(
        code="low-precision-logprobs",
        story="Logprobs were sent as bf16.",
        corrupt=_low_precision,
    ),
)
