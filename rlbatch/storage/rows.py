"""The fields of samples, read out of a shard's columns for many samples at once.

A column costs little more for a thousand samples than for one. Knows what a shard holds; neither the file nor
whether its checksums are right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlbatch.records import TOKEN_FIELDS, FinishReason, MediaArray, Provenance, StopReason
from rlbatch.storage.columns import (
    EXPERT_COLUMNS,
    EXPERT_DTYPES_BY_SIZE,
    EXPERTS,
    STOP_REASONS,
    TEXT_ENCODING,
)
from rlbatch.storage.media import MEDIA, MEDIA_KINDS, decode_media

T = TypeVar("T")

_Span: TypeAlias = tuple[int, int]
"""Where a run begins in its column, and one past its end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """N samples as a shard holds them."""

    arrays: Mapping[str, NDArray[Any]]
    """By name, of the extents that `ARRAYS` says."""
    provenances: tuple[Provenance, ...]
    """The distinct ones."""
    finish_reasons: tuple[FinishReason | None, ...]
    """The distinct ones."""
    stop_reasons: tuple[StopReason | None, ...]
    """The distinct ones."""

    def fields(self, indices: NDArray[np.int64]) -> dict[str, Sequence[Any]]:
        """The fields of these samples but the derived ones, each a list with one value a sample.

        Arrays are views of the columns.

        Raises:
            ValueError, LookupError: what is held there cannot be a sample.
        """
        spans = self._spans("offsets", indices)
        return {
            **{spec.name: self._tokens(spec.name, indices, spans) for spec in TOKEN_FIELDS},
            "routed_experts": self._routed_experts(indices, spans),
            "media": self._media(indices),
            "sample_id": self.texts("sample_id", indices),
            "trajectory_id": self.texts("trajectory_id", indices),
            "group_id": self._present("group_id", self.texts("group_id", indices), indices),
            "reward": self._present("reward", self.arrays["reward"][indices].tolist(), indices),
            "sibling": self.arrays["sibling"][indices].tolist(),
            "num_siblings": self.arrays["num_siblings"][indices].tolist(),
            "provenances": self._chosen("provenances", self.provenances, indices),
            "finish_reasons": self._chosen("finish_reasons", self.finish_reasons, indices),
            "stop_reasons": self._stop_reasons(indices),
        }

    def texts(self, name: str, indices: NDArray[np.int64]) -> list[str]:
        """The values of a column of text; the empty text where there is none.

        Raises:
            ValueError: they are not text.
        """
        return [run.tobytes().decode(*TEXT_ENCODING) for run in self._runs(name, indices)]

    def _spans(self, boundaries: str, indices: NDArray[np.int64]) -> list[_Span]:
        offsets = self.arrays[boundaries]
        return list(zip(offsets[indices].tolist(), offsets[indices + 1].tolist(), strict=True))

    def _runs(self, name: str, indices: NDArray[np.int64]) -> list[NDArray[Any]]:
        values = self.arrays[name]
        return [values[first:end] for first, end in self._spans(f"{name}.offsets", indices)]

    def _tokens(
        self, name: str, indices: NDArray[np.int64], spans: Sequence[_Span]
    ) -> Sequence[NDArray[Any] | None]:
        """The values of a token field, and None where a sample has none."""
        values = self.arrays.get(name)
        if values is None:
            return [None] * len(indices)
        runs = [values[first:end] for first, end in spans]
        return self._present(name, runs, indices) if f"{name}.present" in self.arrays else runs

    def _present(self, name: str, values: Sequence[T], indices: NDArray[np.int64]) -> list[T | None]:
        present = self.arrays[f"{name}.present"][indices].tolist()
        return [value if there else None for value, there in zip(values, present, strict=True)]

    def _chosen(self, name: str, distinct: Sequence[T], indices: NDArray[np.int64]) -> list[tuple[T, ...]]:
        """A tuple a sample of the distinct values that it names; equal ones are one object."""
        made: dict[tuple[int, ...], tuple[T, ...]] = {}
        chosen = []
        for run in self._runs(name, indices):
            named = tuple(run.tolist())
            if named not in made:
                if any(at < 0 for at in named):
                    raise ValueError(f"a negative index in {name}")
                made[named] = tuple(distinct[at] for at in named)
            chosen.append(made[named])
        return chosen

    def _stop_reasons(self, indices: NDArray[np.int64]) -> Sequence[tuple[StopReason | None, ...]]:
        if STOP_REASONS not in self.arrays:
            return [()] * len(indices)
        return self._chosen(STOP_REASONS, self.stop_reasons, indices)

    def _routed_experts(
        self, indices: NDArray[np.int64], spans: Sequence[_Span]
    ) -> Sequence[NDArray[Any] | None]:
        """[T-1, L, K] of each sample as views of the column's bytes."""
        if EXPERTS not in self.arrays:
            return [None] * len(indices)
        runs = self._runs(EXPERTS, indices)
        shapes = zip(*(self.arrays[name][indices].tolist() for name in EXPERT_COLUMNS), strict=True)
        return [
            _experts(run, shape, end - first - 1)
            for run, shape, (first, end) in zip(runs, shapes, spans, strict=True)
        ]

    def _media(self, indices: NDArray[np.int64]) -> Sequence[tuple[MediaArray, ...]]:
        if MEDIA not in self.arrays:
            return [()] * len(indices)
        runs = (self._runs(name, indices) for name in (MEDIA, MEDIA_KINDS))
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
