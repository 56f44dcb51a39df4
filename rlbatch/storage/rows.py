"""The fields of samples, read out of a shard's columns for many samples at once.

A column costs little more for a thousand samples than for one. Knows what a shard holds; neither the file nor
whether its checksums are right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlbatch.records import TOKEN_FIELDS, FinishReason, MediaArray, Provenance
from rlbatch.storage.columns import EXPERT_COLUMNS, EXPERT_DTYPES_BY_SIZE, EXPERTS, TEXT_ENCODING
from rlbatch.storage.media import MEDIA, MEDIA_KINDS, decode_media

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """N samples as a shard holds them."""

    arrays: Mapping[str, NDArray[Any]]
    """By name, of the extents that `ARRAYS` says."""
    provenances: tuple[Provenance, ...]
    """The distinct ones."""
    finish_reasons: tuple[FinishReason | None, ...]
    """The distinct ones."""

    def fields(self, start: int, stop: int) -> dict[str, Sequence[Any]]:
        """The fields of samples start:stop but the derived ones, each a list with one value a sample.

        Arrays are views of the columns.

        Raises:
            ValueError, LookupError: what is held there cannot be a sample.
        """
        return {
            **{spec.name: self._present(spec.name, start, stop) for spec in TOKEN_FIELDS},
            "routed_experts": self._routed_experts(start, stop),
            "media": self._media(start, stop),
            "sample_id": self.texts("sample_id", start, stop),
            "trajectory_id": self.texts("trajectory_id", start, stop),
            "group_id": self._where_present("group_id", self.texts("group_id", start, stop), start),
            "reward": self._where_present("reward", self.arrays["reward"][start:stop].tolist(), start),
            "sibling": self.arrays["sibling"][start:stop].tolist(),
            "num_siblings": self.arrays["num_siblings"][start:stop].tolist(),
            "provenances": self._chosen("provenances", self.provenances, start, stop),
            "finish_reasons": self._chosen("finish_reasons", self.finish_reasons, start, stop),
        }

    def texts(self, name: str, start: int, stop: int) -> list[str]:
        """[stop - start] the values of a column of text; the empty text where there is none.

        Raises:
            ValueError: they are not text.
        """
        offsets = self.arrays[f"{name}.offsets"][start : stop + 1].tolist()
        joined = self.arrays[name][offsets[0] : offsets[-1]].tobytes()
        spans = pairwise([at - offsets[0] for at in offsets])
        return [joined[first:end].decode(*TEXT_ENCODING) for first, end in spans]

    def _present(self, name: str, start: int, stop: int) -> Sequence[NDArray[Any] | None]:
        """The values of a token field, and None where a sample has none."""
        if name not in self.arrays:
            return [None] * (stop - start)
        values = self._runs(name, "offsets", start, stop)
        return self._where_present(name, values, start) if f"{name}.present" in self.arrays else values

    def _runs(self, name: str, boundaries: str, start: int, stop: int) -> list[NDArray[Any]]:
        values, offsets = self.arrays[name], self.arrays[boundaries][start : stop + 1].tolist()
        return [values[first:end] for first, end in pairwise(offsets)]

    def _where_present(self, name: str, values: Sequence[T], start: int) -> list[T | None]:
        present = self.arrays[f"{name}.present"][start : start + len(values)].tolist()
        return [value if there else None for value, there in zip(values, present, strict=True)]

    def _chosen(self, name: str, distinct: Sequence[T], start: int, stop: int) -> list[tuple[T, ...]]:
        """A tuple a sample of the distinct values that its indices name; equal ones are one object."""
        offsets = self.arrays[f"{name}.offsets"][start : stop + 1].tolist()
        flat = self.arrays[name][offsets[0] : offsets[-1]].tolist()
        made: dict[tuple[int, ...], tuple[T, ...]] = {}
        chosen = []
        for first, end in pairwise(at - offsets[0] for at in offsets):
            indices = tuple(flat[first:end])
            if indices not in made:
                if any(at < 0 for at in indices):
                    raise ValueError(f"a negative index in {name}")
                made[indices] = tuple(distinct[at] for at in indices)
            chosen.append(made[indices])
        return chosen

    def _routed_experts(self, start: int, stop: int) -> Sequence[NDArray[Any] | None]:
        """[T-1, L, K] of each sample as views of the column's bytes."""
        if EXPERTS not in self.arrays:
            return [None] * (stop - start)
        runs = self._runs(EXPERTS, f"{EXPERTS}.offsets", start, stop)
        shapes = zip(*(self.arrays[name][start:stop].tolist() for name in EXPERT_COLUMNS), strict=True)
        lengths = np.diff(self.arrays["offsets"][start : stop + 1]).tolist()
        return [
            _experts(run, shape, length - 1) for run, shape, length in zip(runs, shapes, lengths, strict=True)
        ]

    def _media(self, start: int, stop: int) -> Sequence[tuple[MediaArray, ...]]:
        if MEDIA not in self.arrays:
            return list(repeat((), stop - start))
        runs = (self._runs(name, f"{name}.offsets", start, stop) for name in (MEDIA, MEDIA_KINDS))
        return [decode_media(media.tobytes(), kinds.tobytes()) for media, kinds in zip(*runs, strict=True)]


def _experts(run: NDArray[np.uint8], shape: tuple[int, int, int], num_rows: int) -> NDArray[Any] | None:
    itemsize, num_layers, num_choices = shape
    if not itemsize:
        if len(run) or num_layers or num_choices:
            raise ValueError("routed experts of no kind")
        return None
    if num_layers < 1 or num_choices < 1:
        raise ValueError("routed experts without layers")
    return run.view(EXPERT_DTYPES_BY_SIZE[itemsize]).reshape(num_rows, num_layers, num_choices)
