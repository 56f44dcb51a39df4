"""`require_aligned`: nothing reaches backward, or at the latest the optimizer, that does not line up.

Three places to stand, one verdict: the whole step before its first backward (recommended), each micro-batch
between forward and backward, or deferred until just before `optimizer.step()`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import torch.distributed as dist
from torch import Tensor

from rlbatch.alignment.drift import Drift
from rlbatch.alignment.judge import Judge, Verdict
from rlbatch.alignment.limits import Limits
from rlbatch.alignment.measure import Measured, measure
from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import AlignmentError, Finding, RecordError, Where


@dataclass(slots=True, kw_only=True)
class _Step:
    """The batches of one step on their way to one verdict."""

    measured: Sequence[Measured]
    trainer_version: int | None
    limits: Limits
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
            judge = Judge(trainer_version=self.trainer_version, limits=self.limits)
            for measured in self.measured:
                judge.add(measured)
            if self.group is not None:
                _agree(judge, self.group)
            if judge.num_trained == 0:
                judge.findings.append(self._nothing_trained())
            self.verdict = judge.verdict()
        if self.verdict.errors:
            raise AlignmentError.of(*self.verdict.errors)
        return self.verdict

    def _nothing_trained(self) -> Finding:
        num_sequences = sum(len(measured.batch.refs) for measured in self.measured)
        return finding(
            "nothing-trained",
            severity="error" if self.is_whole else "warning",
            expected="at least one trained token",
            found=f"none in {len(self.measured)} batches of {num_sequences} sequences",
        )


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
        group: processes of one step, which get one verdict; every one must call with its part.
        defer: judge in `Alignment.verify`, `.metrics` or `.warnings` instead, without waiting here.

    Returns:
        An `Alignment` a batch, in the shape that was given.

    Raises:
        AlignmentError: a finding of error level, on every rank of the group alike. Warnings do not raise.
        RecordError: not as many logprobs as batches, or none.
    """
    batches = [batch] if isinstance(batch, Batch) else list(batch)
    logprobs = [trainer_logprobs] if isinstance(trainer_logprobs, Tensor) else list(trainer_logprobs)
    if len(batches) != len(logprobs) or not batches:
        raise RecordError(
            f"require_aligned: expected logprobs for each batch, found {len(batches)} and {len(logprobs)}"
        )
    try:
        measured = [measure(item, values) for item, values in zip(batches, logprobs, strict=True)]
    except AlignmentError as error:
        if group is not None:
            raise AlignmentError.of(*_shared(error.findings, group)) from error
        raise
    step = _Step(
        measured=measured,
        trainer_version=trainer_version,
        limits=limits,
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


def _agree(judge: Judge, group: "dist.ProcessGroup") -> None:
    """Make every rank's judge know what all ranks found, in the order of ranks."""
    mine = (judge.findings, judge.drift, judge.num_trained, judge.num_excluded_segments, judge.all_comparable)
    parts: list[tuple[list[Finding], Drift, int, int, bool]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group=group)
    judge.findings, judge.drift = [], Drift()
    judge.num_trained = judge.num_excluded_segments = 0
    for rank, (findings, drift, num_trained, num_excluded, all_comparable) in enumerate(parts):
        judge.findings += [_at_rank(found, rank) for found in findings]
        judge.drift.merge(drift)
        judge.num_trained += num_trained
        judge.num_excluded_segments += num_excluded
        judge.all_comparable &= all_comparable


def _shared(findings: Sequence[Finding], group: "dist.ProcessGroup") -> tuple[Finding, ...]:
    """The errors of all ranks, from one that could not even measure: the others must not wait for it."""
    judge = Judge(trainer_version=None, findings=list(findings))
    _agree(judge, group)
    return judge.verdict().errors


def _at_rank(found: Finding, rank: int) -> Finding:
    where: Where = replace(found.where, rank=rank)
    return replace(found, where=where)
