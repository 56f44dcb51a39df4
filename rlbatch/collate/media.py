"""Media of many samples, joined by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlbatch.batch import Layout
from rlbatch.batch.buffer import Slot
from rlbatch.errors import RecordError
from rlbatch.records import MEDIA_DTYPES, Sample

_TORCH = {dtype: getattr(torch, dtype.name) for dtype in MEDIA_DTYPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaColumn:
    """What all samples have under one name."""

    name: str
    parts: Sequence[NDArray[Any]]
    """Of the samples that have any, in order."""
    num_rows: tuple[int, ...]
    """[S], 0 where a sample has none."""

    def slot(self) -> Slot:
        """What it needs of the buffer."""
        first = self.parts[0]
        return Slot(dtype=_TORCH[first.dtype], shape=(sum(self.num_rows), *first.shape[1:]))

    def write(self, out: NDArray[Any]) -> None:
        """Fill all of it."""
        np.concatenate(self.parts, out=out)


def media_of(samples: Sequence[Sample], layout: Layout) -> list[MediaColumn]:
    """The media of a batch, by name, in the order in which they first come.

    Raises:
        RecordError: a packed batch, since a packed row does not say which picture is whose; arrays of one
            name with several dtypes, or several shapes behind the first axis.
    """
    with_media = [sample.sample_id for sample in samples if sample.media]
    if with_media and layout == "packed":
        raise RecordError(
            f"collate: expected no media in a packed batch, found some in sample {with_media[0]!r} "
            f"({len(with_media)} such samples). Collate them with layout='padded'"
        )
    names = dict.fromkeys(part.name for sample in samples for part in sample.media)
    return [_column(samples, name) for name in names]


def _column(samples: Sequence[Sample], name: str) -> MediaColumn:
    found = [{part.name: part.values for part in sample.media}.get(name) for sample in samples]
    parts = [values for values in found if values is not None]
    kinds = sorted({f"{values.dtype} [N, {', '.join(map(str, values.shape[1:]))}]" for values in parts})
    if len(kinds) > 1:
        raise RecordError(f"collate: expected {name} of one dtype and shape, found {' and '.join(kinds)}")
    num_rows = tuple(0 if values is None else len(values) for values in found)
    return MediaColumn(name=name, parts=parts, num_rows=num_rows)
