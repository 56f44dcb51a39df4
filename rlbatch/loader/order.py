"""Which samples are a step: runs of the stored or shuffled order, where parts of one whole stay together.

Indices only; knows no sample.
"""

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlbatch.loader.options import Steps


class Order:
    """The order of N samples in every epoch.

    Args:
        num_samples: N.
        steps: how it is cut.
        wholes: [N] of which whole each sample is a part that comes in one step; None: of none. None in place
            of the list where no sample is of any.

    Example:
        6 samples of the groups a b a b c c, step_samples 4: [0, 2, 1, 3], [4, 5]
    """

    def __init__(self, num_samples: int, steps: Steps, *, wholes: Sequence[Hashable] | None = None) -> None:
        self._steps = steps
        self._units = (
            [np.array([index]) for index in range(num_samples)] if wholes is None else _units(wholes)
        )
        self._of_epoch: tuple[int, list[list[int]]] | None = None

    def steps_of(self, epoch: int) -> list[list[int]]:
        """The samples of each step of the epoch; every sample in exactly one."""
        if self._of_epoch is None or self._of_epoch[0] != epoch:
            self._of_epoch = epoch, self._cut(epoch)
        return self._of_epoch[1]

    def _cut(self, epoch: int) -> list[list[int]]:
        units = self._units
        if self._steps.seed is not None:
            rng = np.random.default_rng((self._steps.seed, epoch))
            units = [units[at] for at in rng.permutation(len(units)).tolist()]
        steps: list[list[int]] = []
        for unit in units:
            # A whole larger than a step is a step of its own.
            if steps and len(steps[-1]) + len(unit) <= self._steps.step_samples:
                steps[-1] += unit.tolist()
            else:
                steps.append(unit.tolist())
        return steps


def _units(wholes: Sequence[Hashable]) -> list[NDArray[np.int64]]:
    """The samples of each whole, in the order of the wholes' first ones; the others alone."""
    members: dict[Hashable, list[int]] = {}
    for index, whole in enumerate(wholes):
        members.setdefault(index if whole is None else whole, []).append(index)
    return [np.array(unit, np.int64) for unit in members.values()]
