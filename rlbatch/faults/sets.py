"""Faults that show in several samples together, or against what the caller says besides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlbatch.faults.planting import Fault, NoPlaceError
from rlbatch.faults.subtle import drifted
from rlbatch.records import Sample

TRAINER_VERSION = 100
"""What the trainer's version must be said to be for `version-too-old`; any lag bound below it will do."""


MAX_AGE = 4
"""Versions that stale data is old at most."""
MOVED_A_VERSION = 0.45
"""Nats by which an update moves a logit, in the spread: a KLD of 0.01, below what is high by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFault:
    """One way to spoil a list of samples as a list."""

    code: str
    """Of the finding that names it."""
    story: str
    """How it comes about in real pipelines."""
    spoil: Callable[[list[Sample], list[int]], list[Sample]]
    """All samples and the indices of those to spoil, in order; what comes of them."""
    min_samples: int = 1
    """Fewer offer no place for this fault."""

    def plant(
        self, samples: Sequence[Sample], rng: np.random.Generator, *, share: float = 1.0
    ) -> list[Sample]:
        """A list with `share` of the samples spoilt, at least one.

        Raises:
            NoPlaceError: there are fewer than `min_samples`.
        """
        if len(samples) < self.min_samples:
            raise NoPlaceError(
                f"plant: expected at least {self.min_samples} samples for {self.code!r}, found {len(samples)}"
            )
        count = max(1, round(share * len(samples)))
        chosen = rng.choice(len(samples), count, replace=False)
        return self.spoil(list(samples), sorted(chosen.tolist()))


def _duplicated(samples: list[Sample], chosen: list[int]) -> list[Sample]:
    return samples + [samples[index] for index in chosen]


def _group_cut(samples: list[Sample], chosen: list[int]) -> list[Sample]:
    # One trajectory leaves each group that is hit, so that something of every group stays.
    lost: dict[str | None, str] = {}
    for index in chosen:
        lost.setdefault(samples[index].group_id, samples[index].trajectory_id)
    return [sample for sample in samples if lost.get(sample.group_id) != sample.trajectory_id]


def _teacher_lost(samples: list[Sample], chosen: list[int]) -> list[Sample]:
    # All but one at most: a field that none has is missing in none.
    lacking = set(chosen[: len(samples) - 1])
    return [
        replace(sample, teacher_logprobs=None if index in lacking else sample.inference_logprobs)
        for index, sample in enumerate(samples)
    ]


def _version_too_old(sample: Sample, rng: np.random.Generator) -> Sample:
    return replace(sample, policy_version=np.where(sample.turn >= 0, np.int32(0), np.int32(-1)))


def _version_ahead(sample: Sample, rng: np.random.Generator) -> Sample:
    newer = np.int32(TRAINER_VERSION + 1)
    return replace(sample, policy_version=np.where(sample.turn >= 0, newer, np.int32(-1)))


def _versions_lost(samples: list[Sample], chosen: list[int]) -> list[Sample]:
    # All of them, whatever the share: it lies in how turns are made.
    return [replace(each, policy_version=np.full(len(each), -1, np.int32)) for each in samples]


def _stale(samples: Sequence[Sample], rng: np.random.Generator) -> list[Sample]:
    # Every other one is current, the others one to four versions old: each update moves the logits as much.
    ages = [at // 2 % MAX_AGE + 1 if at % 2 else 0 for at in range(len(samples))]
    return [_aged(sample, age, rng) for sample, age in zip(samples, ages, strict=True)]


def _aged(sample: Sample, age: int, rng: np.random.Generator) -> Sample:
    version = np.where(sample.turn >= 0, np.int32(TRAINER_VERSION - age), np.int32(-1))
    moved = drifted(sample, slice(None), MOVED_A_VERSION * age**0.5, rng) if age else sample
    return replace(moved, policy_version=version)


SETS: tuple[SetFault | Fault, ...] = (
    SetFault(
        code="duplicate-sample",
        story="A shard was read twice.",
        spoil=_duplicated,
    ),
    SetFault(
        code="group-incomplete",
        story="A trajectory that was too long was dropped after advantages were computed.",
        spoil=_group_cut,
        min_samples=2,
    ),
    SetFault(
        code="field-missing-in-some",
        story="The teacher's server failed for some of the samples.",
        spoil=_teacher_lost,
        min_samples=2,
    ),
    Fault(
        code="stale",
        story="Rollouts waited in a queue while the weights went on.",
        corrupt=_stale,
        together=True,
    ),
    Fault(
        code="version-too-old",
        story="A server missed all updates of its weights.",
        corrupt=_version_too_old,
    ),
    Fault(
        code="version-ahead",
        story="The trainer's version was not counted up after its update.",
        corrupt=_version_ahead,
    ),
    SetFault(
        code="version-unknown",
        story="Turns were made by hand, without the versions of the weights that drew them.",
        spoil=_versions_lost,
    ),
)
