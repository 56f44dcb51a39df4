"""`require_aligned`: nothing reaches backward, or at the latest the optimizer, that does not line up.

Three places to stand, one verdict: the whole step before its first backward (recommended), each micro-batch
between forward and backward, or deferred until just before `optimizer.step()`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import overload

import torch.distributed as dist
from torch import Tensor, nn

from rlbatch.alignment.agreement import Occasion, agree, occasion_of
from rlbatch.alignment.drift import too_few
from rlbatch.alignment.judge import REASONS, Judge, Verdict
from rlbatch.alignment.limits import Limits
from rlbatch.alignment.logits import LogitsFor
from rlbatch.alignment.measure import Measured, measure
from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import AlignmentError, Finding, RecordError


@dataclass(slots=True, kw_only=True)
class _Step:
    """The batches of one step on their way to one verdict."""

    measured: Sequence[Measured]
    trainer_version: int | None
    limits: Limits
    logits_for: LogitsFor | None
    group: "dist.ProcessGroup | None"
    is_whole: bool
    """A step that trains nothing is an error; one batch of it may."""
    verdict: Verdict | None = None

    def verify(self) -> Verdict:
        """Judge all batches, once; the same on every rank of the group, again and again.

        Raises:
            AlignmentError: a finding of severity error, on this rank or another.
        """
        if self.verdict is None:
            judge = Judge(
                trainer_version=self.trainer_version, limits=self.limits, logits_for=self.logits_for
            )
            try:
                for measured in self.measured:
                    judge.add(measured)
                judge.settle()
            except Exception as error:
                if self.group is None:
                    raise
                judge.findings += _told_by(error)
            occasion = occasion_of(_batches(self.measured), is_whole=self.is_whole, is_early=False)
            try:
                self.verdict = _together(judge, self.group, occasion)
            except AlignmentError as error:
                # Asked again, this rank would wait anew, for ranks that may be at another step by now.
                self.verdict = Verdict(findings=error.findings, judged=False, metrics={})
                raise
        if self.verdict.errors:
            raise AlignmentError.of(*self.verdict.errors)
        return self.verdict


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alignment:
    """One batch that lines up, or will have been refused by `verify`. Finite everywhere.

    The tensors are computed from the batch and the logprobs when one of them is first asked for, and kept:
    a step that is judged before its passes with gradients does not pay for them. To change batch or logprobs
    in place before that is an AlignmentError (`batch-mismatch`) then.
    """

    _measured: Measured = field(repr=False)
    _step: _Step = field(repr=False)

    @property
    def log_ratio(self) -> Tensor:
        """[B, T] trainer - inference, nats; 0 where nothing was compared. Gradient reaches the trainer."""
        return self._measured.ratio.log_ratio

    @property
    def ratio(self) -> Tensor:
        """[B, T] exp of it; 1 where nothing was compared."""
        return self._measured.ratio.ratio

    @property
    def inference_kld(self) -> Tensor:
        """[B, T] ratio - 1 - log_ratio, >= 0, nats; 0 where nothing was compared."""
        return self._measured.ratio.inference_kld

    @property
    def compared(self) -> Tensor:
        """[B, T] bool: trained, finite on both sides, of comparable provenance."""
        return self._measured.compared

    def verify(self) -> None:
        """Wait for the verdict of the step: call it before `optimizer.step()` where `defer=True`.

        Raises:
            AlignmentError: the step has a finding of severity error.
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
    logits_for: LogitsFor | None = ...,
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
    logits_for: LogitsFor | None = ...,
    group: "dist.ProcessGroup | None" = ...,
    defer: bool = ...,
) -> list[Alignment]: ...
def require_aligned(
    batch: Batch | Sequence[Batch],
    trainer_logprobs: Tensor | Sequence[Tensor],
    *,
    trainer_version: int | None,
    limits: Limits = Limits(),  # noqa: B008  frozen
    logits_for: LogitsFor | None = None,
    group: "dist.ProcessGroup | None" = None,
    defer: bool = False,
) -> Alignment | list[Alignment]:
    """Prove that trainer and inference logprobs speak of the same tokens, and give the ratios.

    Args:
        batch: a batch, or all micro-batches of a step, which are judged together.
        trainer_logprobs: [B, T] float32 or float64, nats, of `batch.target_ids`; one a batch.
        trainer_version: `policy_version` of the trainer's weights; None where they are those that sampled.
        limits: for aggregates; a cause that is found is an error whatever they say.
        logits_for: gives the trainer's logits for single suspect segments, as `LogitsFor` says; without it
            some causes cannot be told from each other. `rlbatch.scoring.logits_for(model)` makes one.
        group: processes of one step, which get one verdict; each must call, with its part. None judges this
            process alone, also where torch.distributed runs.
        defer: judge in `Alignment.verify`, `.metrics` or `.warnings` instead, without waiting here.

    Returns:
        An `Alignment` a batch, in the shape that was given.

    Raises:
        AlignmentError: a finding of severity error, on every rank of the group alike. Warnings do not raise.
        RecordError: not as many logprobs as batches, or none; with a group that too is an AlignmentError.
            And limits, logits_for or group of another type, on this rank alone.
    """
    _check_arguments(limits, logits_for, group)
    is_whole = not isinstance(batch, Batch)
    try:
        version = _version(trainer_version)
        measured = _measured(batch, trainer_logprobs)
    except Exception as error:
        if group is None:
            raise
        judge = Judge(trainer_version=None, limits=limits)
        judge.findings += _told_by(error)
        occasion = Occasion(num_batches=None, is_whole=is_whole, is_early=defer)
        raise AlignmentError.of(*_together(judge, group, occasion).errors) from error
    if group is not None and defer:
        # The verdict is put off, so this is where a rank that cannot measure tells the others: after this
        # they may wait for it in collectives of the model.
        occasion = occasion_of(_batches(measured), is_whole=is_whole, is_early=True)
        errors = agree(Judge(trainer_version=version, limits=limits), occasion, group).verdict().errors
        if errors:
            raise AlignmentError.of(*errors)
    step = _Step(
        measured=measured,
        trainer_version=version,
        limits=limits,
        logits_for=logits_for,
        group=group,
        is_whole=is_whole,
    )
    if not defer:
        step.verify()
    alignments = [Alignment(_measured=part, _step=step) for part in step.measured]
    return alignments[0] if isinstance(batch, Batch) else alignments


def _batches(measured: Sequence[Measured]) -> list[Batch]:
    return [part.batch for part in measured]


def _check_arguments(limits: object, logits_for: object, group: object) -> None:
    """Refuse what only a suspect, or the first collective, would stumble over.

    Raises:
        RecordError: which argument, and what it should be.
    """
    if not isinstance(limits, Limits):
        raise RecordError(f"limits: expected rlbatch.alignment.Limits(...), found {type(limits).__name__}")
    if isinstance(logits_for, nn.Module) or not (logits_for is None or callable(logits_for)):
        raise RecordError(
            "logits_for: expected a function as rlbatch.scoring.logits_for(model) makes one, "
            f"found {type(logits_for).__name__}"
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise RecordError(
            "group: expected a process group that this process is in, as torch.distributed.group.WORLD, or "
            f"None, found {group!r}"
        )


def _version(trainer_version: object) -> int | None:
    if trainer_version is None:
        return None
    if isinstance(trainer_version, bool) or not isinstance(trainer_version, Integral):
        raise RecordError(f"trainer_version: expected an int or None, found {trainer_version!r}")
    return int(trainer_version)


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
    numbers = range(len(batches)) if len(batches) > 1 else [None]
    return [
        measure(item, values, number=number)
        for item, values, number in zip(batches, logprobs, numbers, strict=True)
    ]


def _together(judge: Judge, group: "dist.ProcessGroup | None", occasion: Occasion) -> Verdict:
    """The verdict on what this rank has seen, or all ranks of the group."""
    if group is not None:
        judge = agree(judge, occasion, group)
    if judge.num_trained == 0 and not any(found.severity == "error" for found in judge.findings):
        judge.findings.append(_nothing_trained(is_error=occasion.is_whole))
    verdict = judge.verdict()
    told = {found.code for found in verdict.findings}
    if verdict.judged or verdict.errors or not told.isdisjoint(REASONS):
        return verdict
    few = too_few(judge.drift.by_age, judge.limits)
    return replace(verdict, findings=(*verdict.findings, *few))


def _told_by(error: Exception) -> tuple[Finding, ...]:
    """What a rank that cannot go on tells the others."""
    if isinstance(error, AlignmentError):
        return error.findings
    failed = finding(
        "batch-mismatch",
        expected="batches and logprobs that can be measured",
        found=f"{type(error).__name__}: {error}",
    )
    return (failed,)


def _nothing_trained(*, is_error: bool) -> Finding:
    return finding(
        "nothing-trained",
        severity="error" if is_error else "warning",
        expected="at least one trained token",
        found="none",
    )
