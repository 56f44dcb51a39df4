"""The columns of a batch: which there are, and their values written into the batch's memory.

In a pack a column is one `np.concatenate` into its place; one with `align = target` is written one position
early, and what would be a sequence's first value then lies where its predecessor, or the padding before it,
has no target, and is written over. Padded rows are filled first, since most of them is padding, and numpy
fills twice as fast as it copies.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlbatch.batch import NO_EXPERT, NO_TARGET
from rlbatch.batch.buffer import Slot
from rlbatch.collate.place import Place
from rlbatch.errors import RecordError
from rlbatch.records import TOKEN_FIELDS, Align, Sample

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

    def write(self, out: NDArray[Any], place: Place) -> None:
        """Fill all of [B, T, ...]: nothing of what `out` held stays."""
        if place.layout == "packed":
            self._write_pack(out[0], place)
            return
        out[...] = self.padding
        shift = 1 if self.align == "target" else 0
        for (row, start, _), value in zip(place.spans(), self.values, strict=True):
            out[row, start : start + len(value) - shift] = value[shift:]

    def _write_pack(self, out: NDArray[Any], place: Place) -> None:
        filler = np.full((max(1, place.longest_gap + self.missing), *self.entry), self.padding, self.dtype)
        pieces = place.pieces(self.values, filler, missing=self.missing)
        if self.align == "input":
            np.concatenate(pieces, out=out)
            return
        np.concatenate([pieces[0][1:], *pieces[1:], filler[:1]], out=out)
        out[place.without_target] = self.padding


_TORCH = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


def columns_of(samples: Sequence[Sample], pad_token_id: int) -> list[Column]:
    """Every column of the batch, in the order of the buffer."""
    ids, *fields = zip(*map(_arrays_of, samples), strict=True)
    columns = [
        Column(name="input_ids", dtype=_INT64, values=ids, padding=pad_token_id, align="input"),
        Column(name="target_ids", dtype=_INT64, values=ids, padding=NO_TARGET, align="target"),
    ]
    for spec, given in zip(TARGET_FIELDS, fields, strict=True):
        if spec.optional and all(value is None for value in given):
            continue
        values = _completed(given, map(len, samples), spec.padding, spec.dtype) if spec.optional else given
        columns.append(
            Column(name=spec.name, dtype=spec.dtype, values=values, padding=spec.padding, align=spec.align)
        )
    columns += _routed_experts(samples)
    return columns


_INT64 = np.dtype(np.int64)
_EXPERTS = np.dtype(np.int32)
_arrays_of = attrgetter("token_ids", *(spec.name for spec in TARGET_FIELDS))


def _completed(
    values: Sequence[NDArray[Any] | None],
    lengths: Iterable[int],
    padding: float,
    dtype: np.dtype[Any],
    entry: tuple[int, ...] = (),
) -> list[NDArray[Any]]:
    """[S] the values, with what stands for those of samples without."""
    return [
        np.full((length, *entry), padding, dtype) if value is None else value
        for value, length in zip(values, lengths, strict=True)
    ]


def _routed_experts(samples: Sequence[Sample]) -> list[Column]:
    """[B, T, L, K]: `align = input`, so row t of a sample stays at token t."""
    values = [sample.routed_experts for sample in samples]
    shapes = {value.shape[1:] for value in values if value is not None}
    if len(shapes) > 1:
        found = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise RecordError(f"collate: expected one [layers, experts a token] in a batch, found {found}")
    return [
        Column(
            name="routed_experts",
            dtype=_EXPERTS,
            values=_completed(values, (len(sample) - 1 for sample in samples), NO_EXPERT, _EXPERTS, shape),
            padding=NO_EXPERT,
            align="input",
            entry=shape,
            missing=1,
        )
        for shape in shapes
    ]


def write_position_ids(out: NDArray[np.int64], place: Place) -> None:
    """Counted from 0 in every sequence, and in every piece of padding."""
    if place.layout == "packed":
        ramp = np.arange(max(place.longest_gap, *place.lengths))
        np.concatenate(place.pieces([ramp[:length] for length in place.lengths], ramp), out=out[0])
        return
    width = place.shape[1]
    ramp = np.arange(width)
    for row, start, stop in place.spans():
        np.concatenate([ramp[:start], ramp[: stop - start], ramp[: width - stop]], out=out[row])


def write_attention_mask(out: NDArray[np.bool_], place: Place) -> None:
    """True at tokens of padded rows."""
    out[...] = False
    for row, start, stop in place.spans():
        out[row, start:stop] = True
