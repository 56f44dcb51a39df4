"""The segments of a batch: the runs of sampled tokens of one turn, found in all samples at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.collate.place import Place
from rlbatch.errors import RecordError
from rlbatch.records import UNKNOWN_VERSION, Provenance, Sample, Segment

BLOCK_TOKENS = 1 << 16
"""Tokens compared at a time, so that what is compared with what stays in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """G segments as arrays."""

    sample: NDArray[np.int64]
    """[G] index of the sample."""
    table: NDArray[np.int64]
    """[G, 4] (row, start, stop, turn), half-open, in batch positions: position t - 1 predicts token t."""
    versions: tuple[int, ...]
    """[G] the one version that drew each, or -1."""

    @classmethod
    def of(cls, samples: Sequence[Sample], place: Place) -> "Parts":
        """The runs of equal `turn` >= 0 of every sample, in the order of the batch."""
        turn = np.concatenate([sample.turn for sample in samples])
        offsets = np.cumsum([0, *place.lengths])
        # A run begins where the turn changes, and at the latest where the next sample does.
        starts = np.union1d(_changes(turn), offsets[:-1])
        stops = np.append(starts[1:], len(turn))
        sampled = turn[starts] >= 0
        starts, stops = starts[sampled], stops[sampled]
        sample = np.searchsorted(offsets, starts, side="right") - 1
        moved = np.array(place.starts, np.int64)[sample] - offsets[sample] - 1
        rows = np.array(place.rows, np.int64)[sample]
        policy_version = np.concatenate([sample.policy_version for sample in samples])
        return cls(
            sample=sample,
            table=np.column_stack([rows, starts + moved, stops + moved, turn[starts]]),
            versions=_versions(policy_version, starts, stops),
        )

    def segments(self) -> tuple[Segment, ...]:
        """The table's rows."""
        return tuple(map(Segment._make, self.table.tolist()))

    def provenances(self, samples: Sequence[Sample]) -> tuple[Provenance, ...]:
        """[G] how each segment's logprobs came to be.

        Raises:
            RecordError: segments of more than one `logprobs_mode`.
        """
        turns = zip(self.sample.tolist(), self.table[:, 3].tolist(), strict=True)
        provenances = tuple(samples[sample].provenances[turn] for sample, turn in turns)
        modes = sorted({provenance.logprobs_mode for provenance in provenances})
        if len(modes) > 1:
            raise RecordError(f"collate: expected turns of one logprobs_mode, found {' and '.join(modes)}")
        return provenances


def _versions(
    policy_version: NDArray[np.int32], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[int, ...]:
    """[G] the one version from each start to each stop, or -1.

    Example:
        [3, 3, 3, 4] from 0 to 2 and from 2 to 4 -> 3, -1
    """
    # One version throughout: the next place where it changes is not before the end.
    changes = np.append(_changes(policy_version), len(policy_version))
    next_change = changes[np.searchsorted(changes, starts, side="right")]
    versions: list[int] = np.where(next_change >= stops, policy_version[starts], UNKNOWN_VERSION).tolist()
    return tuple(versions)


def _changes(values: NDArray[Any]) -> NDArray[np.int64]:
    """Where a value differs from the one before it.

    Example:
        [0, 0, 1, 1, 2] -> 2, 4
    """
    found = []
    for at in range(1, len(values), BLOCK_TOKENS):
        block = values[at - 1 : at + BLOCK_TOKENS]
        found.append(np.flatnonzero(block[1:] != block[:-1]) + at)
    return np.concatenate(found) if found else np.empty(0, np.int64)
