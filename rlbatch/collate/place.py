"""Where each sequence lies in the [B, T] grid of a batch, and where padding lies. Knows lengths only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlbatch.batch import LAYOUTS, Layout
from rlbatch.errors import RecordError
from rlbatch.packing import rounded, row_tokens
from rlbatch.records.structure import check_choice, check_scalar

PaddingSide: TypeAlias = Literal["left", "right"]
PADDING_SIDES: tuple[PaddingSide, ...] = ("left", "right")


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How much padding, where, and with which token."""

    token_id: int = 0
    """`input_ids` in padding."""
    side: PaddingSide = "right"
    """Where the padding of a row goes (padded only); a pack is padded on the right."""
    sequence_multiple: int = 1
    """Each sequence is padded to a multiple of this: 2 x context-parallel size, where each rank takes two
    chunks of every sequence."""
    row_multiple: int = 1
    """T is padded to a multiple of this, and of `sequence_multiple`."""

    def __post_init__(self) -> None:
        check_choice("Padding.side", self.side, PADDING_SIDES)
        for name in ("token_id", "sequence_multiple", "row_multiple"):
            check_scalar(f"Padding.{name}", getattr(self, name), int)
        if self.token_id < 0 or self.sequence_multiple < 1 or self.row_multiple < 1:
            raise RecordError(f"Padding: expected token_id >= 0 and multiples >= 1, found {self}")

    def row_tokens(self, lengths: Sequence[int], layout: Layout) -> int:
        """T of a batch of these lengths.

        Example:
            lengths [3, 6], sequence_multiple 4, row_multiple 16: packed 4 + 8 -> 16; padded 8 -> 16
        """
        return row_tokens(
            lengths,
            layout,
            sequence_multiple=self.sequence_multiple,
            row_multiple=self.row_multiple,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where each of S sequences lies."""

    layout: Layout
    shape: tuple[int, int]
    """(B, T)."""
    lengths: list[int]
    """[S] real tokens."""
    rows: list[int]
    starts: list[int]
    """[S] position of token 0 in its row."""
    after: list[int]
    """[S] a pack: padding of the sequence itself. Padded: 0; there the rest of a row is padding."""
    behind: list[int]
    """Pieces of padding behind the last sequence of a pack, none longer than the longest sequence."""
    without_target: NDArray[np.int64] = field(compare=False)
    """Where in a pack the last token of each sequence is, and what comes before its first; else empty."""

    @classmethod
    def of(cls, lengths: list[int], layout: Layout, padding: Padding) -> "Place":
        """Sequences of these lengths, in this order."""
        check_choice("layout", layout, LAYOUTS)
        width = padding.row_tokens(lengths, layout)
        if layout == "packed":
            return cls._packed(lengths, width, padding)
        none = [0] * len(lengths)
        return cls(
            layout=layout,
            shape=(len(lengths), width),
            lengths=lengths,
            rows=list(range(len(lengths))),
            starts=[width - length for length in lengths] if padding.side == "left" else none,
            after=none,
            behind=[],
            without_target=np.empty(0, np.int64),
        )

    @classmethod
    def _packed(cls, lengths: list[int], width: int, padding: Padding) -> "Place":
        none = [0] * len(lengths)
        padded = [rounded(length, padding.sequence_multiple) for length in lengths]
        ends = list(accumulate(padded))
        starts = [0, *ends[:-1]]
        last = [at + length - 1 for at, length in zip(starts, lengths, strict=True)]
        return cls(
            layout="packed",
            shape=(1, width),
            lengths=lengths,
            rows=none,
            starts=starts,
            after=[whole - length for whole, length in zip(padded, lengths, strict=True)],
            behind=list(_split(width - ends[-1], max(padded))),
            without_target=np.array([at - 1 for at in starts[1:]] + last),
        )

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(row, start, stop) of each sequence, without its padding."""
        for row, start, length in zip(self.rows, self.starts, self.lengths, strict=True):
            yield row, start, start + length

    def pieces(
        self, values: Sequence[NDArray[Any]], filler: NDArray[Any], *, missing: int = 0
    ) -> list[NDArray[Any]]:
        """A column of a pack, in pieces that only wait to be concatenated.

        Args:
            values: [S] arrays, each as long as its sequence, less `missing`.
            filler: what a piece of padding of length n is the first n of.
            missing: entries that each value lacks in the end; they are filled like padding.
        """
        pieces: list[NDArray[Any]] = []
        if missing or any(self.after):
            for value, after in zip(values, self.after, strict=True):
                pieces += [value, filler[: after + missing]]
        else:
            pieces += values
        pieces += [filler[:length] for length in self.behind]
        return pieces

    @property
    def longest_gap(self) -> int:
        """Of the pieces of padding in a pack; 0 where every position is a token's."""
        return max(*self.after, *self.behind, 0)

    @property
    def longest_sequence(self) -> int:
        """Longest sequence of a pack with its own padding; no piece of padding behind them is longer."""
        return max(length + after for length, after in zip(self.lengths, self.after, strict=True))

    def boundaries(self) -> list[int]:
        """`cu_seqlens` of a pack: sequences with their padding, then the pieces of padding behind them."""
        row_end = self.shape[1]
        return [*self.starts, *accumulate(self.behind, initial=row_end - sum(self.behind))]


def _split(length: int, longest: int) -> Iterator[int]:
    while length > 0:
        yield min(length, longest)
        length -= longest
