"""The shards of the next step held against their checksums, on a second thread, while this one is batched.

Checksums need no interpreter, so that both cores work. Knows nothing of batches.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from types import TracebackType
from typing import Self

from rlbatch.storage.shard import Shard


class Verifier:
    """One shard at a time. As a context, it leaves no thread behind, and waits for the shard in hand only."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlbatch-verifier")
        self._begun: list[Future[None]] = []

    def begin(self, shards: Iterable[Shard]) -> None:
        """Verify those of these that were not yet, while the caller reads others."""
        # Each by itself, since what runs cannot be cancelled.
        self._begun = [self._pool.submit(_verify, shard) for shard in shards if not shard.is_verified]

    def finish(self, stop: Event) -> None:
        """Wait for what was begun, or until `stop` is set and the shard in hand is done.

        Raises:
            StorageError: store-changed or shard-altered.
        """
        begun, self._begun = self._begun, []
        for each in begun:
            if stop.is_set():
                return
            each.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


def _verify(shard: Shard) -> None:
    # A file that was cut short kills who reads it.
    shard.require_unchanged()
    shard.verify()
