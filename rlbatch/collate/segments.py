"""The segments of a batch: the runs of sampled tokens of one turn, found in all samples at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbatch.collate.place import Place
from rlbatch.errors import RecordError
from rlbatch.records import UNKNOWN_VERSION, Provenance, Sample, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """G segments as arrays, [G] int64 each."""

    sample: NDArray[np.int64]
    """Index of the sample."""
    table: NDArray[np.int64]
    """[G, 4] (row, start, stop, turn), half-open, in batch positions: position t - 1 predicts token t."""

    @classmethod
    def of(cls, samples: Sequence[Sample], place: Place) -> "Parts":
        """The runs of equal `turn` >= 0 of every sample, in the order of the batch."""
        offsets = np.cumsum([0, *place.lengths])
        turn = np.concatenate([sample.turn for sample in samples])
        # A run begins where the turn changes, and at the latest where the next sample does.
        starts = np.union1d(np.flatnonzero(turn[1:] != turn[:-1]) + 1, offsets[:-1])
        stops = np.append(starts[1:], len(turn))
        sampled = turn[starts] >= 0
        starts, stops = starts[sampled], stops[sampled]
        sample = np.searchsorted(offsets, starts, side="right") - 1
        to_batch = np.array(place.starts, np.int64)[sample] - offsets[sample] - 1
        rows = np.array(place.rows, np.int64)[sample]
        table = np.stack([rows, starts + to_batch, stops + to_batch, turn[starts].astype(np.int64)], axis=1)
        return cls(sample=sample, table=table)

    def segments(self) -> tuple[Segment, ...]:
        """The table's rows."""
        return tuple(
            Segment(row=row, start=start, stop=stop, turn=turn)
            for row, start, stop, turn in self.table.tolist()
        )

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

    def versions(self, policy_version: NDArray[np.int32]) -> tuple[int, ...]:
        """[G] the one version that drew each segment, or -1; from the batch's [B, T] column."""
        flat = policy_version.reshape(-1)
        row_starts = self.table[:, 0] * policy_version.shape[1]
        starts, stops = row_starts + self.table[:, 1], row_starts + self.table[:, 2]
        changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
        # One version throughout: the next change after the first position is not before the end.
        num_before = np.searchsorted(changes, starts, side="right")
        next_change = np.append(changes, len(flat))[num_before]
        versions: list[int] = np.where(next_change >= stops, flat[starts], UNKNOWN_VERSION).tolist()
        return tuple(versions)
