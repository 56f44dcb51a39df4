"""One shard, open for reading: its arrays as views of a read-only map of the file, and samples made of them.

Opening checks the header, and the checksums and boundaries of the per-sample columns; the checksums of the
per-token arrays are looked at when those are first read whole. Nothing is copied: a sample's arrays are
views, and keep the map alive.

Knows one file; opens no other, whatever is written in it.
"""

import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import StorageError
from rlbatch.records import (
    TOKEN_FIELDS,
    FinishReason,
    MediaArray,
    Provenance,
    Sample,
    StopReason,
    Stretch,
)
from rlbatch.storage.columns import (
    ARRAYS,
    EXPERT_COLUMNS,
    EXPERT_DTYPES_BY_SIZE,
    EXPERTS,
    PER_BOUNDARY,
    PER_SAMPLE,
    SAMPLES,
    STOP_REASONS,
    TEXT_ENCODING,
    read_finish_reasons,
    read_provenances,
    read_stop_reasons,
)
from rlbatch.storage.derived import Derived, derive
from rlbatch.storage.files import reason, refusal, unusable
from rlbatch.storage.format import Entry, read_header, shown
from rlbatch.storage.media import MEDIA, MEDIA_KINDS, decode_media

_TOKEN_ARRAYS = frozenset({EXPERTS, MEDIA, *(spec.name for spec in TOKEN_FIELDS)})
_TOGETHER = (
    frozenset({EXPERTS, f"{EXPERTS}.offsets", *EXPERT_COLUMNS}),
    frozenset({STOP_REASONS, f"{STOP_REASONS}.offsets"}),
    frozenset({MEDIA, f"{MEDIA}.offsets", MEDIA_KINDS, f"{MEDIA_KINDS}.offsets"}),
)
"""Arrays that come all or not at all."""


class Shard:
    """One file of N samples.

    Attributes:
        path: the file.
        offsets: [N+1] int64, read-only; sample i is tokens offsets[i]:offsets[i+1].
        provenances: the distinct ones of its samples.
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
        _check_names(path, self._entries)
        self._verify(self._entries.keys() - _TOKEN_ARRAYS)
        self.offsets: NDArray[np.int64] = self._arrays["offsets"]
        _check_extents(path, self._arrays)
        self.provenances, self._finish_reasons, self._stop_reasons = _documents(path, header.metadata)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def verify(self) -> None:
        """Compare every array with its checksum; those that passed before are not read again.

        Raises:
            StorageError: shard-altered, naming the array.
        """
        if self._unverified:
            self._verify(tuple(self._unverified))
            if EXPERTS not in self._arrays:
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
            found = _identity(self.path.stat())
        except OSError as error:
            raise refusal(
                "store-changed", self.path, expected="the shard that was opened", found=reason(error)
            ) from error
        if found != self._identity:
            raise refusal(
                "store-changed",
                self.path,
                expected=f"the shard that was opened, {self._identity[1]} bytes",
                found=f"{found[1]} bytes, written since" if found[0] == self._identity[0] else "another file",
            )

    def texts(self, name: str) -> list[str]:
        """[N] the values of a column of text; the empty text where there is none.

        Raises:
            StorageError: shard-altered, they are not text.
        """
        try:
            return [self._text(name, index) for index in range(len(self))]
        except ValueError as error:
            raise refusal("shard-altered", self.path, expected="text", found=shown(str(error))) from error

    def sample(self, index: int) -> Sample:
        """Sample `index`, 0 <= index < N, its arrays views of the file; their checksums are not looked at.

        Raises:
            StorageError: shard-altered, what the file holds there cannot be a sample.
        """
        # RecordError and UnicodeDecodeError are ValueErrors.
        try:
            fields = self._fields(index)
            if self._derived is None:
                return Sample(**fields)
            return Sample.unchecked(
                fields
                | {
                    "segments": self._derived.segments(index),
                    "segment_versions": self._derived.segment_versions(index),
                    "num_loss_tokens": int(self._derived.num_loss_tokens[index]),
                }
            )
        except (ValueError, LookupError) as error:
            raise refusal(
                "shard-altered", self.path, sample=index, expected="a sample", found=shown(str(error))
            ) from error

    def stretch(self, start: int, stop: int) -> Stretch:
        """Samples start:stop with the flat arrays that theirs are views of.

        Raises:
            StorageError: shard-altered, what the file holds there cannot be a sample.
        """
        offsets = self.offsets[start : stop + 1]
        tokens = slice(int(offsets[0]), int(offsets[-1]))
        return Stretch(
            samples=[self.sample(index) for index in range(start, stop)],
            offsets=offsets - offsets[0],
            columns={
                spec.name: self._arrays[spec.name][tokens] for spec in TOKEN_FIELDS if not spec.optional
            },
        )

    def samples(self) -> Iterator[Sample]:
        """Every sample in order, once `verify` has passed."""
        self.verify()
        for index in range(len(self)):
            yield self.sample(index)

    def _fields(self, index: int) -> dict[str, Any]:
        group_id = self._text("group_id", index) if self._arrays["group_id.present"][index] else None
        reward = float(self._arrays["reward"][index]) if self._arrays["reward.present"][index] else None
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return {
            **{spec.name: self._tokens(spec.name, index, span) for spec in TOKEN_FIELDS},
            "routed_experts": self._routed_experts(index),
            "media": self._media(index),
            "sample_id": self._text("sample_id", index),
            "trajectory_id": self._text("trajectory_id", index),
            "group_id": group_id,
            "reward": reward,
            "sibling": int(self._arrays["sibling"][index]),
            "num_siblings": int(self._arrays["num_siblings"][index]),
            "provenances": tuple(self.provenances[at] for at in self._indices("provenances", index)),
            "finish_reasons": tuple(
                self._finish_reasons[at] for at in self._indices("finish_reasons", index)
            ),
            "stop_reasons": self._stops(index),
        }

    def _tokens(self, name: str, index: int, span: slice) -> NDArray[Any] | None:
        values = self._arrays.get(name)
        if values is None:
            return None
        present = self._arrays.get(f"{name}.present")
        return values[span] if present is None or present[index] else None

    def _routed_experts(self, index: int) -> NDArray[Any] | None:
        """[T-1, L, K] as a view of the file's bytes."""
        if EXPERTS not in self._arrays:
            return None
        itemsize, num_layers, num_choices = (int(self._arrays[name][index]) for name in EXPERT_COLUMNS)
        run = self._run(EXPERTS, index)
        if not itemsize:
            if len(run) or num_layers or num_choices:
                raise ValueError("routed experts of no kind")
            return None
        if num_layers < 1 or num_choices < 1:
            raise ValueError("routed experts without layers")
        num_rows = int(self.offsets[index + 1] - self.offsets[index]) - 1
        return run.view(EXPERT_DTYPES_BY_SIZE[itemsize]).reshape(num_rows, num_layers, num_choices)

    def _stops(self, index: int) -> tuple[StopReason | None, ...]:
        if STOP_REASONS not in self._arrays:
            return ()
        return tuple(self._stop_reasons[at] for at in self._indices(STOP_REASONS, index))

    def _media(self, index: int) -> tuple[MediaArray, ...]:
        if MEDIA not in self._arrays:
            return ()
        return decode_media(self._run(MEDIA, index).tobytes(), self._run(MEDIA_KINDS, index).tobytes())

    def _run(self, name: str, index: int) -> NDArray[Any]:
        offsets = self._arrays[f"{name}.offsets"]
        return self._arrays[name][offsets[index] : offsets[index + 1]]

    def _text(self, name: str, index: int) -> str:
        return self._run(name, index).tobytes().decode(*TEXT_ENCODING)

    def _indices(self, name: str, index: int) -> list[int]:
        indices: list[int] = self._run(name, index).tolist()
        if any(at < 0 for at in indices):
            raise ValueError(f"a negative index in {name}")
        return indices

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


def _check_names(path: Path, entries: Mapping[str, Entry]) -> None:
    unknown = sorted(entries.keys() - ARRAYS.keys())
    if unknown:
        raise refusal(
            "schema-unknown", path, expected="arrays that this release knows", found=shown(", ".join(unknown))
        )
    for name, spec in ARRAYS.items():
        # An optional field and its `.present` come together, and so do the parts of experts and of media.
        needed = not spec.optional or name.removesuffix(".present") in entries or f"{name}.present" in entries
        needed |= any(name in parts and not parts.isdisjoint(entries) for parts in _TOGETHER)
        if needed and name not in entries:
            raise refusal("shard-altered", path, expected=f"an array {name!r}", found="none")
        if name in entries and entries[name].dtype != spec.dtype:
            raise refusal(
                "shard-altered", path, expected=f"{name!r} of {spec.dtype}", found=str(entries[name].dtype)
            )


def _check_extents(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Every array is as long as the boundaries say, and the boundaries rise from 0."""
    num_samples = len(arrays["offsets"]) - 1
    if num_samples < 1:
        raise refusal("shard-altered", path, expected="at least one sample", found="no offsets of one")
    for name, values in arrays.items():
        extent = ARRAYS[name].extent
        expected = {PER_SAMPLE: num_samples, PER_BOUNDARY: num_samples + 1}.get(extent)
        if expected is None:
            expected = int(arrays[extent][-1]) if len(arrays[extent]) else 0
        if len(values) != expected:
            raise refusal(
                "shard-altered", path, expected=f"{expected} entries in {name!r}", found=str(len(values))
            )
        if extent == PER_BOUNDARY and (values[0] != 0 or (values[1:] < values[:-1]).any()):
            raise refusal(
                "shard-altered",
                path,
                expected=f"{name!r} that rise from 0",
                found=f"{int(values[0])} first, and {int((values[1:] < values[:-1]).sum())} that fall",
            )


def _documents(
    path: Path, metadata: Mapping[str, str]
) -> tuple[tuple[Provenance, ...], tuple[FinishReason | None, ...], tuple[StopReason | None, ...]]:
    try:
        return (
            read_provenances(metadata["provenances"]),
            read_finish_reasons(metadata["finish_reasons"]),
            read_stop_reasons(metadata.get(STOP_REASONS, "[]")),
        )
    except (ValueError, TypeError, LookupError) as error:
        raise refusal(
            "schema-unknown",
            path,
            expected="provenances, finish reasons and stop reasons as this release knows them",
            found=shown(str(error)),
        ) from error
