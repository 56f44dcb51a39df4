"""`RolloutLoader`: stored samples in, checked batches out. Read, verify, check, pack, collate.

Every sample is seen once, in stored order. Knows nothing of models or losses.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rlbatch.batch import Batch, Layout
from rlbatch.catalogue import finding
from rlbatch.collate import DEFAULT_PADDING, Padding, collate
from rlbatch.errors import Finding, SoundnessError, Where
from rlbatch.packing import plan_batches, too_long
from rlbatch.records import LogprobsMode, Origin, Purpose, Sample
from rlbatch.soundness import require_sound
from rlbatch.storage import ShardReader, open_reader


class RolloutLoader:
    """Batches of a shard, or of a directory of shards.

    Args:
        path: the shard or the directory.
        layout: `padded` or `packed`.
        max_tokens: budget of one batch, padding included.
        purpose: `train`, or `audit` for raw, greedy and incomparable turns too.
        vocab_size: rows of the model's head; ids beyond it are an error.
        padding: with what, on which side, and to multiples of what.

    Raises:
        StorageError: the files cannot be used; at once, or where an array turns out altered.
        SoundnessError: a sample is longer than the budget (at once), or has a fault (before its batch).

    Example:
        for batch in RolloutLoader("rollouts", layout="packed", max_tokens=16384): ...
    """

    def __init__(
        self,
        path: str | Path,
        *,
        layout: Layout,
        max_tokens: int,
        purpose: Purpose = "train",
        vocab_size: int | None = None,
        padding: Padding = DEFAULT_PADDING,
    ) -> None:
        self._reader = open_reader(path)
        self._layout: Layout = layout
        self._purpose: Purpose = purpose
        self._vocab_size = vocab_size
        self._padding = padding
        require_fit(self._reader, max_tokens)
        self._plan = plan_batches(
            self._reader.lengths.tolist(), layout=layout, max_tokens=max_tokens, kinds=_modes(self._reader)
        )

    def __len__(self) -> int:
        """Batches of one pass."""
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        for indices in self._plan:
            origins = origins_in(self._reader, indices)
            yield self._collate(self._reader.read(indices), origins)

    def _collate(self, samples: Sequence[Sample], origins: Sequence[Origin]) -> Batch:
        require_sound(samples, purpose=self._purpose, vocab_size=self._vocab_size, origins=origins)
        return collate(
            samples,
            layout=self._layout,
            purpose=self._purpose,
            origins=origins,
            padding=self._padding,
        )


def origins_in(reader: ShardReader, indices: Sequence[int]) -> list[Origin]:
    """Where these samples are stored."""
    return [Origin(path=path, index=at) for path, at in map(reader.location, indices)]


def require_fit(reader: ShardReader, max_tokens: int) -> None:
    """Refuse a store with samples that no batch can hold.

    Raises:
        SoundnessError: `sample-too-long`, naming each.
    """
    excess = too_long(reader.lengths.tolist(), max_tokens)
    if excess:
        raise SoundnessError.of(*(_too_long(reader, index, max_tokens) for index in excess))


def _too_long(reader: ShardReader, index: int, max_tokens: int) -> Finding:
    path, at = reader.location(index)
    return finding(
        "sample-too-long",
        where=Where(path=path, sample=at),
        expected=f"at most max_tokens = {max_tokens} tokens",
        found=f"{int(reader.lengths[index])} tokens",
    )


def _modes(reader: ShardReader) -> list[frozenset[LogprobsMode]] | None:
    """What keeps samples out of each other's batch: the logprobs_mode, where the store has more than one."""
    if len({provenance.logprobs_mode for provenance in reader.provenances}) < 2:
        return None
    return [reader[index].logprobs_modes for index in range(len(reader))]
