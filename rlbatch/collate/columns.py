"""The columns of a batch: which there are, and their values written into the batch's memory.

Each column is written in one pass, one `np.concatenate` into its place, whatever the layout. A column with
`align = target` is written one position early: what would be a sequence's first value then lies where its
predecessor, or the padding before it, has no target, and is written over.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlbatch.batch import NO_EXPERT, NO_TARGET
from rlbatch.batch.buffer import Slot
from rlbatch.collate.place import Place
from rlbatch.errors import RecordError
from rlbatch.records import TOKEN_FIELDS, Align, Sample

FILLER_BYTES = 1 << 17
"""Padding is copied from this much of it at a time, which stays in a core's cache."""

TARGET_FIELDS = tuple(spec for spec in TOKEN_FIELDS if spec.align == "target" and spec.name != "turn")
"""Shifted as they are; `turn` becomes the segments instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One tensor of the batch with one entry a position."""

    name: str
    dtype: np.dtype[Any]
    values: Sequence[NDArray[Any]]
    """[S] one a sample."""
    padding: float
    """In padding, and where there is no target."""
    align: Align
    entry: tuple[int, ...] = ()
    """Shape of one entry."""
    missing: int = 0
    """How many entries fewer than tokens each sample has, in the end."""

    def slot(self, place: Place) -> Slot:
        """What it needs of the buffer."""
        return Slot(dtype=_TORCH[self.dtype], shape=(*place.shape, *self.entry))

    def write(self, out: NDArray[Any], place: Place, without_target: NDArray[np.int64]) -> None:
        """Fill all of [B, T, ...]: nothing of what `out` held stays.

        Args:
            out: the tensor's memory.
            place: where the sequences lie.
            without_target: `place.without_target()`, which all columns share.
        """
        flat = out.reshape(place.num_positions, *self.entry)
        filler = self._filler(place)
        pieces = place.pieces(self.values, filler, missing=self.missing)
        if self.align == "input":
            np.concatenate(pieces, out=flat)
            return
        np.concatenate([pieces[0][1:], *pieces[1:], filler[:1]], out=flat)
        flat[without_target] = self.padding

    def _filler(self, place: Place) -> NDArray[Any]:
        """Contiguous, which numpy copies faster than one value; no longer than what is used of it."""
        most = FILLER_BYTES // (self.dtype.itemsize * math.prod(self.entry))
        length = max(1, min(most, place.longest_gap + self.missing))
        return np.full((length, *self.entry), self.padding, self.dtype)


_TORCH = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def columns_of(samples: Sequence[Sample], place: Place, pad_token_id: int) -> list[Column]:
    """Every column of the batch, in the order of the buffer."""
    ids = [sample.token_ids for sample in samples]
    columns = [
        Column(name="input_ids", dtype=_INT64, values=ids, padding=pad_token_id, align="input"),
        Column(name="target_ids", dtype=_INT64, values=ids, padding=NO_TARGET, align="target"),
    ]
    for spec in TARGET_FIELDS:
        values = [getattr(sample, spec.name) for sample in samples]
        if spec.optional:
            if all(value is None for value in values):
                continue
            values = _completed(values, [len(sample) for sample in samples], spec.padding, spec.dtype)
        columns.append(
            Column(name=spec.name, dtype=spec.dtype, values=values, padding=spec.padding, align=spec.align)
        )
    columns += _routed_experts(samples)
    return columns


def _completed(
    values: Sequence[NDArray[Any] | None],
    lengths: Sequence[int],
    padding: float,
    dtype: np.dtype[Any],
    entry: tuple[int, ...] = (),
) -> list[NDArray[Any]]:
    """[S] the values, with what stands for those of samples without."""
    return [
        np.full((length, *entry), padding, dtype) if value is None else value
        for value, length in zip(values, lengths, strict=True)
    ]


_INT64 = np.dtype(np.int64)
_EXPERTS = np.dtype(np.int32)


def _routed_experts(samples: Sequence[Sample]) -> list[Column]:
    """[B, T, L, K]: `align = input`, so row t of a sample stays at token t."""
    values = [sample.routed_experts for sample in samples]
    shapes = {value.shape[1:] for value in values if value is not None}
    if len(shapes) > 1:
        found = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise RecordError(f"collate: expected one [layers, experts a token] in a batch, found {found}")
    lengths = [len(sample) - 1 for sample in samples]
    return [
        Column(
            name="routed_experts",
            dtype=_EXPERTS,
            values=_completed(values, lengths, NO_EXPERT, _EXPERTS, shape),
            padding=NO_EXPERT,
            align="input",
            entry=shape,
            missing=1,
        )
        for shape in shapes
    ]


def write_position_ids(out: NDArray[np.int64], place: Place) -> None:
    """Counted from 0 in every sequence, and in every piece of padding."""
    ramp = np.arange(place.longest_piece)
    pieces = place.pieces([ramp[:length] for length in place.lengths], ramp)
    np.concatenate(pieces, out=out.reshape(-1))


def write_attention_mask(out: NDArray[np.bool_], place: Place) -> None:
    """True at tokens."""
    ones = np.ones(max(place.lengths), np.bool_)
    pieces = place.pieces([ones[:length] for length in place.lengths], np.zeros(FILLER_BYTES, np.bool_))
    np.concatenate(pieces, out=out.reshape(-1))
