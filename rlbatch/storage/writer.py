"""Samples into shards: `write_shard` for one file, `open_writer` for a directory that fills as samples come.

Shards are written once and whole; nothing is ever added to one. Values are stored as they are, sound or not:
`rlbatch.soundness` judges them. Knows nothing of batches or engines.
"""

import json
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from rlbatch.errors import StorageError
from rlbatch.records import Sample
from rlbatch.storage.columns import SAMPLES, encode
from rlbatch.storage.end import End, shard_name
from rlbatch.storage.files import (
    END_NAME,
    Listing,
    claim_directory,
    list_directory,
    make_directory,
    refusal,
    write_atomically,
)
from rlbatch.storage.format import order, render_header

DEFAULT_MAX_SAMPLES = 1024
DEFAULT_MAX_TOKENS = 1 << 22
"""About 100 MB a shard, held in memory twice while it is written."""


def write_shard(path: str | Path, samples: Sequence[Sample]) -> None:
    """Write samples to one new file, whole or not at all.

    What is read back is `identical` to what was given.

    Args:
        path: the file to be; its directory exists. Name it *.safetensors, or a reader of the directory will
            not see it.
        samples: at least one.

    Raises:
        StorageError: write-failed, there is nothing to write, something that is no sample, a file of that
            name, or the system refused; nothing is left behind.
    """
    path = Path(path)
    for index, sample in enumerate(samples):
        _require_sample(path, index, sample)
    _write(path, samples)


def open_writer(
    directory: str | Path, *, max_samples: int = DEFAULT_MAX_SAMPLES, max_tokens: int = DEFAULT_MAX_TOKENS
) -> "ShardWriter":
    """A writer of shards 000000.safetensors, 000001.safetensors, ... in a directory of its own.

    Args:
        directory: made where it is missing; temporary files of killed writers in it are left alone.
        max_samples: samples a shard, at most.
        max_tokens: tokens a shard, at most; a longer sample gets a shard to itself.

    Raises:
        StorageError: file-unusable, the directory holds shards already, or another writer has it open;
            write-failed, it cannot be made, or a bound is below 1.

    Example:
        with open_writer("rollouts") as writer:
            writer.append(sample)
    """
    return ShardWriter(Path(directory), max_samples=max_samples, max_tokens=max_tokens)


class ShardWriter:
    """Collects samples and writes them as shards; made by `open_writer`, one a directory.

    Use it as a context manager. When the block ends, what is collected is written, and then `shards.end`, by
    which readers know whether all is there, and who follows the directory that no more will come. When the
    block raises, what is collected is discarded, since it may be half of something; the exception gets a note
    that says how many samples that were. Shards that were written before stay, and no end is said.

    Attributes:
        directory: where the shards go.
        paths: the shards written so far.
        leftovers: paths of temporary files that were in the directory before.
    """

    def __init__(self, directory: Path, *, max_samples: int, max_tokens: int) -> None:
        for name, bound in (("max_samples", max_samples), ("max_tokens", max_tokens)):
            if bound < 1:
                raise _refuse(directory, f"{name} of at least 1", str(bound), fix=f"give a larger {name}")
        self.directory = directory
        self.paths: tuple[str, ...] = ()
        self._max_samples = max_samples
        self._max_tokens = max_tokens
        self._closed = False
        self._num_written = 0
        self._start()
        make_directory(directory)
        self._let_go = weakref.finalize(self, claim_directory(directory))
        try:
            listing = list_directory(directory)
            _require_unused(directory, listing)
        except BaseException:
            # The error holds this object, and who mends the directory may try again while it handles it.
            self._let_go()
            raise
        self.leftovers = listing.leftovers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.flush()
                self._write_end()
            elif self._samples:
                error.add_note(
                    f"rlbatch: {len(self._samples)} samples that were not yet in a shard of {self.directory} "
                    "were discarded"
                )
        finally:
            self._closed = True
            self._let_go()

    def append(self, sample: Sample) -> None:
        """Take one sample; where it would not fit, what was collected is written first.

        A sample whose `append` raised was not taken.

        Raises:
            StorageError: write-failed, as `write_shard`, or the writer is closed.
        """
        if self._closed:
            raise _refuse(self.directory, "a writer in its `with` block", "a closed one", fix="open another")
        _require_sample(self.directory, len(self._samples), sample)
        if len(self._samples) == self._max_samples or self._num_tokens + len(sample) > self._max_tokens:
            self.flush()
        self._samples.append(sample)
        self._num_tokens += len(sample)

    def flush(self) -> None:
        """Write what is collected as one shard; nothing where there is nothing.

        When it raises, the samples are still collected, and it can be tried again.

        Raises:
            StorageError: write-failed, as `write_shard`.
        """
        if not self._samples:
            return
        path = self.directory / shard_name(len(self.paths))
        _write(path, self._samples)
        self.paths = (*self.paths, str(path))
        self._num_written += len(self._samples)
        self._start()

    def _write_end(self) -> None:
        end = End(num_shards=len(self.paths), num_samples=self._num_written)
        write_atomically(self.directory / END_NAME, [json.dumps(asdict(end)).encode()])

    def _start(self) -> None:
        self._samples: list[Sample] = []
        self._num_tokens = 0


def _write(path: Path, samples: Sequence[Sample]) -> None:
    if not samples:
        raise _refuse(path, "at least one sample", "none", fix="write no shard where there are no samples")
    encoded = encode(samples)
    arrays = order(encoded.arrays)
    header = render_header(path, arrays, schema=SAMPLES, documents=encoded.documents)
    write_atomically(path, [header, *(values for _, values in arrays)])


def _require_sample(path: Path, index: int, sample: object) -> None:
    if not isinstance(sample, Sample):
        raise refusal(
            "write-failed",
            path,
            sample=index,
            expected="a Sample",
            found=type(sample).__name__,
            likely="a mistake in the call",
            fix="make samples with rlbatch.to_samples",
        )


def _require_unused(directory: Path, listing: Listing) -> None:
    names = [path.name for path in listing.shards] + [END_NAME] * listing.ended
    if names:
        raise refusal(
            "file-unusable",
            directory,
            expected=f"a directory without *.safetensors files and {END_NAME}",
            found=f"{len(names)}, the first {names[0]}",
            likely="an earlier run wrote there",
            fix="give each run a new directory; shards are never added to an old set",
        )


def _refuse(path: Path, expected: str, found: str, *, fix: str) -> StorageError:
    return refusal(
        "write-failed", path, expected=expected, found=found, likely="a mistake in the call", fix=fix
    )
