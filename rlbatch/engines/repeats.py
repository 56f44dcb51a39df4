"""Chunks that come twice in a row: what a retry or a proxy sends again, or a model that loops."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Repeat:
    """A run of chunks that is followed by its like."""

    start: int
    """Place of its first chunk."""
    size: int
    """Chunks in it."""


def first_repeat(marks: Sequence[int]) -> Repeat | None:
    """The shortest run that comes twice in a row, the first of its length; None where none does.

    Args:
        marks: of each chunk, the same for chunks that are alike.

    Example:
        [7, 8, 7, 8, 9] -> Repeat(start=0, size=2); [7, 8, 9, 7, 8] -> None
    """
    if len(set(marks)) == len(marks):
        return None
    array = np.array(marks, np.int64)
    for size in range(1, len(array) // 2 + 1):
        differing = np.flatnonzero(array[size:] != array[:-size])
        starts = np.concatenate([[0], differing + 1])
        stops = np.concatenate([differing, [len(array) - size]])
        whole = np.flatnonzero(stops - starts >= size)
        if len(whole):
            return Repeat(start=int(starts[whole[0]]), size=size)
    return None
