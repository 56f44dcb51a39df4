"""Where a pass over a store stands, in values that a checkpoint can hold, and where it goes on from there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from rlbatch.errors import RecordError
from rlbatch.records.structure import check_scalar

STATE_VERSION = 2
"""2: the samples of one trajectory come in one step."""

Plan: TypeAlias = list[list[list[int]]]
"""[rank][batch] -> samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Between two batches of one rank."""

    epoch: int = 0
    step: int = 0
    parts: tuple[tuple[int, int], ...] = ()
    """How the step was shared so far: (num_ranks, batches done on each), one for each number of ranks that
    worked at it; empty where it was not begun."""
    trainer_version: int | None = None
    """The version that the samples of the step were judged by."""
    num_batches: int = 0
    """Batches of this rank since the epoch began."""

    def begun(self, num_ranks: int) -> "Position":
        """The same, with the last part of this many ranks."""
        if self.parts and self.parts[-1][0] == num_ranks:
            return self
        return replace(self, parts=(*self.parts, (num_ranks, 0)))

    def after_batch(self) -> "Position":
        """One batch on, in a step that was begun."""
        num_ranks, done = self.parts[-1]
        parts = (*self.parts[:-1], (num_ranks, done + 1))
        return replace(self, parts=parts, num_batches=self.num_batches + 1)

    def after_step(self) -> "Position":
        """At the start of the next step."""
        return replace(self, step=self.step + 1, parts=(), trainer_version=None)


def plan_left(
    num_samples: int, parts: Sequence[tuple[int, int]], plan: Callable[[Sequence[int], int], Plan]
) -> Plan:
    """The plan that the last part is of: what earlier parts left, shared by its number of ranks.

    Args:
        num_samples: of the step.
        parts: of a position that was begun.
        plan: (samples, num_ranks) -> their plan; always the same for the same samples.

    Example:
        Four batches on two ranks, one done on each, then four ranks: the other two batches' samples are
        planned anew for four.

    Raises:
        RecordError: a part says that more was done than there was.
    """
    left: Sequence[int] = range(num_samples)
    for num_ranks, done in parts[:-1]:
        batches_of = _plan_with(done, plan(left, num_ranks))
        rest = [batch for batches in batches_of for batch in batches[done:]]
        left = sorted(index for batch in rest for index in batch)
    num_ranks, done = parts[-1]
    return _plan_with(done, plan(left, num_ranks))


def _plan_with(done: int, plan: Plan) -> Plan:
    """The plan, where it has as many batches as are said to be done: else the rest would be skipped."""
    if done > len(plan[0]):
        raise RecordError(
            f"load_state_dict: expected at most {len(plan[0])} batches done on each of {len(plan)} ranks, as "
            f"the step has, found {done}"
        )
    return plan


def to_state(position: Position, *, options: Mapping[str, Any], store: tuple[int, str]) -> dict[str, Any]:
    """A position as plain values, with what it is a position in.

    Args:
        position: as it stands.
        options: everything that the plans depend on.
        store: its fingerprint.
    """
    return {
        "version": STATE_VERSION,
        "position": {**asdict(position), "parts": [list(part) for part in position.parts]},
        "options": dict(options),
        "store": list(store),
    }


def from_state(state: Mapping[str, Any], *, options: Mapping[str, Any]) -> tuple[Position, tuple[int, str]]:
    """The position, and the fingerprint of the store that it is a position in.

    Raises:
        RecordError: not a state of this release, or of a loader with other options.
    """
    try:
        version, fields, saved = state["version"], dict(state["position"]), dict(state["options"])
        num_shards, checksum = state["store"]
        fields["parts"] = tuple((num_ranks, done) for num_ranks, done in fields["parts"])
        position = Position(**fields)
        _check_numbers(position)
        check_scalar("store", num_shards, int)
        if not isinstance(checksum, str):
            raise RecordError(f"store: expected a checksum, found {checksum!r}")
    except (TypeError, ValueError, LookupError) as error:
        raise RecordError(f"load_state_dict: expected what state_dict gave, found {error!r}") from error
    if version != STATE_VERSION:
        raise RecordError(f"load_state_dict: expected version {STATE_VERSION}, found {version!r}")
    for name, value in options.items():
        if saved.get(name) != value:
            raise RecordError(
                f"load_state_dict: expected {name} = {saved.get(name)!r}, as it was saved, found {value!r}"
            )
    return position, (num_shards, checksum)


def _check_numbers(position: Position) -> None:
    numbers = {
        "epoch": (position.epoch, 0),
        "step": (position.step, 0),
        "num_batches": (position.num_batches, 0),
        "trainer_version": (0 if position.trainer_version is None else position.trainer_version, 0),
    }
    for at, (num_ranks, done) in enumerate(position.parts):
        numbers |= {f"parts[{at}] num_ranks": (num_ranks, 1), f"parts[{at}] done": (done, 0)}
    for name, (value, least) in numbers.items():
        check_scalar(name, value, int)
        if value < least:
            raise RecordError(f"{name}: expected at least {least}, found {value}")
