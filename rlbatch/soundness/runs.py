"""`Runs`: where engines sampled, in the tokens of many samples end to end. Knows no check."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.records import UNKNOWN_VERSION, Provenance, Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """The G runs of sampled tokens of one turn each, in the flat order."""

    start: NDArray[np.intp]
    """[G] first token, counted over all samples."""
    stop: NDArray[np.intp]
    """[G] one past the last token."""
    sample: NDArray[np.intp]
    """[G]"""
    turn: NDArray[np.int16]
    """[G]"""
    provenance: NDArray[np.intp]
    """[G] index into the distinct provenances."""

    def __len__(self) -> int:
        return len(self.start)

    def spread(self, values: NDArray[Any], num_tokens: int, elsewhere: float) -> NDArray[Any]:
        """[G] values, each at all tokens of its run: [num_tokens].

        Example:
            runs 1:3 and 4:5 of 6 tokens, values [7, 8], elsewhere 0 -> [0, 7, 7, 0, 8, 0]
        """
        ends = np.stack([self.start, self.stop], axis=1).ravel()
        lengths = np.diff(np.concatenate([[0], ends, [num_tokens]]))
        both = np.full(2 * len(self) + 1, elsewhere, values.dtype)
        both[1::2] = values
        return np.repeat(both, lengths)


def runs_of(samples: Sequence[Sample], offsets: NDArray[np.intp]) -> tuple[Runs, tuple[Provenance, ...]]:
    """The runs of samples that lie end to end, and the distinct provenances that they point to.

    Args:
        samples: S of them.
        offsets: [S + 1]; sample i is tokens offsets[i]:offsets[i + 1].
    """
    flat = [value for sample in samples for part in sample.segments for value in part]
    _, start, stop, turn = np.array(flat, np.intp).reshape(-1, 4).T
    sample = np.repeat(np.arange(len(samples)), [len(each.segments) for each in samples])
    distinct: dict[Provenance, int] = {}
    # Most samples share a few objects, and hashing one means hashing all its fields.
    seen: dict[int, int] = {}
    indices = []
    for each in samples:
        for part in each.segments:
            provenance = each.provenances[part.turn]
            if id(provenance) not in seen:
                seen[id(provenance)] = distinct.setdefault(provenance, len(distinct))
            indices.append(seen[id(provenance)])
    first = offsets[sample]
    runs = Runs(
        start=start + first,
        stop=stop + first,
        sample=sample,
        turn=turn.astype(np.int16),
        provenance=np.array(indices, np.intp),
    )
    return runs, tuple(distinct)


def version_changes(samples: Sequence[Sample], runs: Runs, values: NDArray[np.int32]) -> NDArray[np.intp]:
    """[C] tokens of runs whose version is another one than that of the token before, in the same run."""
    if all(version != UNKNOWN_VERSION for sample in samples for version in sample.segment_versions):
        return np.empty(0, np.intp)
    at = np.flatnonzero(values[1:] != values[:-1]) + 1
    run = np.searchsorted(runs.start, at, "right") - 1
    return at[(run >= 0) & (at > runs.start[run]) & (at < runs.stop[run])]
