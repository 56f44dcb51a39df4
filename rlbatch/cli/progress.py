"""A progress bar on stderr, which shows only where the work takes long and somebody may be watching."""

import sys
from threading import Timer
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

DELAY_SECONDS = 2.0


class LateProgress:
    """Shows nothing for two seconds, and never anything where stderr is not a terminal.

    Call it with the share that is done, 0 to 1.
    """

    def __init__(self, what: str, *, delay: float = DELAY_SECONDS) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(what, total=1.0)
        self._timer = Timer(delay, self._progress.start) if sys.stderr.isatty() else None

    def __call__(self, share: float) -> None:
        """Move the bar, shown or not."""
        self._progress.update(self._task, completed=share)

    def __enter__(self) -> Self:
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            # It may be starting the bar right now; stopping first would leave the bar on.
            self._timer.join()
            self._progress.stop()
