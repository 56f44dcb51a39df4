"""Checks on ids, masks and values of single tokens."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch.soundness.subject import Subject
from rlbatch.soundness.values import POSITIVE_TOLERANCE, SENTINEL_AT, VALUE_FAULTS, found_text

_NO_LIMIT = np.iinfo(np.int64).max


def token_out_of_range(subject: Subject) -> Iterator[Finding]:
    """Ids, of prompt and completion alike, beyond the vocabulary of the model or of the provenance."""
    rows = subject.expected.vocab_size or _NO_LIMIT
    sizes = np.full(len(subject.samples), rows, np.int64)
    stated = subject.per_run(lambda provenance: provenance.vocab_size or _NO_LIMIT, "int64")
    np.minimum.at(sizes, subject.runs.sample, stated)
    if int(subject.token_ids.max()) < int(sizes.min()):
        return
    bad = subject.token_ids >= np.repeat(sizes, np.diff(subject.offsets))
    for sample, tokens in subject.by_sample(np.flatnonzero(bad)):
        first = int(subject.samples[sample].token_ids[tokens[0]])
        yield finding(
            "token-out-of-range",
            where=subject.where(sample, tokens),
            expected=f"ids below the vocabulary size {sizes[sample]}",
            found=f"id {first} at token {tokens[0]}{_more(tokens)}",
        )


def impossible_values(subject: Subject) -> Iterator[Finding]:
    """NaN, infinities, markers and positive values at trained tokens that have a provenance."""
    values = subject.reported
    # Written so that NaN is suspect too: one look at all values, a second at the suspects only.
    possible = (values <= POSITIVE_TOLERANCE) & (values > SENTINEL_AT)
    suspect = subject.loss_mask & (subject.turn >= 0) & ~possible
    for run, tokens in subject.by_run(np.flatnonzero(suspect)):
        reported = values[subject.tokens_of(run)]
        for fault in VALUE_FAULTS:
            bad = tokens[fault.test(reported[tokens])]
            if len(bad):
                yield finding(
                    fault.code,
                    where=subject.where_run(run, bad),
                    expected=fault.expected,
                    found=found_text(reported, bad, subject.first_token(run)),
                )


def mask_without_logprob(subject: Subject) -> Iterator[Finding]:
    """Trained tokens that nobody sampled."""
    for sample, tokens in subject.by_sample(np.flatnonzero(subject.loss_mask & (subject.turn < 0))):
        yield finding(
            "mask-without-logprob",
            where=subject.where(sample, tokens),
            expected="loss_mask True at sampled tokens only",
            found=f"token {tokens[0]} is trained and was not sampled{_more(tokens)}",
        )


def advantage_not_finite(subject: Subject) -> Iterator[Finding]:
    """Advantages that make the loss NaN."""
    bad = subject.loss_mask & ~np.isfinite(subject.advantages)
    for sample, tokens in subject.by_sample(np.flatnonzero(bad)):
        yield finding(
            "advantage-not-finite",
            where=subject.where(sample, tokens),
            expected="finite advantages at trained tokens",
            found=found_text(subject.samples[sample].advantages, tokens, 0),
        )


def _more(bad: NDArray[np.intp]) -> str:
    return f" ({len(bad)} such tokens)" if len(bad) > 1 else ""
