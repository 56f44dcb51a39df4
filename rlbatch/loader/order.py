"""Which samples are a step: runs of the stored or shuffled order, with groups kept whole where asked.

Indices only; nothing is read here but columns.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlbatch.loader.options import Steps

LOOSE = ""
"""The group id of a sample that is of no group."""


class Order:
    """The order of N samples in every epoch.

    Args:
        num_samples: N.
        steps: how it is cut.
        group_ids: [N] where groups are kept whole; `LOOSE` where there is none.

    Example:
        6 samples of groups a b a b c c, step_samples 4, groups whole: [0, 2, 1, 3], [4, 5]
    """

    def __init__(self, num_samples: int, steps: Steps, *, group_ids: Sequence[str] | None = None) -> None:
        self._steps = steps
        self._units = (
            [np.array([index]) for index in range(num_samples)] if group_ids is None else _units(group_ids)
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
            # A group larger than a step is a step of its own.
            if steps and len(steps[-1]) + len(unit) <= self._steps.step_samples:
                steps[-1] += unit.tolist()
            else:
                steps.append(unit.tolist())
        return steps


def _units(group_ids: Sequence[str]) -> list[NDArray[np.int64]]:
    """The samples of each group, in the order of the groups' first ones; loose samples alone."""
    members: dict[str | int, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(index if group == LOOSE else group, []).append(index)
    return [np.array(unit, np.int64) for unit in members.values()]
