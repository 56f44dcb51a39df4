"""Checks on what the logprobs are of: temperatures, modes, and whether a trainer can compute the like."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch.records import Provenance
from rlbatch.soundness.subject import Subject
from rlbatch.soundness.values import found_text

_EXPECTED = {
    "train": "logprobs of the distribution sampled from, which logits and a temperature alone determine",
    "train-truncated": "logprobs of the distribution sampled from, which logits, a temperature and kept sets "
    "by vLLM's rule determine",
    "audit": "logprobs of the model's softmax at one temperature, or over kept sets by vLLM's rule",
}


def temperature_contradicted(subject: Subject) -> Iterator[Finding]:
    """Sampled tokens whose temperature is not what their provenance says the logits were divided by."""
    stated = subject.per_run(lambda provenance: provenance.divisor, "float32")
    found = subject.temperature
    # The usual case: one temperature throughout, and 1 where nobody sampled.
    if len(stated) and (stated == found.min()).all() and (stated == found.max()).all():
        return
    bad = np.flatnonzero((found != _of_tokens(subject, stated)) & subject.sampled)
    for run, tokens in subject.by_run(bad):
        values = subject.temperature[subject.tokens_of(run)]
        yield finding(
            "temperature-contradicted",
            where=subject.where_run(run, tokens),
            expected=f"temperature {stated[run]:g}, by the provenance",
            found=found_text(values, tokens, subject.first_token(run)),
        )


def _of_tokens(subject: Subject, stated: NDArray[np.float32]) -> NDArray[np.float32] | np.float32:
    """[G] values of runs at their tokens [N], or the one value where all are equal."""
    if len(stated) and (stated == stated[0]).all():
        return np.float32(stated[0])
    return subject.runs.spread(stated, len(subject.sampled), 1.0)


def modes_mixed(subject: Subject) -> Iterator[Finding]:
    """Turns that no one batch can take."""
    names = np.array([provenance.logprobs_mode for provenance in subject.provenances])
    if len(set(names.tolist())) < 2:
        return
    runs = subject.runs
    for sample in np.unique(runs.sample).tolist():
        modes = sorted(set(names[runs.provenance[runs.sample == sample]].tolist()))
        if len(modes) > 1:
            yield finding(
                "modes-mixed",
                where=subject.where(sample),
                expected="turns of one logprobs_mode",
                found=f"{' and '.join(modes)} logprobs",
            )


def greedy_sampled(subject: Subject) -> Iterator[Finding]:
    """Trained tokens of temperature 0; an audit compares them like any others."""
    if subject.expected.purpose == "audit":
        return
    greedy = subject.per_run(lambda provenance: provenance.sampling.greedy, "bool")
    for run in subject.trained_runs(greedy):
        yield finding(
            "greedy-sampled",
            where=subject.where_run(run),
            expected="trained tokens sampled at a temperature above 0",
            found="temperature 0",
        )


def incomparable(subject: Subject) -> Iterator[Finding]:
    """Trained tokens whose values a trainer's cannot be compared with; a warning in an audit."""
    purpose = subject.expected.purpose

    def refused(provenance: Provenance) -> bool:
        told_as_greedy = purpose != "audit" and provenance.sampling.greedy
        return not provenance.comparable(purpose) and not told_as_greedy

    bad = subject.per_run(refused, "bool")
    for run in subject.trained_runs(bad):
        provenance = subject.provenance_of(run)
        yield finding(
            "incomparable",
            severity="warning" if purpose == "audit" else "error",
            where=subject.where_run(run),
            expected=_EXPECTED[purpose],
            found=f"{provenance.logprobs_mode} logprobs of tokens sampled with {in_force(provenance)}",
        )


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
