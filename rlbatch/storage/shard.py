"""One shard, open for reading: its arrays as views of a read-only map of the file, and samples made of them.

Opening checks the header, and the checksums and boundaries of the per-sample columns; the checksums of the
per-token arrays are looked at when those are first read whole. Nothing is copied: a sample's arrays are
views, and keep the map alive.

Knows one file; opens no other, whatever is written in it.
"""

import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import StorageError
from rlbatch.records import TOKEN_FIELDS, Provenance, Sample, Stretch
from rlbatch.storage.columns import (
    EXPERTS,
    SAMPLES,
    STOP_REASONS,
    read_finish_reasons,
    read_provenances,
    read_stop_reasons,
)
from rlbatch.storage.derived import Derived, derive
from rlbatch.storage.extents import check_extents, check_names
from rlbatch.storage.files import reason, refusal, unusable
from rlbatch.storage.format import read_header, shown
from rlbatch.storage.media import MEDIA
from rlbatch.storage.rows import Contents

_TOKEN_ARRAYS = frozenset({EXPERTS, MEDIA, *(spec.name for spec in TOKEN_FIELDS)})
SAMPLES_AT_ONCE = 256
"""Of a shard that is read through: enough that one costs little, and few enough to hold."""


class Shard:
    """One file of N samples.

    Attributes:
        path: the file.
        offsets: [N+1] int64, read-only; sample i is tokens offsets[i]:offsets[i+1].
    """

    def __init__(self, path: Path) -> None:
        """Open the file and check all but the per-token arrays' checksums.

        Raises:
            StorageError: file-unusable, schema-unknown, shard-truncated or shard-altered.
        """
        self.path = path
        try:
            # A pipe would be waited for, and a device has no size.
            if path.exists() and not path.is_file():
                raise refusal("file-unusable", path, expected="a file", found="something else of that name")
            with path.open("rb") as file:
                header = read_header(path, file, schema=SAMPLES)
                mapped = np.memmap(file, dtype=np.uint8, mode="r")
                self._identity = _identity(os.fstat(file.fileno()))
        except StorageError:
            raise
        except OSError as error:
            raise unusable(path, error) from error
        self.seal: str = header.metadata["header_crc32"]
        self._map = cast(mmap.mmap, mapped.base)
        # As a plain array: slices of np.memmap are slow to make, and pickle as if they were files.
        body = np.asarray(mapped)
        self._entries = {entry.name: entry for entry in header.entries}
        self._unverified = set(self._entries)
        # What is known of all samples once they were verified; None: each is checked as it is made.
        self._derived: Derived | None = None
        self._arrays = {
            entry.name: body[entry.start : entry.stop].view(entry.dtype) for entry in header.entries
        }
        check_names(path, self._entries)
        self._verify(self._entries.keys() - _TOKEN_ARRAYS)
        self.offsets: NDArray[np.int64] = self._arrays["offsets"]
        check_extents(path, self._arrays)
        self._contents = _contents(path, header.metadata, self._arrays)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def provenances(self) -> tuple[Provenance, ...]:
        """The distinct ones of its samples."""
        return self._contents.provenances

    @property
    def num_siblings(self) -> NDArray[np.int64]:
        """[N] how many samples each sample's trajectory became."""
        return self._arrays["num_siblings"]

    @property
    def is_verified(self) -> bool:
        """Every array was compared with its checksum."""
        return not self._unverified

    def verify(self) -> None:
        """Compare every array with its checksum; those that passed before are not read again.

        Raises:
            StorageError: shard-altered, naming the array.
        """
        if self._unverified:
            self._verify(tuple(self._unverified))
            # Experts and media are checked sample by sample.
            if self._arrays.keys().isdisjoint({EXPERTS, MEDIA}):
                self._derived = derive(self._arrays, num_provenances=len(self.provenances))
            # Else a look at every shard of a large store would count as memory of this process.
            self.release()

    def release(self) -> None:
        """Let the system take back the pages that were read; they are read again when touched."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def require_unchanged(self) -> None:
        """Refuse to read on where the file is not the one that was opened.

        A file that was cut short under a map kills the process that touches the missing part; so this is
        asked before every step. It compares what the system keeps of a file, not its contents.

        Raises:
            StorageError: store-changed, the file is gone, or another one.
        """
        try:
            status = self.path.stat()
        except OSError as error:
            raise self._changed(reason(error)) from error
        self._require_same(status)

    def texts(self, name: str) -> list[str]:
        """[N] the values of a column of text; the empty text where there is none.

        Raises:
            StorageError: shard-altered, they are not text.
        """
        try:
            return self._contents.texts(name, np.arange(len(self)))
        except ValueError as error:
            raise refusal("shard-altered", self.path, expected="text", found=shown(str(error))) from error

    def sample(self, index: int) -> Sample:
        """Sample `index`, 0 <= index < N, its arrays views of the file; their checksums are not looked at.

        Raises:
            StorageError: shard-altered, what the file holds there cannot be a sample.
        """
        return self.chosen([index])[0]

    def chosen(self, indices: Sequence[int]) -> list[Sample]:
        """`sample` of many, at the price of a few."""
        at = np.array(indices, np.int64)
        # RecordError and UnicodeDecodeError are ValueErrors.
        try:
            fields = self._contents.fields(at)
            if self._derived is not None:
                return Sample.unchecked(fields | self._derived.fields(at), len(at))
            rows = zip(*fields.values(), strict=True)
            return [Sample(**dict(zip(fields, row, strict=True))) for row in rows]
        except (ValueError, LookupError) as error:
            if len(at) > 1:
                # One of them is wrong, and made alone it says so.
                return [self.sample(index) for index in indices]
            raise refusal(
                "shard-altered", self.path, sample=int(at[0]), expected="a sample", found=shown(str(error))
            ) from error

    def copies(self, indices: Sequence[int], memories: Sequence[Mapping[str, NDArray[Any]]]) -> list[Sample]:
        """`chosen`, but with arrays that are no views of the file.

        What memory is given for is read into it, past the map: of samples that lie far apart, the map would
        bring in the pages around each.

        Args:
            indices: of the samples.
            memories: of each, token fields that no sample lacks -> [T] of their dtype.

        Raises:
            StorageError: store-changed; as `sample`.
        """
        try:
            with self.path.open("rb", buffering=0) as file:
                self._require_same(os.fstat(file.fileno()))
                starts = self.offsets[np.array(indices, np.int64)].tolist()
                for start, memory in zip(starts, memories, strict=True):
                    for name, values in memory.items():
                        file.seek(self._entries[name].start + start * values.itemsize)
                        if file.readinto(values.data) != values.nbytes:
                            raise self._changed("a shorter file")
                # Before the map is read, and behind: what was written meanwhile was never verified.
                self._require_same(os.fstat(file.fileno()))
                samples = zip(self.chosen(indices), memories, strict=True)
                copies = [sample.copied(memory) for sample, memory in samples]
                self._require_same(os.fstat(file.fileno()))
        except StorageError:
            raise
        except OSError as error:
            raise self._changed(reason(error)) from error
        return copies

    def stretch(self, start: int, stop: int) -> Stretch:
        """Samples start:stop with the flat arrays that theirs are views of.

        Raises:
            StorageError: shard-altered, what the file holds there cannot be a sample.
        """
        offsets = self.offsets[start : stop + 1]
        tokens = slice(int(offsets[0]), int(offsets[-1]))
        return Stretch(
            samples=self.chosen(range(start, stop)),
            offsets=offsets - offsets[0],
            columns={
                spec.name: self._arrays[spec.name][tokens] for spec in TOKEN_FIELDS if not spec.optional
            },
        )

    def samples(self) -> Iterator[Sample]:
        """Every sample in order, once `verify` has passed."""
        self.verify()
        for start in range(0, len(self), SAMPLES_AT_ONCE):
            yield from self.chosen(range(start, min(start + SAMPLES_AT_ONCE, len(self))))

    def _require_same(self, status: os.stat_result) -> None:
        found = _identity(status)
        if found != self._identity:
            same_file = found[0] == self._identity[0]
            raise self._changed(f"{found[1]} bytes, written since" if same_file else "another file")

    def _changed(self, found: str) -> StorageError:
        expected = f"the shard that was opened, {self._identity[1]} bytes"
        return refusal("store-changed", self.path, expected=expected, found=found)

    def _verify(self, names: Iterable[str]) -> None:
        for name in sorted(names, key=lambda name: self._entries[name].start):
            crc32 = zlib.crc32(self._arrays[name].data)
            if crc32 != self._entries[name].crc32:
                raise refusal(
                    "shard-altered",
                    self.path,
                    expected=f"array {name!r} with crc32 {self._entries[name].crc32:08x}",
                    found=f"crc32 {crc32:08x}",
                )
            self._unverified.discard(name)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    """What tells a file from one that replaced it, or from itself after a write."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def _contents(path: Path, metadata: Mapping[str, str], arrays: Mapping[str, NDArray[Any]]) -> Contents:
    try:
        return Contents(
            arrays=arrays,
            provenances=read_provenances(metadata["provenances"]),
            finish_reasons=read_finish_reasons(metadata["finish_reasons"]),
            stop_reasons=read_stop_reasons(metadata.get(STOP_REASONS, "[]")),
        )
    except (ValueError, TypeError, LookupError) as error:
        raise refusal(
            "schema-unknown",
            path,
            expected="provenances, finish reasons and stop reasons as this release knows them",
            found=shown(str(error)),
        ) from error
