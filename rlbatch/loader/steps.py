"""One step: its samples, checked, and the plan that every rank derives from them alike."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.batch import Allocate, Batch
from rlbatch.collate import Padding, collate
from rlbatch.errors import Finding
from rlbatch.loader.checking import Candidates, check_step
from rlbatch.loader.figures import Found
from rlbatch.loader.options import Checks, Steps
from rlbatch.loader.position import Plan, Position, plan_left
from rlbatch.packing import Room, StepInfo, plan_ranks
from rlbatch.records import TOKEN_FIELDS, Origin, Purpose, Sample
from rlbatch.storage.columns import TEXT_ENCODING
from rlbatch.storage.shard import Shard

FILLER_TOKENS = 2
"""The shortest sequence that has a target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How batches are laid out."""

    room: Room
    padding: Padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The sound samples of one step, and what was set aside."""

    samples: tuple[Sample, ...]
    origins: tuple[Origin, ...]
    totals: StepInfo
    """Of the sound ones; epoch, step and place are not said yet."""
    set_aside: Candidates
    faults: tuple[tuple[Finding, ...], ...]
    """One entry a sample that is set aside."""
    found: Found
    sources: Mapping[str, Shard]
    """As in `Candidates`."""

    def require_unchanged(self, indices: Sequence[int]) -> None:
        """Refuse to go on with samples whose bytes can have changed since they were verified.

        Of no samples, with any of the step: a filler can hold views of one.

        Raises:
            StorageError: store-changed, a shard is gone or was written to.
        """
        paths = {self.origins[index].path for index in indices}
        for path, shard in self.sources.items():
            if not indices or path in paths:
                shard.require_unchanged()

    def release(self) -> None:
        """Let the system take back the memory that the samples are views of."""
        for shard in self.sources.values():
            shard.release()


def load_step(
    candidates: Candidates, checks: Checks, shape: Shape, steps: Steps, *, trainer_version: int | None
) -> Step:
    """Check the candidates and part the sound ones from the rest.

    Raises:
        SoundnessError: as `check_step`.
    """
    checked = check_step(
        candidates, checks, shape.room, keep_groups=steps.keep_groups, trainer_version=trainer_version
    )
    faults = tuple(checked.faults.values())
    samples = tuple(candidates.samples[at] for at in checked.sound)
    return Step(
        samples=samples,
        origins=tuple(candidates.origins[at] for at in checked.sound),
        totals=_totals(samples, trainer_version=trainer_version, is_shared=steps.num_ranks > 1),
        set_aside=Candidates(
            samples=[candidates.samples[at] for at in checked.faults],
            origins=[candidates.origins[at] for at in checked.faults],
            repeats={},
            sources=candidates.sources,
        ),
        faults=faults,
        sources=candidates.sources,
        found=Found(
            num_quarantined=len(faults),
            findings=(*checked.warnings, *(found for each in faults for found in each)),
        ),
    )


def _totals(samples: Sequence[Sample], *, trainer_version: int | None, is_shared: bool) -> StepInfo:
    ids = "\n".join(sample.sample_id for sample in samples)
    return StepInfo(
        epoch=0,
        step=0,
        index=0,
        num_batches=0,
        num_samples=len(samples),
        num_trajectories=len({sample.trajectory_id for sample in samples}),
        num_tokens=sum(map(len, samples)),
        num_loss_tokens=sum(sample.num_loss_tokens for sample in samples),
        trainer_version=trainer_version,
        samples_crc32=zlib.crc32(ids.encode(*TEXT_ENCODING)) if is_shared else None,
    )


def plan_step(step: Step, shape: Shape, steps: Steps, position: Position) -> Plan:
    """The plan of the part of the step that `position` stands in."""
    lengths = [len(sample) for sample in step.samples]
    kinds = [sample.logprobs_modes for sample in step.samples]
    groups = [sample.group_id for sample in step.samples]

    def plan(left: Sequence[int], num_ranks: int) -> Plan:
        shares = plan_ranks(
            [lengths[index] for index in left],
            shape.room,
            num_ranks=num_ranks,
            cost=steps.cost,
            kinds=[kinds[index] for index in left] if len(set(kinds)) > 1 else None,
            units=_units([groups[index] for index in left]) if steps.keep_groups == "batch" else None,
        )
        return [[[left[at] for at in batch] for batch in batches] for batches in shares]

    return plan_left(len(step.samples), position.parts, plan)


def make_batch(
    step: Step, indices: Sequence[int], shape: Shape, *, info: StepInfo, purpose: Purpose, allocate: Allocate
) -> Batch:
    """One micro-batch of the step; of no samples, a filler."""
    samples = [step.samples[index] for index in indices] or [_filler(step.samples)]
    origins = [step.origins[index] for index in indices] or [Origin(path=None, index=0)]
    return collate(
        samples,
        layout=shape.room.layout,
        purpose=purpose,
        origins=origins,
        padding=shape.padding,
        allocate=allocate,
        step=info,
    )


def _filler(samples: Sequence[Sample]) -> Sample:
    """Tokens that nobody sampled, of a trajectory that does not begin here: it counts nowhere.

    A rank without samples left still has to take part in every pass through a model that is sharded. So it
    has every field that one of the step's samples has, with the value for what was not sampled: two tokens,
    or, where there are media, the shortest sample with some, since their places are among its tokens.
    """
    shown = min((sample for sample in samples if sample.media), key=len, default=None)
    token_ids = np.zeros(FILLER_TOKENS, np.int32) if shown is None else shown.token_ids
    columns: dict[str, Any] = {
        spec.name: np.full(len(token_ids), spec.padding, spec.dtype)
        for spec in TOKEN_FIELDS
        if not spec.optional or any(getattr(sample, spec.name) is not None for sample in samples)
    }
    return Sample(
        **columns | {"token_ids": token_ids},
        routed_experts=_any_experts(samples, len(token_ids) - 1),
        media=() if shown is None else shown.media,
        sample_id="filler",
        trajectory_id="filler",
        sibling=1,
        num_siblings=2,
        provenances=(),
    )


def _any_experts(samples: Sequence[Sample], num_rows: int) -> NDArray[np.integer] | None:
    """[num_rows, L, K] in the form of the first sample's that has any: experts 0 to K - 1 everywhere.

    They are distinct, as a router's choice is, so that a replay runs as with any other sample.
    """
    given = next((each.routed_experts for each in samples if each.routed_experts is not None), None)
    if given is None:
        return None
    _, num_layers, num_choices = given.shape
    return np.tile(np.arange(num_choices, dtype=given.dtype), (num_rows, num_layers, 1))


def _units(groups: Sequence[str | None]) -> list[list[int]]:
    """Places of each group's samples; samples of no group alone."""
    members: dict[str | int, list[int]] = {}
    for at, group in enumerate(groups):
        members.setdefault(group or at, []).append(at)
    return list(members.values())
