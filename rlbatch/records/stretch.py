"""Samples as a store gives them: a list, and the flat arrays in which runs of them lie end to end.

Whoever looks at all tokens of many samples need not join what was never apart. Knows no file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from rlbatch.records.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """S samples, one behind the other in the list and in memory: their arrays are views of flat ones."""

    samples: Sequence[Sample]
    """[S]"""
    offsets: NDArray[np.int64]
    """[S + 1] from 0; sample i is tokens offsets[i]:offsets[i + 1]."""
    columns: Mapping[str, NDArray[Any]]
    """[N] the arrays of `TOKEN_FIELDS` that no sample may lack, by name."""

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.offsets[-1])

    def part(self, start: int, stop: int) -> "Stretch":
        """Samples start:stop.

        Example:
            offsets [0, 3, 5, 9], part(1, 3) -> offsets [0, 2, 6], columns 3:9
        """
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Stretch(
            samples=self.samples[start:stop],
            offsets=self.offsets[start : stop + 1] - first,
            columns={name: values[first:last] for name, values in self.columns.items()},
        )


class StoredSamples(Sequence[Sample]):
    """A list of samples that also says which of them lie end to end.

    Args:
        stretches: all samples, in order; a sample that lies alone is a stretch of its own.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = tuple(stretches)
        self._samples = tuple([sample for stretch in stretches for sample in stretch.samples])

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        return self._samples[index]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)
