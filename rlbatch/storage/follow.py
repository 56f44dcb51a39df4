"""`ShardFollower`: the shards of a directory that a writer is still filling, in order, whole ones only.

A shard has its name only once it is whole, and a writer numbers its shards from 0. A listing is no snapshot:
one taken while names are added can lack some of them, so only what is there without a gap is taken. The end
is what `shards.end` says. Knows one writer a directory.
"""

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from threading import Event
from time import monotonic

from rlbatch.storage.files import END_NAME, SHARD_SUFFIX, list_directory, refusal, unusable
from rlbatch.storage.format import load_json, shown
from rlbatch.storage.reader import ShardReader

_NUMBERED = re.compile(r"[0-9]{6,}" + re.escape(SHARD_SUFFIX))

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
                longer the first ones, or not as many came as the writer said; as `open_reader`, of a shard.
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
        if listing.ended:
            self._require_whole(len(names))
            self.ended = len(names) == len(known)
        if len(names) == len(known):
            return False
        further = names[len(known) :]
        self.reader = ShardReader(further) if self.reader is None else self.reader.extended(further)
        return True

    def _unbroken(self, shards: Sequence[Path]) -> list[str]:
        """Those numbered 0, 1, ... up to the first that is not listed."""
        foreign = next((path for path in shards if not _NUMBERED.fullmatch(path.name)), None)
        if foreign is not None:
            raise refusal(
                "store-changed",
                self._directory,
                expected=f"shards as a writer numbers them, 000000{SHARD_SUFFIX} first",
                found=f"{foreign.name}, another shard",
            )
        unbroken = takewhile(lambda each: _number(each[1]) == each[0], enumerate(shards))
        return [str(path) for _, path in unbroken]

    def _require_there(self, known: Sequence[str]) -> None:
        gone = next((path for path in map(Path, known) if not path.exists()), None)
        if gone is not None:
            raise refusal(
                "store-changed",
                self._directory,
                expected=f"further shards behind {Path(known[-1]).name}",
                found=f"{gone.name} gone",
            )

    def _require_whole(self, num_shards: int) -> None:
        path = self._directory / END_NAME
        try:
            said = load_json(path.read_text())["num_shards"]
        except OSError as error:
            raise unusable(path, error) from error
        except (ValueError, TypeError, LookupError) as error:
            raise refusal(
                "file-unusable", path, expected="JSON with num_shards", found=shown(str(error))
            ) from error
        if said != num_shards:
            raise refusal(
                "store-changed",
                self._directory,
                expected=f"{said} shards, as {END_NAME} says",
                found=f"{num_shards} without a gap",
            )

    def _overdue(self) -> Exception:
        num_shards = 0 if self.reader is None else len(self.reader.paths)
        return refusal(
            "store-overdue",
            self._directory,
            expected=f"a further shard or {END_NAME} within {self._timeout_s:g} s",
            found=f"none after the first {num_shards}",
        )


def _number(path: Path) -> int:
    return int(path.name.removesuffix(SHARD_SUFFIX))
