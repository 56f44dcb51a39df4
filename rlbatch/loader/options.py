"""How a `RolloutLoader` chooses, checks and hands over samples. Values only; knows no sample."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from rlbatch.errors import RecordError
from rlbatch.packing import Cost
from rlbatch.records import PURPOSES, Purpose
from rlbatch.records.structure import check_choice, check_scalar

KeepGroups: TypeAlias = Literal["no", "step", "batch"]
KEEP_GROUPS: tuple[KeepGroups, ...] = ("no", "step", "batch")
OnFault: TypeAlias = Literal["error", "quarantine"]
ON_FAULT: tuple[OnFault, ...] = ("error", "quarantine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Which samples share an optimiser step, and how the ranks share it. The same on all ranks but `rank`."""

    step_samples: int = 1024
    """Samples of one step, over all ranks, at most; they are checked before the first is handed over, and
    packed together: some hundreds are needed to fill batches well. What one trajectory became comes in one
    step, which has more samples where that is more. Of a store that is followed each step but the last has
    exactly so many, and may cut a trajectory apart."""
    seed: int | None = None
    """Shuffles each epoch anew, by seed and epoch alone; None: stored order."""
    keep_groups: KeepGroups = "no"
    """`step`: samples of one group come in one step; `batch`: in one micro-batch, too. Where one of a group
    is set aside, so is the group."""
    cost: Cost = field(default_factory=Cost)
    """What is shared out evenly."""
    rank: int = 0
    """This process among those that train different samples of the same step."""
    num_ranks: int = 1
    follow_timeout_s: float | None = None
    """The store is still being written: it is followed to the end that its writer says. `store-overdue` is
    raised after so many seconds without a new shard. None: the store is complete."""

    def __post_init__(self) -> None:
        check_choice("Steps.keep_groups", self.keep_groups, KEEP_GROUPS)
        _check_counts(self, ("step_samples", "num_ranks"), least=1)
        _check_counts(self, ("rank", "seed"), least=0)
        if self.rank >= self.num_ranks:
            raise RecordError(
                f"Steps.rank: expected less than num_ranks = {self.num_ranks}, found {self.rank}"
            )
        if self.follow_timeout_s is not None:
            self._check_follow(self.follow_timeout_s)

    def _check_follow(self, timeout_s: float) -> None:
        check_scalar("Steps.follow_timeout_s", timeout_s, float)
        if not timeout_s > 0:
            raise RecordError(f"Steps.follow_timeout_s: expected more than 0 seconds, found {timeout_s}")
        if self.seed is not None or self.keep_groups != "no":
            raise RecordError(
                "Steps.follow_timeout_s: expected stored order (seed None, keep_groups 'no') of a store that "
                f"is being written, found seed {self.seed} and keep_groups {self.keep_groups!r}. Which "
                "samples will come is not known, so they cannot be shuffled, nor a group known to be whole; "
                "write groups one after another, and let step_samples be a multiple of their size"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """What samples must be, and what becomes of those that are not."""

    purpose: Purpose = "train"
    """`audit` takes raw, greedy and incomparable turns too."""
    vocab_size: int | None = None
    """Rows of the model's head; ids beyond it are a fault."""
    group_size: int | None = None
    """Trajectories that every group of a step must have."""
    max_version_lag: int | None = None
    """How many versions older than `RolloutLoader.trainer_version` a trained token may be."""
    on_fault: OnFault = "error"
    """`quarantine`: faulty samples are set aside and counted, and the rest goes on."""
    quarantine: str | Path | None = None
    """The directory for what is set aside, apart from the store; made where it is missing."""

    def __post_init__(self) -> None:
        check_choice("Checks.purpose", self.purpose, PURPOSES)
        check_choice("Checks.on_fault", self.on_fault, ON_FAULT)
        _check_counts(self, ("vocab_size", "group_size"), least=1)
        _check_counts(self, ("max_version_lag",), least=0)
        if (self.on_fault == "quarantine") != (self.quarantine is not None):
            raise RecordError(
                "Checks.quarantine: expected a directory with on_fault='quarantine', and none without, "
                f"found {self.quarantine!r} with {self.on_fault!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """How batches are handed over."""

    prefetch: int = 2
    """Batches made ahead of the consumer, on a thread of the loader; 0: made when they are asked for."""
    device: torch.device | str | None = None
    """Where batches are handed over; None: on the host. To a CUDA device they are copied from pinned memory,
    on a stream of their own."""

    def __post_init__(self) -> None:
        _check_counts(self, ("prefetch",), least=0)


def _check_counts(options: object, names: Sequence[str], *, least: int) -> None:
    """Whole numbers of at least this, where they are not None."""
    for name in names:
        value = getattr(options, name)
        label = f"{type(options).__name__}.{name}"
        if value is None:
            continue
        check_scalar(label, value, int)
        if value < least:
            raise RecordError(f"{label}: expected at least {least}, found {value}")


DEFAULT_STEPS = Steps()
DEFAULT_CHECKS = Checks()
DEFAULT_FEED = Feed()
