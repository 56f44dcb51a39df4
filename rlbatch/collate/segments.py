"""The segments of a batch: those of its samples, at the positions that predict their tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.collate.place import Place
from rlbatch.errors import Finding, RecordError, Where
from rlbatch.records import Origin, Provenance, Sample, Segment, origins_of


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
    def of(cls, samples: Sequence[Sample], place: Place, origins: Sequence[Origin] | None) -> "Parts":
        """The segments of every sample, in the order of the batch.

        Raises:
            RecordError: modes-mixed, segments of more than one `logprobs_mode`.
        """
        provenances = _shared(
            [sample.provenances[part.turn] for sample in samples for part in sample.segments]
        )
        if len({provenance.logprobs_mode for provenance in provenances}) > 1:
            raise RecordError.of(_modes_mixed(samples, origins_of(samples, origins)))
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


def _modes_mixed(samples: Sequence[Sample], origins: Sequence[Origin]) -> Finding:
    """At the first turn whose logprobs are of another kind than those before."""
    turns = [
        (sample.provenances[part.turn].logprobs_mode, part, sample, origin)
        for sample, origin in zip(samples, origins, strict=True)
        for part in sample.segments
    ]
    first = turns[0][0]
    _, part, sample, origin = next(each for each in turns if each[0] != first)
    return finding(
        "modes-mixed",
        where=Where(path=origin.path, sample=origin.index, trajectory=sample.trajectory_id, turn=part.turn),
        expected=f"{first} logprobs in the whole batch, as in its first sample",
        found=" and ".join(
            f"{count} turns with {mode}" for mode, count in Counter(t[0] for t in turns).items()
        )
        + " logprobs",
        likely="the store has rollouts of servers that were started differently, or at other temperatures",
        fix="give each kind batches of its own: RolloutLoader does; for a DataLoader take a store, or a "
        "torch.utils.data.Subset, of samples with one value of Sample.logprobs_modes",
    )


def _shared(provenances: Sequence[Provenance]) -> tuple[Provenance, ...]:
    """With one object for all that are equal: whoever groups segments by them need not compare fields."""
    objects = {id(provenance): provenance for provenance in provenances}
    kept: dict[Provenance, Provenance] = {}
    shared = {name: kept.setdefault(provenance, provenance) for name, provenance in objects.items()}
    return tuple([shared[id(provenance)] for provenance in provenances])
