"""Checks on ids, masks and values of single tokens."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch.soundness.subject import Subject
from rlbatch.soundness.values import (
    OTHER_LOGPROBS,
    POSITIVE_TOLERANCE,
    SENTINEL_AT,
    VALUE_FAULTS,
    found_text,
    positive_code,
)

_NO_LIMIT = np.iinfo(np.int64).max

MIN_GRID_VALUES = 16
"""Distinct values other than 0: one float32 lies on the bf16 grid by a chance of 2^-16, so many do not."""


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
            found=f"id {first} at token {tokens[0]}{_more(tokens)}{_beyond(first, subject)}",
        )


def _beyond(token_id: int, subject: Subject) -> str:
    """Which limit an id is beyond, where the model's is known besides the tokenizer's."""
    rows = subject.expected.vocab_size
    if rows is None:
        return ""
    if token_id < rows:
        return f": a slot of the model's {rows} rows that no token of the tokenizer has"
    return f": beyond the model's {rows} rows, so that it has no embedding"


def impossible_values(subject: Subject) -> Iterator[Finding]:
    """NaN, infinities, markers and positive values at trained tokens that have a provenance."""
    values = subject.reported
    # Written so that NaN is suspect too: one look at all values, a second at the suspects only.
    possible = (values <= POSITIVE_TOLERANCE) & (values > SENTINEL_AT)
    suspect = (subject.loss_mask & subject.sampled) > possible
    for run, tokens in subject.by_run(np.flatnonzero(suspect)):
        reported = values[subject.tokens_of(run)]
        for fault in VALUE_FAULTS:
            bad = tokens[fault.test(reported[tokens])]
            if len(bad):
                positive = fault.code == "logprob-positive"
                yield finding(
                    positive_code(reported[np.isfinite(reported)]) if positive else fault.code,
                    where=subject.where_run(run, bad),
                    expected=fault.expected,
                    found=found_text(reported, bad, subject.first_token(run)),
                )


def impossible_other_logprobs(subject: Subject) -> Iterator[Finding]:
    """Values that are not finite, or positive, at trained tokens in the optional fields of logprobs."""
    for name in OTHER_LOGPROBS:
        parts = [getattr(sample, name) for sample in subject.samples]
        if all(part is None for part in parts):
            continue
        # 0 is possible: a sample without the field has no fault in it.
        values = np.concatenate(
            [
                np.zeros(len(sample), np.float32) if part is None else part
                for sample, part in zip(subject.samples, parts, strict=True)
            ]
        )
        possible = (values <= POSITIVE_TOLERANCE) & (values > -np.inf)
        suspect = (subject.loss_mask & subject.sampled) > possible
        for index, tokens in subject.by_sample(np.flatnonzero(suspect)):
            yield from _impossible_of(name, index, tokens, subject)


def _impossible_of(name: str, index: int, tokens: NDArray[np.intp], subject: Subject) -> Iterator[Finding]:
    sample = subject.samples[index]
    values = getattr(sample, name)
    if name == "raw_inference_logprobs":
        # Turns may lack them, and where they stand in for behaviour logprobs they are looked at as such.
        own = [turn for turn, each in enumerate(sample.provenances) if each.gives_behaviour_logprobs]
        tokens = tokens[np.isin(sample.turn[tokens], own) & ~np.isnan(values[tokens])]
    is_finite = np.isfinite(values[tokens])
    for code, bad, expected in (
        ("logprob-not-finite", tokens[~is_finite], f"finite {name} at trained tokens"),
        ("logprob-positive", tokens[is_finite], f"{name} of at most 0"),
    ):
        if len(bad):
            yield finding(
                code,
                where=subject.where(index, bad),
                expected=expected,
                found=found_text(values, bad, 0),
                likely=f"{name} come from a faulty forward pass, hold no logprobs, or are of other tokens",
                fix=f"compute {name} again; rlbatch.scoring.trainer_logprobs gives what belongs there",
            )


def low_precision_logprobs(subject: Subject) -> Iterator[Finding]:
    """Turns whose logprobs all lie on the grid of bf16 or fp16 numbers, which float32 values do not."""
    runs = subject.runs
    long = np.flatnonzero(runs.stop - runs.start >= MIN_GRID_VALUES)
    if not len(long):
        return
    first = subject.reported[runs.start[long, None] + np.arange(MIN_GRID_VALUES)]
    for run in long[_may_be_half(first).all(axis=1)].tolist():
        values = subject.reported[subject.tokens_of(run)]
        informative = np.isfinite(values) & (values != 0)
        num_distinct = len(np.unique(values[informative]))
        if num_distinct < MIN_GRID_VALUES:
            continue
        for kind, test in (("a bf16", _is_bf16), ("an fp16", _is_fp16)):
            if not test(values).all():
                continue
            yield finding(
                "low-precision-logprobs",
                where=subject.where_run(run),
                expected="float32 logprobs",
                found=f"{num_distinct} distinct values, each {kind} number",
            )
            break


def _may_be_half(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    # Of the 23 bits behind a float32's point a bf16 has 7 and an fp16 at most 10.
    ends_in_zeros: NDArray[np.bool_] = (values.view(np.uint32) & np.uint32(0x1FFF)) == 0
    return ends_in_zeros


def _is_bf16(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    # The upper half of a float32 is a bf16.
    on_grid: NDArray[np.bool_] = (values.view(np.uint32) & np.uint32(0xFFFF)) == 0
    return on_grid


def _is_fp16(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16).astype(np.float32)
    on_grid: NDArray[np.bool_] = (narrow == values) | np.isnan(values)
    return on_grid


def mask_without_logprob(subject: Subject) -> Iterator[Finding]:
    """Trained tokens that nobody sampled."""
    # Of booleans, greater is "the one and not the other" in one pass.
    for sample, tokens in subject.by_sample(np.flatnonzero(subject.loss_mask > subject.sampled)):
        yield finding(
            "mask-without-logprob",
            where=subject.where(sample, tokens),
            expected="loss_mask True at sampled tokens only",
            found=f"token {tokens[0]} is trained and was not sampled{_more(tokens)}",
        )


def advantage_not_finite(subject: Subject) -> Iterator[Finding]:
    """Advantages that make the loss NaN. An audit trains nothing, and takes those that nobody has said."""
    # Each is NaN where any value is: two quick looks, and a third at a fault only.
    least, most = subject.advantages.min(), subject.advantages.max()
    if np.isfinite(least) and np.isfinite(most):
        return
    values = subject.advantages
    impossible = np.isinf(values) if subject.expected.purpose == "audit" else ~np.isfinite(values)
    bad = impossible & subject.loss_mask
    for sample, tokens in subject.by_sample(np.flatnonzero(bad)):
        yield finding(
            "advantage-not-finite",
            where=subject.where(sample, tokens),
            expected="finite advantages at trained tokens",
            found=found_text(subject.samples[sample].advantages, tokens, 0),
        )


def _more(bad: NDArray[np.intp]) -> str:
    return f" ({len(bad)} such tokens)" if len(bad) > 1 else ""
