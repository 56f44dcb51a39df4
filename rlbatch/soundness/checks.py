"""The checks on one sample: pure functions from a `Subject` to findings, in one visible tuple.

Each looks at sampled tokens of the sample's own arrays (numpy). None knows of trainers, files or batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where
from rlbatch.records import Origin, Provenance, Purpose, Sample, Segment, sampled_segments
from rlbatch.soundness.values import VALUE_FAULTS, found_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One sample under test, and what its checks need to know of it."""

    sample: Sample
    purpose: Purpose
    vocab_size: int | None
    """Rows of the model's head, where one is at hand; each turn's provenance may know its own."""
    origin: Origin

    def where(self, turn: int | None = None, tokens: NDArray[np.intp] | None = None) -> Where:
        """The place of a finding: a turn, and the span from the first to the last of `tokens`."""
        return Where(
            path=self.origin.path,
            sample=self.origin.index,
            trajectory=self.sample.trajectory_id,
            turn=turn,
            start=None if tokens is None else int(tokens[0]),
            stop=None if tokens is None else int(tokens[-1]) + 1,
        )

    def turns(self) -> Iterator[tuple[Segment, Provenance]]:
        """The segments of the sample with what is known of their logprobs."""
        for segment in sampled_segments(self.sample.turn):
            yield segment, self.sample.provenances[segment.turn]


def token_out_of_range(subject: Subject) -> Iterator[Finding]:
    """Ids, of prompt and completion alike, beyond the vocabulary of the model or of the provenance."""
    known = [provenance.vocab_size for _, provenance in subject.turns()] + [subject.vocab_size]
    sizes = [size for size in known if size is not None]
    if not sizes:
        return
    ids = subject.sample.token_ids
    bad = np.flatnonzero(ids >= min(sizes))
    if len(bad):
        yield finding(
            "token-out-of-range",
            where=subject.where(tokens=bad),
            expected=f"ids below the vocabulary size {min(sizes)}",
            found=f"id {int(ids[bad[0]])} at token {int(bad[0])}{_more(bad)}",
        )


def impossible_values(subject: Subject) -> Iterator[Finding]:
    """NaN, infinities, markers and positive values at trained tokens that have a provenance."""
    for segment, values in _reported(subject):
        trained = subject.sample.loss_mask[segment.start : segment.stop]
        for fault in VALUE_FAULTS:
            bad = np.flatnonzero(trained & fault.test(values))
            if len(bad):
                yield finding(
                    fault.code,
                    where=subject.where(segment.turn, segment.start + bad),
                    expected=fault.expected,
                    found=found_text(values, bad, segment.start),
                )


def mask_without_logprob(subject: Subject) -> Iterator[Finding]:
    """Trained tokens that nobody sampled."""
    bad = np.flatnonzero(subject.sample.loss_mask & (subject.sample.turn < 0))
    if len(bad):
        yield finding(
            "mask-without-logprob",
            where=subject.where(tokens=bad),
            expected="loss_mask True at sampled tokens only",
            found=f"token {int(bad[0])} is trained and was not sampled{_more(bad)}",
        )


def advantage_not_finite(subject: Subject) -> Iterator[Finding]:
    """Advantages that make the loss NaN."""
    sample = subject.sample
    bad = np.flatnonzero(sample.loss_mask & ~np.isfinite(sample.advantages))
    if len(bad):
        yield finding(
            "advantage-not-finite",
            where=subject.where(tokens=bad),
            expected="finite advantages at trained tokens",
            found=found_text(sample.advantages, bad, 0),
        )


def temperature_contradicted(subject: Subject) -> Iterator[Finding]:
    """Sampled tokens whose temperature is not what their provenance says the logits were divided by."""
    for segment, provenance in subject.turns():
        stated = np.float32(provenance.divisor)
        values = subject.sample.temperature[segment.start : segment.stop]
        bad = np.flatnonzero(values != stated)
        if len(bad):
            yield finding(
                "temperature-contradicted",
                where=subject.where(segment.turn, segment.start + bad),
                expected=f"temperature {stated:g}, by the provenance",
                found=found_text(values, bad, segment.start),
            )


def modes_mixed(subject: Subject) -> Iterator[Finding]:
    """Turns that no one batch can take."""
    modes = sorted({provenance.logprobs_mode for _, provenance in subject.turns()})
    if len(modes) > 1:
        yield finding(
            "modes-mixed",
            where=subject.where(),
            expected="turns of one logprobs_mode",
            found=f"{' and '.join(modes)} logprobs",
        )


def greedy_sampled(subject: Subject) -> Iterator[Finding]:
    """Trained tokens of temperature 0; an audit compares them like any others."""
    if subject.purpose == "audit":
        return
    for segment, provenance in _trained(subject):
        if provenance.sampling.greedy:
            yield finding(
                "greedy-sampled",
                where=subject.where(segment.turn, np.arange(segment.start, segment.stop)),
                expected="trained tokens sampled at a temperature above 0",
                found="temperature 0",
            )


def incomparable(subject: Subject) -> Iterator[Finding]:
    """Trained tokens whose values a trainer's cannot be compared with; a warning in an audit."""
    for segment, provenance in _trained(subject):
        if provenance.comparable(subject.purpose) or (
            subject.purpose == "train" and provenance.sampling.greedy
        ):
            continue
        yield finding(
            "incomparable",
            severity="error" if subject.purpose == "train" else "warning",
            where=subject.where(segment.turn, np.arange(segment.start, segment.stop)),
            expected=_EXPECTED[subject.purpose],
            found=f"{provenance.logprobs_mode} logprobs of tokens sampled with {in_force(provenance)}",
        )


def turn_prefix_broken(subject: Subject) -> Iterator[Finding]:
    """A sample that exists because a prompt did not extend what came before it."""
    sample = subject.sample
    if sample.sibling > 0:
        turn = int(sample.turn[sample.turn >= 0][0]) if (sample.turn >= 0).any() else None
        yield finding(
            "turn-prefix-broken",
            where=subject.where(turn),
            expected="one sample a trajectory",
            found=f"sample {sample.sibling + 1} of {sample.num_siblings}; its prompt extends no earlier one",
        )


CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    token_out_of_range,
    impossible_values,
    mask_without_logprob,
    advantage_not_finite,
    temperature_contradicted,
    modes_mixed,
    greedy_sampled,
    incomparable,
    turn_prefix_broken,
)
"""Every check on one sample, in the order in which findings are told."""

_EXPECTED = {
    "train": "logprobs of the distribution sampled from, which logits and a temperature alone determine",
    "audit": "logprobs of the model's softmax at one temperature",
}


def in_force(provenance: Provenance) -> str:
    """What shaped the distribution, in words.

    Example:
        temperature 0.7, top_p 0.8
    """
    sampling = provenance.sampling
    parts = [f"temperature {sampling.temperature:g}"]
    neutral = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    neutral |= {"presence_penalty": 0, "frequency_penalty": 0, "min_tokens": 0}
    parts += [
        f"{name} {getattr(sampling, name):g}"
        for name, off in neutral.items()
        if getattr(sampling, name) != off
    ]
    flags = ("logit_bias", "allowed_token_ids", "bad_words", "structured_output")
    parts += [name for name in flags if getattr(sampling, name)]
    return ", ".join(parts)


def _reported(subject: Subject) -> Iterator[tuple[Segment, NDArray[np.float32]]]:
    """What the engine reported for each turn: behaviour logprobs, or the raw values in their place."""
    sample = subject.sample
    for segment, provenance in subject.turns():
        raw = sample.raw_inference_logprobs
        column = sample.inference_logprobs if provenance.gives_behaviour_logprobs or raw is None else raw
        yield segment, column[segment.start : segment.stop]


def _trained(subject: Subject) -> Iterator[tuple[Segment, Provenance]]:
    """The turns with at least one trained token."""
    for segment, provenance in subject.turns():
        if subject.sample.loss_mask[segment.start : segment.stop].any():
            yield segment, provenance


def _more(bad: NDArray[np.intp]) -> str:
    return f" ({len(bad)} such tokens)" if len(bad) > 1 else ""
