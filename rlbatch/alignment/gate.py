"""`require_aligned`: nothing reaches backward, or at the latest the optimizer, that does not line up.

Three places to stand, one verdict: the whole step before its first backward (recommended), each micro-batch
between forward and backward, or deferred until just before `optimizer.step()`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import torch.distributed as dist
from torch import Tensor

from rlbatch.alignment.judge import Judge, Verdict
from rlbatch.alignment.limits import Limits
from rlbatch.alignment.measure import Measured, measure
from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import AlignmentError, Finding, RecordError


@dataclass(slots=True, kw_only=True)
class _Step:
    """The batches of one step on their way to one verdict."""

    measured: Sequence[Measured]
    judge: Judge
    group: "dist.ProcessGroup | None"
    is_whole: bool
    """A step that trains nothing is an error; one batch of it may."""
    verdict: Verdict | None = None

    def verify(self) -> Verdict:
        """Judge all batches, once; the same on every rank of the group.

        Raises:
            AlignmentError: a finding of error level, on this rank or another.
        """
        if self.verdict is None:
            for measured in self.measured:
                self.judge.add(measured)
            judge = self.judge if self.group is None else _agreed(self.judge, self.group)
            if judge.num_trained == 0:
                judge.findings.append(_nothing_trained(is_error=self.is_whole))
            self.verdict = judge.verdict()
        if self.verdict.errors:
            raise AlignmentError.of(*self.verdict.errors)
        return self.verdict


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """One batch that lines up, or will have been refused by `verify`. Finite everywhere."""

    log_ratio: Tensor
    """[B, T] trainer - inference, nats; 0 where nothing was compared. Gradient reaches the trainer."""
    ratio: Tensor
    """[B, T] exp of it; 1 where nothing was compared."""
    inference_kld: Tensor
    """[B, T] ratio - 1 - log_ratio, >= 0, nats; 0 where nothing was compared."""
    compared: Tensor
    """[B, T] bool: trained, finite on both sides, of comparable provenance."""
    _step: _Step = field(repr=False)

    def verify(self) -> None:
        """Wait for the verdict of the step: call it before `optimizer.step()` where `defer=True`.

        Raises:
            AlignmentError: the step has a finding of error level.
        """
        self._step.verify()

    @property
    def metrics(self) -> dict[str, float]:
        """`rlbatch/<quantity>/<reduction>` of the whole step, on all ranks together; verifies first."""
        return self._step.verify().metrics

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that are no errors, of the whole step; verifies first."""
        return self._step.verify().findings

    @property
    def judged(self) -> bool:
        """Whether the step had enough to go by, all comparable and without doubts; verifies first."""
        return self._step.verify().judged


@overload
def require_aligned(
    batch: Batch,
    trainer_logprobs: Tensor,
    *,
    trainer_version: int | None,
    limits: Limits = ...,
    group: "dist.ProcessGroup | None" = ...,
    defer: bool = ...,
) -> Alignment: ...
@overload
def require_aligned(
    batch: Sequence[Batch],
    trainer_logprobs: Sequence[Tensor],
    *,
    trainer_version: int | None,
    limits: Limits = ...,
    group: "dist.ProcessGroup | None" = ...,
    defer: bool = ...,
) -> list[Alignment]: ...
def require_aligned(
    batch: Batch | Sequence[Batch],
    trainer_logprobs: Tensor | Sequence[Tensor],
    *,
    trainer_version: int | None,
    limits: Limits = Limits(),  # noqa: B008  frozen
    group: "dist.ProcessGroup | None" = None,
    defer: bool = False,
) -> Alignment | list[Alignment]:
    """Prove that trainer and inference logprobs speak of the same tokens, and give the ratios.

    Args:
        batch: a batch, or all micro-batches of a step, which are judged together.
        trainer_logprobs: [B, T] float32 or float64, nats, of `batch.target_ids`; one a batch.
        trainer_version: `policy_version` of the trainer's weights; None where they are those that sampled.
        limits: for aggregates; a cause that is found is an error whatever they say.
        group: processes of one step, which get one verdict; each must call, with its part. None judges this
            process alone, also where torch.distributed runs.
        defer: judge in `Alignment.verify`, `.metrics` or `.warnings` instead, without waiting here.

    Returns:
        An `Alignment` a batch, in the shape that was given.

    Raises:
        AlignmentError: a finding of error level, on every rank of the group alike. Warnings do not raise.
        RecordError: not as many logprobs as batches, or none; with a group that too is an AlignmentError.
    """
    _check_version(trainer_version)
    step = _Step(
        measured=_measured_together(batch, trainer_logprobs, group, defer=defer),
        judge=Judge(trainer_version=trainer_version, limits=limits),
        group=group,
        is_whole=not isinstance(batch, Batch),
    )
    if not defer:
        step.verify()
    alignments = [
        Alignment(
            log_ratio=part.ratio.log_ratio,
            ratio=part.ratio.ratio,
            inference_kld=part.ratio.inference_kld,
            compared=part.compared,
            _step=step,
        )
        for part in step.measured
    ]
    return alignments[0] if isinstance(batch, Batch) else alignments


def _check_version(trainer_version: object) -> None:
    is_version = isinstance(trainer_version, int) and not isinstance(trainer_version, bool)
    if trainer_version is not None and not is_version:
        raise RecordError(f"trainer_version: expected an int or None, found {trainer_version!r}")


def _measured(batch: object, trainer_logprobs: object) -> list[Measured]:
    """One pass over each batch."""
    batches = [batch] if isinstance(batch, Batch) else batch
    logprobs = [trainer_logprobs] if isinstance(batch, Batch) else trainer_logprobs
    if not isinstance(batches, Sequence) or not all(isinstance(item, Batch) for item in batches):
        raise RecordError(f"batch: expected a Batch or a sequence of them, found {type(batch).__name__}")
    if not isinstance(logprobs, Sequence) or len(batches) != len(logprobs) or not batches:
        found = len(logprobs) if isinstance(logprobs, Sequence) else type(logprobs).__name__
        raise RecordError(
            f"require_aligned: expected logprobs for each batch, found {len(batches)} batches and {found}"
        )
    return [measure(item, values) for item, values in zip(batches, logprobs, strict=True)]


def _measured_together(
    batch: object, trainer_logprobs: object, group: "dist.ProcessGroup | None", *, defer: bool
) -> list[Measured]:
    """The same on every rank; where one cannot measure, all raise, so that none waits for it later.

    A rank that can goes on to the verdict's own collective. Where that is put off, the ranks meet here.
    """
    try:
        measured = _measured(batch, trainer_logprobs)
    except Exception as error:
        if group is None:
            raise
        findings = error.findings if isinstance(error, AlignmentError) else (_failed(error),)
        judge = Judge(trainer_version=None, findings=list(findings))
        raise AlignmentError.of(*_agreed(judge, group).verdict().errors) from error
    if group is not None and defer:
        errors = _agreed(Judge(trainer_version=None), group).verdict().errors
        if errors:
            raise AlignmentError.of(*errors)
    return measured


def _agreed(mine: Judge, group: "dist.ProcessGroup") -> Judge:
    """What all ranks have seen, in the order of ranks."""
    parts: list[Judge] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group=group)
    together = Judge(trainer_version=mine.trainer_version, limits=mine.limits)
    for rank, part in enumerate(parts):
        place = dist.get_global_rank(group, rank)
        part.findings = [replace(found, where=replace(found.where, rank=place)) for found in part.findings]
        together.merge(part)
    return together


def _failed(error: Exception) -> Finding:
    return finding(
        "batch-mismatch",
        expected="batches and logprobs that can be measured",
        found=f"{type(error).__name__}: {error}",
    )


def _nothing_trained(*, is_error: bool) -> Finding:
    return finding(
        "nothing-trained",
        severity="error" if is_error else "warning",
        expected="at least one trained token",
        found="none",
    )
