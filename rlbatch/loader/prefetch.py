"""An iterator run ahead of its consumer on a thread. Knows nothing of what it yields.

Whatever happens, nobody waits forever: an exception on the thread is raised to the consumer, a consumer that
stops lets the thread end, and an iterator that nobody holds any more closes itself.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition, Event, Thread, current_thread
from typing import Generic, Self, TypeVar

T = TypeVar("T")

LIVENESS_PAUSE_S = 1.0
"""How often a waiting consumer makes sure that the thread still lives: in a forked process it does not."""


class Demand:
    """What an iterator is told of its consumer. This one takes each item as it is made."""

    def __init__(self) -> None:
        self.stopped = Event()
        """Set when nobody wants more."""

    def wait_until_wanted(self) -> bool:
        """Wait until the consumer has used up everything and asks for more; False where it stopped."""
        return not self.stopped.is_set()


class _Channel(Demand, Generic[T]):
    """At most `depth` items between the thread and its consumer."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self._condition = Condition()
        self._depth = depth
        self._items: deque[T] = deque()
        self._waiting = False
        self._finished = False
        self._error: BaseException | None = None

    def wait_until_wanted(self) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._waiting or self.stopped.is_set())
        return super().wait_until_wanted()

    def run(self, make: Callable[[Demand], Iterator[T]]) -> None:
        """The thread: put every item, then the end or the error."""
        error = None
        try:
            for item in make(self):
                if not self._put(item):
                    break
        except BaseException as raised:
            error = raised
        with self._condition:
            self._finished, self._error = True, error
            self._condition.notify_all()

    def _put(self, item: T) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: len(self._items) < self._depth or self.stopped.is_set())
            if self.stopped.is_set():
                return False
            self._items.append(item)
            self._waiting = False
            self._condition.notify_all()
            return True

    def get(self, thread: Thread) -> T:
        with self._condition:
            while not self._items:
                if self._error is not None:
                    raise self._error
                if self._finished or self.stopped.is_set():
                    raise StopIteration
                if not thread.is_alive():
                    raise RuntimeError("the loader's thread is gone; was the process forked? Iterate anew")
                self._waiting = True
                self._condition.notify_all()
                self._condition.wait(LIVENESS_PAUSE_S)
            item = self._items.popleft()
            self._condition.notify_all()
            return item

    def close(self) -> None:
        with self._condition:
            self.stopped.set()
            self._items.clear()
            self._condition.notify_all()


class Prefetcher(Generic[T]):
    """Up to `depth` items of an iterator, made ahead.

    Args:
        make: called on the thread; what it yields is handed on in order. It is told of its consumer.
        depth: at least 1.
    """

    def __init__(self, make: Callable[[Demand], Iterator[T]], *, depth: int) -> None:
        self._channel: _Channel[T] = _Channel(depth)
        self._thread = Thread(target=self._channel.run, args=(make,), daemon=True, name="rlbatch-loader")
        # The thread holds the channel, not this object: when the last reference goes, the thread ends.
        self._closer = weakref.finalize(self, _end, self._channel, self._thread)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return self._channel.get(self._thread)

    def close(self) -> None:
        """Let the thread end; it is waited for."""
        self._closer()
        self._thread.join()


def _end(channel: _Channel[T], thread: Thread) -> None:
    channel.close()
    # An interpreter that ends while the thread is in foreign code aborts the process. Where the thread itself
    # frees the last reference, it cannot wait for itself.
    if thread is not current_thread():
        thread.join()
