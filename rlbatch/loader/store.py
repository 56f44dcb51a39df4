"""Where the samples of each step come from: a store that is complete, or one that is still being written."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import numpy as np

from rlbatch.loader.checking import Candidates
from rlbatch.loader.options import Steps
from rlbatch.loader.order import Order
from rlbatch.records import Origin
from rlbatch.storage import ShardReader, open_reader
from rlbatch.storage.files import refusal
from rlbatch.storage.follow import ShardFollower
from rlbatch.storage.shard import Shard


class Store:
    """The samples that are there, and which of them are a step.

    Args:
        path: a shard, or a directory of shards.
        steps: how they are cut into steps; whether the store is followed.

    Attributes:
        keeps_trajectories: some trajectory became several samples, and they come in one step; False of a
            store that is followed, where nobody knows what is still to come.

    Raises:
        StorageError: a store that should be complete cannot be read.
    """

    def __init__(self, path: Path, steps: Steps) -> None:
        self._path = path
        self._steps = steps
        self._follower: ShardFollower | None = None
        self._reader: ShardReader | None = None
        self._order: Order | None = None
        self._first_of: dict[str, int] = {}
        # Sample -> the earlier one of the same id.
        self._repeats: dict[int, int] = {}
        self.keeps_trajectories = False
        if steps.follow_timeout_s is not None:
            self._follower = ShardFollower(path, timeout_s=steps.follow_timeout_s)
        else:
            self._take(open_reader(path))
            self.keeps_trajectories = bool((self.reader.num_siblings > 1).any())
            self._order = Order(len(self.reader), steps, wholes=_wholes(self.reader, steps))

    @property
    def reader(self) -> ShardReader:
        """The samples that are there.

        Raises:
            StorageError: store-changed, there are none yet.
        """
        if self._reader is None:
            raise refusal("store-changed", self._path, expected="shards that were there", found="none")
        return self._reader

    @property
    def is_complete(self) -> bool:
        """The store is not followed."""
        return self._follower is None

    def steps_of(self, epoch: int) -> list[list[int]] | None:
        """The samples of each step; None where the store is still being written."""
        return None if self._order is None else self._order.steps_of(epoch)

    def step(self, epoch: int, step: int, stop: Event) -> Sequence[int] | None:
        """The samples of one step, waited for where the store is followed; None where there are no more.

        Raises:
            StorageError: as `ShardFollower.advance`.
        """
        if self._order is not None:
            steps = self._order.steps_of(epoch)
            return steps[step] if step < len(steps) else None
        start = step * self._steps.step_samples
        while self._num_samples < start + self._steps.step_samples and self._advance(stop):
            pass
        indices = range(start, min(start + self._steps.step_samples, self._num_samples))
        # A consumer that stopped gets no part of a step for the whole of it.
        return indices if indices and not stop.is_set() else None

    def shards_of(self, epoch: int, step: int) -> list[Shard]:
        """Where the samples of a step are stored; nowhere, where it is not known yet which they are."""
        steps = self.steps_of(epoch)
        if steps is None or step >= len(steps):
            return []
        return list(self.reader.shards_of(steps[step]).values())

    def read(self, indices: Sequence[int]) -> Candidates:
        """The samples, verified.

        Raises:
            StorageError: store-changed, a shard is gone or was written to; shard-altered.
        """
        reader = self.reader
        sources = reader.shards_of(indices)
        for shard in sources.values():
            shard.require_unchanged()
        repeats = {
            at: self.origins([self._repeats[index]])[0]
            for at, index in enumerate(indices)
            if index in self._repeats
        }
        return Candidates(
            samples=reader.read_copies(indices) if self._reads_copies else reader.read(indices),
            origins=self.origins(indices),
            repeats=repeats,
            sources={} if self._reads_copies else sources,
        )

    @property
    def _reads_copies(self) -> bool:
        # Samples drawn at random would keep pages of the whole store in memory.
        return self._steps.seed is not None

    def origins(self, indices: Sequence[int]) -> list[Origin]:
        """Where samples are stored."""
        return [Origin(path=path, index=at) for path, at in self.reader.locations(indices)]

    def fingerprint(self) -> tuple[int, str]:
        """How many shards there are, and a checksum of their contents."""
        seals = () if self._reader is None else self._reader.seals()
        return len(seals), _checksum(seals)

    def require_same(self, num_shards: int, checksum: str) -> None:
        """Refuse a store that is not the one of that fingerprint, or one that has grown out of it.

        Raises:
            StorageError: store-changed; as `ShardFollower.advance`.
        """
        never = Event()
        while self._follower is not None and self.fingerprint()[0] < num_shards and self._advance(never):
            pass
        there, _ = self.fingerprint()
        seals = () if self._reader is None else self._reader.seals()[:num_shards]
        if _checksum(seals) != checksum or (self.is_complete and there != num_shards):
            raise refusal(
                "store-changed",
                self._path,
                expected=f"the {num_shards} shards that the state was saved with",
                found=f"{there} shards" if there != num_shards else "other contents",
            )

    @property
    def _num_samples(self) -> int:
        return 0 if self._reader is None else len(self._reader)

    def _advance(self, stop: Event) -> bool:
        if self._follower is None or not self._follower.advance(stop) or self._follower.reader is None:
            return False
        self._take(self._follower.reader)
        return True

    def _take(self, reader: ShardReader) -> None:
        known = self._num_samples
        self._reader = reader
        for index, sample_id in enumerate(reader.sample_ids(start=known), start=known):
            first = self._first_of.setdefault(sample_id, index)
            if first != index:
                self._repeats[index] = first


def _wholes(reader: ShardReader, steps: Steps) -> list[tuple[str, str] | None] | None:
    """[N] the group of each sample where groups are kept, else its trajectory where that became several."""
    branched = np.flatnonzero(reader.num_siblings > 1).tolist()
    if steps.keep_groups == "no" and not branched:
        return None
    wholes: list[tuple[str, str] | None] = [None] * len(reader)
    trajectory_ids = reader.trajectory_ids() if branched else []
    for index in branched:
        wholes[index] = "trajectory", trajectory_ids[index]
    if steps.keep_groups != "no":
        for index, group in enumerate(reader.group_ids()):
            wholes[index] = ("group", group) if group else wholes[index]
    return wholes


def _checksum(seals: Sequence[str]) -> str:
    return f"{zlib.crc32(' '.join(seals).encode()):08x}"
