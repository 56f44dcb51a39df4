"""`ShardReader`: shards read as one list of samples.

Knows nothing of directories, recorded rollouts (JSON), batches or what samples are for.
"""

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlbatch.records import TOKEN_FIELDS, Provenance, Sample, StoredSamples, Stretch
from rlbatch.storage.columns import provenance_text
from rlbatch.storage.shard import Shard


class ShardReader:
    """N samples of one or more shards; made by `open_reader`.

    What is read whole is verified: iteration, `samples` and `read` compare each array with its checksum the
    first time they touch its shard. `reader[i]` is not, and does not say so again. Pickles as its paths.

    Attributes:
        paths: the shards, in the order read.
        leftovers: paths of temporary files beside them, which hold nothing that was promised.
        lengths: [N] int64, read-only; tokens of each sample.
        provenances: the distinct ones of all shards.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        leftovers: Sequence[str] = (),
        opened: "ShardReader | None" = None,
    ) -> None:
        before: Sequence[Shard] = () if opened is None else opened._shards
        self._shards: list[Shard] = [*before, *(Shard(Path(path)) for path in paths)]
        self.paths = tuple(str(shard.path) for shard in self._shards)
        self.leftovers = tuple(leftovers)
        # Sample i lies in the shard whose first sample is the last one not after i.
        self._firsts = np.cumsum([0, *(len(shard) for shard in self._shards)])
        self.lengths: NDArray[np.int64] = np.concatenate([np.diff(shard.offsets) for shard in self._shards])
        self.lengths.flags.writeable = False
        self.provenances: tuple[Provenance, ...] = _distinct(self._shards)

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.paths, self.leftovers)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`, unchecked: its tokens are not compared with the checksums.

        Its arrays are read-only views of the file. A negative index counts from the end.

        Raises:
            TypeError: a slice: `read` takes a range of indices, and verifies.
            IndexError: there are not that many samples.
            StorageError: shard-altered, what the file holds there cannot be a sample.
        """
        if isinstance(index, slice):
            first, end, step = index.indices(len(self))
            raise TypeError(
                f"index: expected an int, found a slice; read(range({first}, {end}, {step})) reads it"
            )
        shard, at = self._locate(index)
        return shard.sample(at)

    def __iter__(self) -> Iterator[Sample]:
        """Every sample in order; each shard is verified before its first one.

        Raises:
            StorageError: shard-altered, naming the array.
        """
        for shard in self._shards:
            yield from shard.samples()

    def samples(self) -> list[Sample]:
        """Every sample in order, all shards verified; the arrays are views of the files, not copies.

        Raises:
            StorageError: shard-altered, naming the array.
        """
        return list(self)

    def read(self, indices: Iterable[int]) -> StoredSamples:
        """These samples, in this order; each shard among them is verified whole the first time.

        Samples that follow each other in a shard are one stretch, whose arrays are views of the file.

        Raises:
            IndexError: there are not that many samples.
            StorageError: shard-altered, naming the array.
        """
        places = self._places(indices)
        for number in sorted({shard for shard, _ in places}):
            self._shards[number].verify()
        return StoredSamples([self._shards[shard].stretch(*span) for shard, span in _spans(places)])

    def read_copies(self, indices: Iterable[int]) -> StoredSamples:
        """`read`, but as one stretch in memory of its own, and the shards' memory released one by one.

        For samples that are drawn at random: views of them would keep pages of the whole store in memory.

        Raises:
            IndexError: there are not that many samples.
            StorageError: shard-altered, naming the array; store-changed, a shard is gone or was written to.
        """
        wanted = np.array(list(indices), np.int64)
        places = self._places(wanted)
        offsets = np.cumsum([0, *self.lengths[wanted]])
        columns = {
            spec.name: np.empty(int(offsets[-1]), spec.dtype) for spec in TOKEN_FIELDS if not spec.optional
        }
        copies: dict[int, Sample] = {}
        for number, members in _by_shard(places).items():
            shard = self._shards[number]
            shard.verify()
            own = [slice(int(offsets[at]), int(offsets[at + 1])) for at, _ in members]
            memories = [{name: values[span] for name, values in columns.items()} for span in own]
            copies |= zip(
                (at for at, _ in members),
                shard.copies([index for _, index in members], memories),
                strict=True,
            )
            shard.release()
        for values in columns.values():
            values.flags.writeable = False
        in_order = [copies[at] for at in range(len(places))]
        return StoredSamples([Stretch(samples=in_order, offsets=offsets, columns=columns)])

    def verify(self) -> None:
        """Compare every array of every shard with its checksum, unless that was done before.

        Raises:
            StorageError: shard-altered, naming the array.
        """
        for shard in self._shards:
            shard.verify()

    def extended(self, paths: Sequence[str | Path]) -> "ShardReader":
        """The same samples and then those of further shards; what is open stays open and verified.

        Raises:
            StorageError: as `open_reader`, of the further shards.
        """
        return ShardReader(paths, leftovers=self.leftovers, opened=self)

    def sample_ids(self, *, start: int = 0) -> list[str]:
        """The id of each sample from `start` on, which is the first of a shard.

        Raises:
            StorageError: shard-altered.
        """
        return self._texts("sample_id", start)

    def group_ids(self) -> list[str]:
        """[N] the id of each sample's group; the empty text where it is of none.

        Raises:
            StorageError: shard-altered.
        """
        return self._texts("group_id", 0)

    def trajectory_ids(self) -> list[str]:
        """[N] the id of each sample's trajectory.

        Raises:
            StorageError: shard-altered.
        """
        return self._texts("trajectory_id", 0)

    @property
    def num_siblings(self) -> NDArray[np.int64]:
        """[N] how many samples each sample's trajectory became."""
        return np.concatenate([shard.num_siblings for shard in self._shards])

    def _texts(self, name: str, start: int) -> list[str]:
        shards = zip(self._shards, self._firsts.tolist(), strict=False)
        return [text for shard, first in shards if first >= start for text in shard.texts(name)]

    def seals(self) -> tuple[str, ...]:
        """The checksum of each shard's header, which holds those of its arrays: equal where contents are."""
        return tuple(shard.seal for shard in self._shards)

    def shards_of(self, indices: Iterable[int]) -> dict[str, Shard]:
        """The shards that hold these samples, by path.

        Raises:
            IndexError: there are not that many samples.
        """
        numbers = sorted({shard for shard, _ in self._places(indices)})
        return {self.paths[number]: self._shards[number] for number in numbers}

    def location(self, index: int) -> tuple[str, int]:
        """Where sample `index` is stored: the shard's path, and the index in it.

        Raises:
            IndexError: there are not that many samples.
        """
        return self.locations([index])[0]

    def locations(self, indices: Iterable[int]) -> list[tuple[str, int]]:
        """`location` of many, at the price of a few.

        Raises:
            IndexError: there are not that many samples.
        """
        return [(self.paths[shard], at) for shard, at in self._places(indices)]

    def _locate(self, index: int) -> tuple[Shard, int]:
        ((shard, at),) = self._places([index])
        return self._shards[shard], at

    def _places(self, indices: Iterable[int]) -> list[tuple[int, int]]:
        """(shard, index in it) of each; a negative index counts from the end."""
        wanted = np.fromiter(map(operator.index, indices), np.int64)
        at = np.where(wanted < 0, wanted + len(self), wanted)
        bad = np.flatnonzero((at < 0) | (at >= len(self)))
        if len(bad):
            raise IndexError(f"sample {wanted[bad[0]]} of {len(self)}")
        shards = np.searchsorted(self._firsts, at, side="right") - 1
        return list(zip(shards.tolist(), (at - self._firsts[shards]).tolist(), strict=True))


def _spans(places: Sequence[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    """(shard, samples first:stop of it) of each run of places that follow each other.

    Example:
        places (0, 4), (0, 5), (1, 0) -> (0, (4, 6)), (1, (0, 1))
    """
    shard, at = np.array(places, np.int64).reshape(-1, 2).T
    breaks = np.flatnonzero((np.diff(shard) != 0) | (np.diff(at) != 1)) + 1
    cuts = [0, *breaks.tolist(), len(places)] if places else []
    return [(places[first][0], (places[first][1], places[stop - 1][1] + 1)) for first, stop in pairwise(cuts)]


def _by_shard(places: Sequence[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
    """Shard -> (place in the list, index in the shard) of each of its samples.

    Example:
        places (0, 4), (1, 7), (0, 2) -> {0: [(0, 4), (2, 2)], 1: [(1, 7)]}
    """
    members: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for at, (shard, index) in enumerate(places):
        members[shard].append((at, index))
    return members


def _reopen(paths: Sequence[str], leftovers: Sequence[str]) -> ShardReader:
    return ShardReader(paths, leftovers=leftovers)


def _distinct(shards: Sequence[Shard]) -> tuple[Provenance, ...]:
    # By JSON, as in the shards: 0.0 and -0.0 are equal, but not identical.
    texts = {provenance_text(item): item for shard in shards for item in shard.provenances}
    return tuple(texts.values())
