"""`ShardFollower`: the shards of a directory that a writer is still filling, in order, whole ones only.

A shard has its name only once it is whole, and a writer numbers its shards from 0. A listing is no snapshot:
one taken while names are added can lack some of them, so only what is there without a gap is taken. The end
is what `shards.end` says. Knows one writer a directory.
"""

from collections.abc import Sequence
from pathlib import Path
from threading import Event
from time import monotonic

from rlbatch.storage.end import is_numbered, read_end, require_samples, require_shards, shard_name, unbroken
from rlbatch.storage.files import END_NAME, list_directory, refusal
from rlbatch.storage.reader import ShardReader

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
"""The pause between two looks doubles from the first to this: a listing over a network costs milliseconds."""


class ShardFollower:
    """The shards so far; `advance` waits for more.

    Args:
        directory: where the writer writes; it may not exist yet.
        timeout_s: seconds without a new shard after which waiting is given up.

    Attributes:
        reader: the samples so far; None before the first shard.
        ended: the writer said that no more will come, and all have been seen.
    """

    def __init__(self, directory: Path, *, timeout_s: float) -> None:
        self._directory = directory
        self._timeout_s = timeout_s
        self.reader: ShardReader | None = None
        self.ended = False

    def advance(self, stop: Event) -> bool:
        """Wait until there are more samples.

        Args:
            stop: ends the waiting when set.

        Returns:
            Whether more came; False at the end, or when stopped.

        Raises:
            StorageError: store-overdue, no shard came in time; store-changed, the shards seen before are no
                longer the first ones, or others came than the writer said; as `open_reader`, of a shard.
        """
        deadline = monotonic() + self._timeout_s
        pause = FIRST_PAUSE_S
        while not self.ended and not stop.is_set():
            if self._look():
                return True
            left = deadline - monotonic()
            if self.ended:
                break
            if left <= 0:
                raise self._overdue()
            stop.wait(min(pause, left))
            pause = min(2 * pause, MAX_PAUSE_S)
        return False

    def _look(self) -> bool:
        if not self._directory.exists():
            return False
        listing = list_directory(self._directory)
        if listing.ended:
            # Nothing is added behind the end: this listing lacks nothing, as the one before may.
            listing = list_directory(self._directory)
        names = self._unbroken(listing.shards)
        known = () if self.reader is None else self.reader.paths
        if len(names) < len(known):
            self._require_there(known)
            return False
        further = names[len(known) :]
        end = read_end(self._directory) if listing.ended else None
        if end is not None:
            require_shards(self._directory, listing.shards, end)
        if further:
            self.reader = ShardReader(further) if self.reader is None else self.reader.extended(further)
        if end is not None:
            require_samples(self._directory, 0 if self.reader is None else len(self.reader), end)
            self.ended = not further
        return bool(further)

    def _unbroken(self, shards: Sequence[Path]) -> list[str]:
        """Those numbered 0, 1, ... up to the first that is not listed."""
        foreign = next((path for path in shards if not is_numbered(path)), None)
        if foreign is not None:
            raise refusal(
                "store-changed",
                self._directory,
                expected=f"shards as a writer numbers them, {shard_name(0)} first",
                found=f"{foreign.name}, another shard",
            )
        return [str(path) for path in unbroken(shards)]

    def _require_there(self, known: Sequence[str]) -> None:
        gone = next((path for path in map(Path, known) if not path.exists()), None)
        if gone is not None:
            raise refusal(
                "store-changed",
                self._directory,
                expected=f"further shards behind {Path(known[-1]).name}",
                found=f"{gone.name} gone",
            )

    def _overdue(self) -> Exception:
        num_shards = 0 if self.reader is None else len(self.reader.paths)
        return refusal(
            "store-overdue",
            self._directory,
            expected=f"a further shard or {END_NAME} within {self._timeout_s:g} s",
            found=f"none after the first {num_shards}",
        )
