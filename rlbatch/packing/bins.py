"""Lengths -> batches, by best-fit decreasing under a hard budget of tokens. Integers only.

Each batch takes the largest sample that is left, then again and again the largest that still fits: the
batches of first-fit decreasing, without a search through the batches. Nothing is cut; what fits nowhere is an
error. Knows nothing of ranks.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError
from rlbatch.packing.contract import Unit, check_partition, checked_lengths
from rlbatch.packing.rows import rounded, row_tokens, row_unit
from rlbatch.records.structure import check_choice, check_scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one batch holds, padding included.

    Raises:
        RecordError: a bound that is no integer or below 1, or an unknown layout.
    """

    layout: Literal["padded", "packed"]
    max_tokens: int
    """A packed batch costs the sum of its lengths; a padded one rows times the longest."""
    sequence_multiple: int = 1
    """Each sequence is padded to a multiple of this: 2 * cp for zigzag context parallelism over cp ranks."""
    row_multiple: int = 1
    """Each row of the batch is padded to a multiple of this, and of `sequence_multiple`."""

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, ("padded", "packed"))
        for name in ("max_tokens", "sequence_multiple", "row_multiple"):
            check_scalar(name, getattr(self, name), int)
            if getattr(self, name) < 1:
                raise RecordError(f"{name}: expected at least 1, found {getattr(self, name)}")

    def tokens(self, lengths: Iterable[int]) -> int:
        """Tokens of a batch of these sequences, padding included.

        Example:
            lengths [3, 5] with sequence_multiple 4: packed 4 + 8 = 12, padded 2 * 8 = 16
        """
        sequences = list(lengths)
        row = row_tokens(
            sequences,
            self.layout,
            sequence_multiple=self.sequence_multiple,
            row_multiple=self.row_multiple,
        )
        return row if self.layout == "packed" else len(sequences) * row

    @property
    def row_unit(self) -> int:
        """What every row is a multiple of."""
        return row_unit(self.sequence_multiple, self.row_multiple)

    @property
    def longest_row(self) -> int:
        """The most tokens that one row may have."""
        return self.max_tokens // self.row_unit * self.row_unit


def too_long(lengths: Sequence[int], room: Room) -> list[int]:
    """Indices of the samples that no batch can hold."""
    return np.flatnonzero(np.asarray(lengths, np.int64) > room.longest_row).tolist()


def plan_batches(
    lengths: Sequence[int],
    room: Room,
    *,
    kinds: Sequence[Hashable] | None = None,
    units: Sequence[Unit] | None = None,
) -> list[list[int]]:
    """Batches of sample indices, none above the budget; every sample in exactly one.

    Args:
        lengths: tokens of each sample, >= 1.
        room: the budget.
        kinds: one a sample; samples of different kinds never share a batch.
        units: a partition of the samples; those of one unit share a batch. Without, each is a unit.

    Returns:
        Batches in the order of their first samples, each in ascending order.

    Raises:
        RecordError: a unit is larger than the budget, or of more than one kind; a length below 1; kinds that
            are not one a sample; units that are not a partition.

    Example:
        lengths [3, 4, 2], max_tokens 8: packed [[0, 1], [2]], padded [[0, 1], [2]]
    """
    counts = checked_lengths(lengths)
    check_partition(len(counts), kinds, units)
    sizes = _sizes(counts, room, units)
    _require_fit(sizes, room, units)
    fill = _best_fit if room.layout == "packed" else _like_widths
    batches = [batch for same in _by_kind(len(sizes), kinds, units) for batch in fill(sizes, same, room)]
    if units is None:
        return sorted(sorted(batch) for batch in batches)
    return sorted(sorted(index for unit in batch for index in units[unit]) for batch in batches)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """[U] what each unit takes of a batch."""

    widths: NDArray[np.int64]
    """Packed: its tokens. Padded: its widest row."""
    num_rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.widths)

    def tokens(self, room: Room) -> NDArray[np.int64]:
        return self.widths if room.layout == "packed" else self.widths * self.num_rows


def _sizes(lengths: NDArray[np.int64], room: Room, units: Sequence[Unit] | None) -> _Sizes:
    widths = rounded(lengths, room.sequence_multiple)
    num_rows = np.ones(len(widths), np.int64)
    if units is not None:
        num_rows = np.array([len(unit) for unit in units], np.int64)
        firsts = np.cumsum([0, *num_rows[:-1]])
        flat = widths[np.array([index for unit in units for index in unit], np.int64)]
        reduce = np.add if room.layout == "packed" else np.maximum
        widths = reduce.reduceat(flat, firsts) if len(units) else flat
    if room.layout == "padded":
        widths = rounded(widths, room.row_unit)
    return _Sizes(widths, num_rows)


def _require_fit(sizes: _Sizes, room: Room, units: Sequence[Unit] | None) -> None:
    tokens = sizes.tokens(room)
    excess = np.flatnonzero(tokens > _capacity(room)).tolist()
    if excess:
        unit = [excess[0]] if units is None else units[excess[0]]
        whose = (
            f"sample {unit[0]}" if len(unit) == 1 else f"the {len(unit)} samples kept with sample {unit[0]}"
        )
        raise RecordError(
            f"max_tokens: expected room for every sample, found {room.max_tokens} and {whose} of "
            f"{tokens[excess[0]]} tokens ({len(excess)} such)"
        )


def _capacity(room: Room) -> int:
    """What the units of one batch may add up to."""
    return room.longest_row if room.layout == "packed" else room.max_tokens


def _by_kind(
    num_units: int, kinds: Sequence[Hashable] | None, units: Sequence[Unit] | None
) -> list[NDArray[np.int64]]:
    """The units of each kind."""
    if kinds is None:
        return [np.arange(num_units)] if num_units else []
    found: dict[Hashable, list[int]] = {}
    for at in range(num_units):
        among = {kinds[index] for index in ([at] if units is None else units[at])}
        if len(among) > 1:
            raise RecordError(f"units: expected samples of one kind in each, found {len(among)} in unit {at}")
        found.setdefault(among.pop(), []).append(at)
    return [np.array(same, np.int64) for same in found.values()]


def _best_fit(sizes: _Sizes, units: NDArray[np.int64], room: Room) -> list[list[int]]:
    """Packed: batch by batch, always the largest unit that still fits."""
    widths = sizes.widths[units]
    order = units[np.argsort(widths, kind="stable")].tolist()
    distinct, counts = np.unique(widths, return_counts=True)
    values = distinct.tolist()
    ends = np.cumsum(counts).tolist()
    # The units of each value, the last in front: a list gives from its end.
    runs = [order[start:stop][::-1] for start, stop in pairwise([0, *ends])]
    batches: list[list[int]] = []
    while values:
        batch, left, at = [], _capacity(room), len(values)
        while at := bisect_right(values, left, 0, at):
            run = runs[at - 1]
            batch.append(run.pop())
            left -= values[at - 1]
            if not run:
                at -= 1
                del values[at], runs[at]
        batches.append(batch)
    return batches


def _like_widths(sizes: _Sizes, units: NDArray[np.int64], room: Room) -> list[list[int]]:
    """Padded: by falling width, a batch takes the rows that its first one's width leaves room for."""
    order = units[np.argsort(-sizes.widths[units], kind="stable")]
    batches: list[list[int]] = []
    max_rows = num_rows = 0
    for unit, width, rows in zip(
        order.tolist(), sizes.widths[order].tolist(), sizes.num_rows[order].tolist(), strict=True
    ):
        num_rows += rows
        if num_rows <= max_rows:
            batches[-1].append(unit)
        else:
            batches.append([unit])
            max_rows, num_rows = room.max_tokens // width, rows
    return batches
