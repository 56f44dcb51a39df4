"""Chunks that come twice in a row: what a retry or a proxy sends again, or a model that loops."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
    array = np.array(marks, np.int64)
    names, width = _numbered(array), 1
    repeat = _of_size(array, 1)
    # A run of at least `width` marks that comes twice has windows of this width that come twice.
    while repeat is None and 4 * width <= len(array) and names.max() < len(names) - 1:
        sizes = _distances(names, width)
        repeat = next(filter(None, (_of_size(array, size) for size in sizes)), None)
        names = _numbered(names[:-width] * len(names) + names[width:])
        width *= 2
    return repeat


def _of_size(array: NDArray[np.int64], size: int) -> Repeat | None:
    """The first run of this size that comes twice in a row."""
    if 2 * size > len(array):
        return None
    differing = np.flatnonzero(array[size:] != array[:-size])
    starts = np.concatenate([[0], differing + 1])
    stops = np.concatenate([differing, [len(array) - size]])
    whole = np.flatnonzero(stops - starts >= size)
    return Repeat(start=int(starts[whole[0]]), size=size) if len(whole) else None


def _numbered(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers from 0 on, the same for values that are alike."""
    numbers: NDArray[np.int64] = np.unique(values, return_inverse=True)[1]
    return numbers


def _distances(names: NDArray[np.int64], width: int) -> list[int]:
    """Sizes from twice to four times the width that a repeat may have, where there is no shorter one.

    Its run holds a window that starts at a multiple of the width, and comes again so many marks later.
    Windows that are alike lie more than a width apart, or there would be a shorter repeat: so three steps go
    far enough.

    Args:
        names: of the window of so many marks at each place, the same for windows that are alike.
        width: marks of a window.
    """
    order = np.argsort(names, kind="stable")
    alike = names[order[1:]] == names[order[:-1]]
    following = np.arange(len(names))
    following[order[:-1][alike]] = order[1:][alike]
    windows = np.arange(0, len(names), width)
    first = following[windows]
    second = following[first]
    distances = np.concatenate([first, second, following[second]]) - np.tile(windows, 3)
    sizes: list[int] = np.unique(distances[(distances >= 2 * width) & (distances < 4 * width)]).tolist()
    return sizes
