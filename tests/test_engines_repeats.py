"""`first_repeat` against a search that tries every place and length."""

import random

import numpy as np
import pytest

from rlbatch.engines.repeats import Repeat, first_repeat


def by_trying(marks: list[int]) -> Repeat | None:
    for size in range(1, len(marks) // 2 + 1):
        for start in range(len(marks) - 2 * size + 1):
            if marks[start : start + size] == marks[start + size : start + 2 * size]:
                return Repeat(start=start, size=size)
    return None


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ([], None),
        ([7], None),
        ([7, 7], Repeat(start=0, size=1)),
        ([7, 8, 7], None),
        ([7, 8, 7, 8], Repeat(start=0, size=2)),
        ([7, 8, 9, 7, 8], None),
        ([1, 2, 3, 4, 3, 4, 5], Repeat(start=2, size=2)),
        # Each mark comes again two places later within the run, which is no run of two.
        ([1, 2, 1, 3, 1, 2, 1, 3], Repeat(start=0, size=4)),
        ([-(2**63), 2**63 - 1, -(2**63), 2**63 - 1], Repeat(start=0, size=2)),
    ],
)
def test_runs_that_come_twice_are_found(marks, expected):
    assert first_repeat(marks) == by_trying(marks) == expected


def test_every_small_sequence_is_judged_as_by_trying():
    rng = random.Random(0)
    for _ in range(2_000):
        marks = [rng.randrange(4) for _ in range(rng.randrange(14))]
        assert first_repeat(marks) == by_trying(marks)


@pytest.mark.parametrize("other", ["new", "one"])
def test_long_streams_with_few_equal_chunks_are_passed_over_a_few_times(other, monkeypatch):
    passes = []
    flatnonzero = np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda values: passes.append(1) or flatnonzero(values))
    marks = list(range(4_000))
    if other == "one":
        # Every second chunk is the same one.
        marks[::2] = [-1] * 2_000
    marks[1_700] = marks[301]
    assert first_repeat(marks) is None
    # Sizes there are 2,000 of.
    assert len(passes) < 5


def test_a_long_run_that_comes_twice_is_found_in_a_long_stream():
    marks = list(range(4_000))
    marks[1_700:2_400] = marks[1_000:1_700]
    # A longer one and a later one of the same length do not count.
    marks[2_600:3_300] = marks[1_000:1_700]
    marks[3_300:4_000] = marks[1_000:1_700]
    assert first_repeat(marks) == Repeat(start=1_000, size=700)
