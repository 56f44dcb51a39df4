"""The segments of a batch: those of its samples, at the positions that predict their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbatch.collate.place import Place
from rlbatch.errors import RecordError
from rlbatch.records import Provenance, Sample, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """G segments."""

    segments: tuple[Segment, ...]
    """In batch positions: position t - 1 predicts token t."""
    versions: tuple[int, ...]
    """[G] the one version that drew each, or -1."""
    provenances: tuple[Provenance, ...]
    """[G]"""

    @classmethod
    def of(cls, samples: Sequence[Sample], place: Place) -> "Parts":
        """The segments of every sample, in the order of the batch.

        Raises:
            RecordError: segments of more than one `logprobs_mode`.
        """
        provenances = _shared(
            [sample.provenances[part.turn] for sample in samples for part in sample.segments]
        )
        modes = sorted({provenance.logprobs_mode for provenance in provenances})
        if len(modes) > 1:
            raise RecordError(f"collate: expected turns of one logprobs_mode, found {' and '.join(modes)}")
        return cls(
            segments=tuple(
                [
                    Segment(row, at + start - 1, at + stop - 1, turn)
                    for sample, row, at in zip(samples, place.rows, place.starts, strict=True)
                    for _, start, stop, turn in sample.segments
                ]
            ),
            versions=tuple([version for sample in samples for version in sample.segment_versions]),
            provenances=provenances,
        )

    def table(self) -> NDArray[np.int32]:
        """[G, 4] (row, start, stop, turn)."""
        # Numbers in one list: numpy takes long over a list of named tuples.
        flat = np.array([value for segment in self.segments for value in segment], np.int32)
        return flat.reshape(len(self.segments), 4)


def _shared(provenances: Sequence[Provenance]) -> tuple[Provenance, ...]:
    """With one object for all that are equal: whoever groups segments by them need not compare fields."""
    objects = {id(provenance): provenance for provenance in provenances}
    kept: dict[Provenance, Provenance] = {}
    shared = {name: kept.setdefault(provenance, provenance) for name, provenance in objects.items()}
    return tuple([shared[id(provenance)] for provenance in provenances])
