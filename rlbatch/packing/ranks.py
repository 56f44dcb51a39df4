"""Costs -> shares of ranks, and lengths -> the batches of every rank. Integers and floats only.

Every rank computes the same plan from the same lengths, so nobody has to send it. Knows nothing of processes.
"""

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError
from rlbatch.packing.bins import Room, plan_batches
from rlbatch.packing.contract import Unit, check_partition, checked_costs, checked_lengths
from rlbatch.records.structure import check_scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one sequence costs a trainer: linear * length + quadratic * length ** 2.

    Example:
        A dense model of width D and L layers spends about 24 D ** 2 L a token on weights and 4 D L a pair of
        tokens on attention (causal: half of that), so quadratic / linear is about 1 / (12 D).

    Raises:
        RecordError: a factor that is negative or not finite, or none above 0.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        factors = (self.linear, self.quadratic)
        for name, factor in zip(("linear", "quadratic"), factors, strict=True):
            check_scalar(f"Cost.{name}", factor, float)
        if not all(map(math.isfinite, factors)) or min(factors) < 0 or max(factors) == 0:
            raise RecordError(
                "Cost: expected finite factors >= 0, one of them above, "
                f"found linear {self.linear} and quadratic {self.quadratic}"
            )

    def of(self, lengths: Sequence[int]) -> NDArray[np.float64]:
        """[N] the cost of each sequence."""
        values = np.asarray(lengths, np.float64)
        return self.linear * values + self.quadratic * values**2


def balance(costs: Sequence[float] | NDArray[np.float64], num_ranks: int) -> list[list[int]]:
    """Shares of nearly equal cost: the dearest first, each to the rank that has least so far.

    The heaviest share is at most 4/3 of the best possible, and with many items within about one small item.

    Args:
        costs: one an item, >= 0.
        num_ranks: how many shares.

    Returns:
        For each rank its items, in the order given out.

    Raises:
        RecordError: `num_ranks` that is no integer or below 1; costs that are negative or no finite numbers.

    Example:
        costs [5, 4, 3, 3], 2 ranks: [[0, 3], [1, 2]], 8 and 7

    Source: Graham 1969, "Bounds on multiprocessing timing anomalies", longest processing time first.
    """
    check_scalar("num_ranks", num_ranks, int)
    if num_ranks < 1:
        raise RecordError(f"num_ranks: expected at least 1, found {num_ranks}")
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    # Equal loads go to the lower rank, so that the plan is the same on every machine.
    loads = [(0.0, rank) for rank in range(num_ranks)]
    values = checked_costs(costs)
    order = np.argsort(-values, kind="stable")
    for item, cost in zip(order.tolist(), values[order].tolist(), strict=True):
        load, rank = loads[0]
        shares[rank].append(item)
        heapq.heapreplace(loads, (load + cost, rank))
    return shares


def imbalance(costs: Sequence[float], shares: Sequence[Sequence[int]]) -> float:
    """How much the heaviest share is above the mean, as a part of the mean.

    Raises:
        RecordError: no shares, or costs as `balance` does not take them.

    Example:
        shares of 8 and 7: 8 / 7.5 - 1 = 0.067
    """
    values = checked_costs(costs)
    if not len(shares):
        raise RecordError("shares: expected at least one, found none")
    loads = [float(values[list(share)].sum()) for share in shares]
    mean = sum(loads) / len(loads)
    return max(loads) / mean - 1 if mean else 0.0


def plan_ranks(
    lengths: Sequence[int],
    room: Room,
    *,
    num_ranks: int,
    cost: Cost,
    kinds: Sequence[Hashable] | None = None,
    units: Sequence[Unit] | None = None,
) -> list[list[list[int]]]:
    """The batches of every rank in one step; every sample in exactly one.

    Samples are shared out by cost first and packed within each share: shares of equal cost need equally many
    batches, or one more. Each rank's dearest batch comes first, so that ranks that wait for each other after
    every batch have like work at the same time.

    Args:
        lengths: tokens of each sample of the step.
        room: the budget of one batch.
        num_ranks: data-parallel ranks.
        cost: what is balanced.
        kinds: as in `plan_batches`.
        units: as in `plan_batches`.

    Returns:
        [rank][batch] -> sample indices; as many batches on every rank. An empty one is a filler.

    Raises:
        RecordError: as `plan_batches` and `balance`.
    """
    # Before anything is shared out: within a share a lost sample is not missed.
    check_partition(len(checked_lengths(lengths)), kinds, units)
    costs = cost.of(lengths)
    of_units = costs if units is None else np.array([costs[list(unit)].sum() for unit in units])
    plans = []
    for share in balance(of_units, num_ranks):
        members = None if units is None else [units[at] for at in share]
        plans.append(_plan_share(share, members, lengths, room, kinds))
    for plan in plans:
        plan.sort(key=lambda batch: -float(costs[batch].sum()))
    num_batches = max(map(len, plans))
    return [plan + [[] for _ in range(num_batches - len(plan))] for plan in plans]


def _plan_share(
    share: Sequence[int],
    units: Sequence[Unit] | None,
    lengths: Sequence[int],
    room: Room,
    kinds: Sequence[Hashable] | None,
) -> list[list[int]]:
    """The batches of one rank, in indices of the step; `units` are those of the share."""
    indices = share if units is None else [index for unit in units for index in unit]
    ends = None if units is None else np.cumsum([0, *map(len, units)]).tolist()
    batches = plan_batches(
        [lengths[index] for index in indices],
        room,
        kinds=None if kinds is None else [kinds[index] for index in indices],
        units=None if ends is None else [range(start, stop) for start, stop in pairwise(ends)],
    )
    return [sorted(indices[at] for at in batch) for batch in batches]
