"""Checks on recorded routed experts: [T-1, L, K] of a sample, as a top-K choice in every layer must be."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where
from rlbatch.records import Sample
from rlbatch.soundness.subject import Members

MIN_REPEATED = 8
"""Rows: where so many come again for other ids, they are not of those ids."""

REPEATED_SHARE = 0.9
"""Of the rows of a repetition: an engine that passes tokens through again differs in a few, at near ties."""


def routing_wrong(members: Members) -> Iterator[Finding]:
    """Experts of another shape, rows that nobody recorded, and rows that stand twice."""
    for index, sample in enumerate(members.samples):
        if sample.routed_experts is None or not len(sample.routed_experts):
            continue
        shape, stated = sample.routed_experts.shape[1:], _shape_stated(sample)
        if stated is not None and stated != shape:
            yield _misshapen(members.where(index), f"{list(stated)}, by the provenance", f"{list(shape)}")
        else:
            yield from _rows_wrong(members, index, sample.routed_experts)


def routing_shapes_differ(members: Members) -> Iterator[Finding]:
    """Samples with other numbers of layers or experts a token than the first that has any."""
    first: tuple[int, ...] | None = None
    for index, sample in enumerate(members.samples):
        if sample.routed_experts is None:
            continue
        shape = sample.routed_experts.shape[1:]
        first = first or shape
        if shape != first:
            expected = f"{list(first)}, as in the samples before"
            yield _misshapen(members.where(index), expected, f"{list(shape)}")


def _rows_wrong(members: Members, index: int, experts: NDArray[np.integer]) -> Iterator[Finding]:
    # A layer that is dense keeps its place, filled with zeros throughout.
    chosen = experts[:, experts.any(axis=(0, 2))] if experts.any() else experts
    total = len(experts)
    # With one expert a token, expert 0 everywhere is a choice like any other.
    if chosen.shape[2] > 1:
        blank = ~chosen.any(axis=(1, 2))
        ordered = np.sort(chosen, axis=2)
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2)) & ~blank
        if blank.any():
            at = np.flatnonzero(blank)
            yield finding(
                "routing-missing",
                where=members.where(index, at),
                expected="experts of every token that was passed through",
                found=f"nothing but zeros at {len(at)} of {total} tokens, first at token {at[0]}",
            )
        if twice.any():
            at = np.flatnonzero(twice)
            found = f"one expert twice at {len(at)} of {total} tokens, first at token {at[0]}"
            yield _misshapen(members.where(index, at), "with distinct experts in each layer", found)
        if blank.any() or twice.any():
            return
    repeated = _repeated_from(chosen, members.samples[index].token_ids[:-1])
    if repeated is not None:
        yield finding(
            "routing-repeated",
            where=members.where(index, np.array([repeated, total - 1])),
            expected="experts of each token once",
            found=f"the rows from token {repeated} on are those of the sample's start again",
        )


def _repeated_from(chosen: NDArray[np.integer], token_ids: NDArray[np.int32]) -> int | None:
    """Where the first rows come again, for other tokens; None where they do not."""
    rows = chosen.reshape(len(chosen), -1)
    for start in (np.flatnonzero((rows[1:] == rows[0]).all(axis=1)) + 1).tolist():
        length = min(start, len(rows) - start)
        if length < MIN_REPEATED:
            continue
        # Text that comes again may well be routed alike.
        if np.mean(token_ids[start : start + length] == token_ids[:length]) > 1 / 2:
            continue
        same = (rows[start : start + length] == rows[:length]).all(axis=1)
        if np.mean(same) >= REPEATED_SHARE:
            return start
    return None


def _shape_stated(sample: Sample) -> tuple[int, int] | None:
    return next((each.routing_shape for each in sample.provenances if each.routing_shape is not None), None)


def _misshapen(where: Where, expected: str, found: str) -> Finding:
    return finding(
        "routing-shape", where=where, expected=f"[layers, experts a token] {expected}", found=found
    )
