"""Which epoch the worker processes of a `DataLoader` have passed, in memory that they share.

Workers that are not kept begin each pass with a copy of the loader as it was made, at the same epoch:
shuffled passes would repeat one order. They cannot know the epoch; they can know that it was passed before.
"""

import torch


class WorkerEpochs:
    """The last epoch that was passed to its end, and by which workers. Copies in workers share it."""

    def __init__(self) -> None:
        # The epoch after the last one passed, and the seed that the workers of that pass have in common.
        self._passed = torch.zeros(2, dtype=torch.int64)
        self._passed.share_memory_()  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        # On the way to a worker memory stays shared; in a plain pickle it is a copy, to be shared anew.
        self._passed = state["_passed"]
        self._passed.share_memory_()  # type: ignore[no-untyped-call]

    def has_passed(self, epoch: int, base_seed: int) -> bool:
        """Whether workers of another pass came to the end of this epoch, or of a later one."""
        next_epoch, by = self._passed.tolist()
        return bool(epoch < next_epoch and by != base_seed)

    def passed(self, epoch: int, base_seed: int) -> None:
        """A worker came to the end of it."""
        self._passed.copy_(torch.tensor([epoch + 1, base_seed]))

    def told(self, epoch: int) -> None:
        """Somebody chose the next pass's epoch, be it one that was passed."""
        self._passed[0] = epoch
