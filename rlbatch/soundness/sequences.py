"""`Sequences`: where the sequences of a batch lie in its flat positions, and what of them is padding."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbatch.records import LayoutArrays


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """The batch as S sequences in flat positions, of which `start:stop` are no padding."""

    arrays: LayoutArrays
    start: NDArray[np.intp]
    """[S]"""
    stop: NDArray[np.intp]
    """[S]"""
    room: NDArray[np.intp]
    """[S] positions that each sequence takes up, padding included."""
    multiple: int
    """What the room of a sequence must be a multiple of, by the parallel sizes."""

    @property
    def trained(self) -> NDArray[np.bool_]:
        """[B * T]"""
        return self.arrays.loss_mask.reshape(-1)

    def counts(self) -> NDArray[np.intp]:
        """[S] trained positions of each sequence."""
        before = np.concatenate([[0], np.cumsum(self.trained, dtype=np.intp)])
        counts: NDArray[np.intp] = before[self.stop] - before[self.start]
        return counts


def sequences_of(arrays: LayoutArrays, multiple: int) -> Sequences:
    """The sequences of a batch whose boundaries are sound."""
    rows, width = arrays.input_ids.shape
    if arrays.cu_seqlens is not None:
        bounds = arrays.cu_seqlens.astype(np.intp)
    else:
        bounds = np.arange(rows + 1) * width
    start, stop = bounds[:-1], bounds[1:]
    if arrays.attention_mask is not None:
        start, stop = _without_padding(arrays.attention_mask.reshape(-1), start, stop)
    return Sequences(arrays=arrays, start=start, stop=stop, room=np.diff(bounds), multiple=multiple)


def _without_padding(
    attends: NDArray[np.bool_], start: NDArray[np.intp], stop: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """First and last position of each sequence that attention sees; a row of padding only stays whole."""
    firsts, stops = start.copy(), stop.copy()
    for at, (first, last) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
        seen = np.flatnonzero(attends[first:last])
        if len(seen):
            firsts[at], stops[at] = first + seen[0], first + seen[-1] + 1
    return firsts, stops
