"""What a shard can hold: the values of a sample that its construction does not check.

`Sample` checks its arrays; ids, reward and provenances may hold anything that Python lets them. Storage casts
nothing into something else, so what would not come back as it went in is refused before any of it is written.
Whether the values make sense is for `rlbatch.soundness` to say.
"""

import math

from rlbatch.records import Provenance, Sample, identical
from rlbatch.storage.columns import provenance_text, read_provenances
from rlbatch.storage.format import shown

_INT64_MAX = (1 << 63) - 1


class Vetting:
    """Looks at the samples of one shard; each provenance object is tried once."""

    def __init__(self) -> None:
        # By id, since most samples share a few objects; the objects are held, so that ids stay theirs.
        self._storable: dict[int, Provenance] = {}

    def complaint(self, sample: object) -> tuple[str, str] | None:
        """Expected and found, where a shard cannot hold the sample as it is; None where it can.

        A reward given as an int or a numpy float64 is stored, and comes back as the equal float.
        """
        if not isinstance(sample, Sample):
            return "a Sample", type(sample).__name__
        for name in ("sample_id", "trajectory_id"):
            if not isinstance(getattr(sample, name), str):
                return f"text as {name}", shown(getattr(sample, name))
        if not isinstance(sample.group_id, str | None):
            return "text or None as group_id", shown(sample.group_id)
        if not _is_exact_float(sample.reward):
            return "None, or a number that float64 holds exactly, as reward", shown(sample.reward)
        for name in ("sibling", "num_siblings"):
            if type(getattr(sample, name)) is not int or getattr(sample, name) > _INT64_MAX:
                return f"an int of at most 64 bits as {name}", shown(getattr(sample, name))
        for reason in sample.finish_reasons:
            if not isinstance(reason, str | None):
                return "text or None as finish reason", shown(reason)
        for provenance in sample.provenances:
            if not self._is_storable(provenance):
                return "a Provenance of plain text and numbers, which JSON gives back", shown(provenance)
        return None

    def _is_storable(self, provenance: object) -> bool:
        if not isinstance(provenance, Provenance):
            return False
        if id(provenance) in self._storable:
            return True
        try:
            (again,) = read_provenances(f"[{provenance_text(provenance)}]")
        except (TypeError, ValueError):
            return False
        if not (again == provenance or identical(again, provenance)):
            return False
        self._storable[id(provenance)] = provenance
        return True


def _is_exact_float(reward: object) -> bool:
    if reward is None:
        return True
    if not isinstance(reward, int | float) or isinstance(reward, bool):
        return False
    try:
        return math.isnan(reward) or float(reward) == reward
    except OverflowError:
        return False
