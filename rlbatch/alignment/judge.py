"""From tables to verdicts: which segments are suspect, what is wrong with them, how far the rest drifted.

One `Judge` sees one step, or one file: limits apply to what it has seen together.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.alignment.causes import causes_of
from rlbatch.alignment.drift import Drift, age_of, drift_findings, metrics
from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.limits import LAG_ACCEPTED_SHARE, SUSPECT_MEAN, Limits
from rlbatch.alignment.measure import COLUMN, Measured
from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where
from rlbatch.soundness.distributions import in_force
from rlbatch.soundness.values import POSITIVE_TOLERANCE, SENTINEL_AT
from rlbatch_kernels import LAGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found of everything a judge has seen."""

    findings: tuple[Finding, ...]
    """Errors first."""
    judged: bool
    """False where there was too little to go by, or part could not be compared: not called sound."""
    metrics: dict[str, float]
    """`rlbatch/<quantity>/<reduction>`, over segments without an accepted cause."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of error level."""
        return tuple(found for found in self.findings if found.severity == "error")


@dataclass(slots=True, kw_only=True)
class Judge:
    """Collects the findings of measured batches, then judges them together."""

    trainer_version: int | None
    """Version of the trainer's weights; None where they are those that sampled everything, as in an audit."""
    limits: Limits = field(default_factory=Limits)
    findings: list[Finding] = field(default_factory=list)
    """Of single segments."""
    drift: Drift = field(default_factory=Drift)
    num_trained: int = 0
    num_excluded_segments: int = 0
    """Segments with an accepted cause, or not comparable."""
    all_comparable: bool = True

    def add(self, measured: Measured) -> None:
        """Judge the segments of one batch; waits for its table."""
        batch, table = measured.batch, measured.table()
        self._count(measured, table)
        comparable = np.array([item.comparable(batch.purpose) for item in batch.provenances], bool)
        ages = np.array(
            [age_of(version, self.trainer_version) for version in batch.segment_versions], np.int64
        )
        explained = np.zeros(len(table), bool)
        for index in np.flatnonzero(_suspect(measured, comparable)):
            evidence = _evidence(measured, int(index), bool(comparable[index]), current=ages[index] == 0)
            explained[index] = self._diagnose(evidence)
        refused = ~comparable & (table[:, COLUMN["count"]] > 0)
        self.all_comparable &= not refused.any()
        self.findings += [_incomparable(batch, int(index)) for index in np.flatnonzero(refused & ~explained)]
        kept = comparable & ~explained
        for index in np.flatnonzero(kept & (table[:, COLUMN["max_abs_log_ratio"]] > self.limits.ratio_tail)):
            evidence = _evidence(measured, int(index), True, current=ages[index] == 0)
            self.findings.append(_ratio_tail(evidence, self.limits))
        self.num_excluded_segments += int((~kept).sum())
        self.drift.add_rows(table[kept], ages[kept])

    def merge(self, other: "Judge") -> None:
        """Take in what another judge has seen of the same step."""
        self.findings += other.findings
        self.drift.merge(other.drift)
        self.num_trained += other.num_trained
        self.num_excluded_segments += other.num_excluded_segments
        self.all_comparable &= other.all_comparable

    def verdict(self) -> Verdict:
        """What all batches together say."""
        findings = [*self.findings, *drift_findings(self.drift.by_age, self.limits)]
        findings.sort(key=lambda found: found.severity != "error")
        doubtful = any(found.code in DOUBTS for found in findings)
        return Verdict(
            findings=tuple(findings),
            judged=self.all_comparable and not doubtful and self.drift.judged(self.limits),
            metrics=metrics(self.drift, self.num_excluded_segments),
        )

    def _count(self, measured: Measured, table: NDArray[np.float64]) -> None:
        trained = measured.num_trained()
        self.num_trained += trained
        outside = trained - int(table[:, COLUMN["count"]].sum())
        if outside:
            self.findings.append(_outside(measured.batch, outside))

    def _diagnose(self, evidence: Evidence) -> bool:
        """Tell the first cause that explains a suspect; whether it leaves the drift.

        What is an error on its own would only be told again by the aggregate.
        """
        told = next((found for cause in causes_of(evidence) if (found := cause(evidence)) is not None), None)
        if told is None:
            return False
        self.findings.append(told)
        return told.severity == "error"


DOUBTS = ("unexplained", "kld-high")
"""Codes that leave open what is wrong, even as warnings: with one of them nothing is called sound."""


def _suspect(measured: Measured, comparable: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[G]; segments with a window that some hypothesis may explain. Cheap, and wide on purpose."""
    windows = measured.windows()
    zero = _lag_mean(windows, 0)
    others = np.stack([_lag_mean(windows, lag) for lag in LAGS if lag])
    anyway = (
        (windows[:, COLUMN["num_trainer_not_finite"]] > 0)
        | (windows[:, COLUMN["max_inference"]] > POSITIVE_TOLERANCE)
        | (others < LAG_ACCEPTED_SHARE * zero).any(axis=0)
    )
    # Values of another distribution are off, and may be 0 or absent, without any fault.
    if_comparable = (
        (windows[:, COLUMN["num_inference_not_finite"]] > 0)
        | (windows[:, COLUMN["num_zeros"]] > 0)
        | (windows[:, COLUMN["max_abs_log_ratio"]] > -SENTINEL_AT / 2)
        | (zero >= SUSPECT_MEAN)
    )
    if not len(comparable):
        return comparable
    any_in = np.logical_or.reduceat
    suspect: NDArray[np.bool_] = any_in(anyway, measured.first_window) | (
        comparable & any_in(if_comparable, measured.first_window)
    )
    return suspect


def _lag_mean(table: NDArray[np.float64], lag: int) -> NDArray[np.float64]:
    """[W] mean clipped |difference| at a lag; infinite without pairs, so that it never wins."""
    pairs = table[:, COLUMN[f"residual_pairs_{lag}"]]
    total = table[:, COLUMN[f"residual_sum_{lag}"]]
    empty = np.inf if lag else 0.0
    return np.divide(total, pairs, out=np.full_like(total, empty), where=pairs > 0)


def _place(batch: Batch, index: int) -> Where:
    segment = batch.host_segments[index]
    ref = batch.ref_of(segment)
    start, stop = batch.tokens_of(segment)
    return Where(
        path=ref.path,
        sample=ref.index,
        trajectory=ref.trajectory_id,
        turn=segment.turn,
        start=start,
        stop=stop,
    )


def _evidence(measured: Measured, index: int, comparable: bool, *, current: bool) -> Evidence:
    batch = measured.batch
    segment = batch.host_segments[index]

    def on_host(tensor: Tensor) -> NDArray[np.float64]:
        values: NDArray[np.float64] = tensor[segment.row, segment.start : segment.stop].double().cpu().numpy()
        return values

    return Evidence(
        trainer=on_host(measured.trainer_logprobs),
        inference=on_host(batch.inference_logprobs),
        trained=on_host(batch.loss_mask).astype(bool),
        provenance=batch.provenances[index],
        comparable=comparable,
        current=bool(current),
        place=_place(batch, index),
    )


def _incomparable(batch: Batch, index: int) -> Finding:
    provenance = batch.provenances[index]
    greedy = batch.purpose == "train" and provenance.sampling.greedy
    return finding(
        "greedy-sampled" if greedy else "incomparable",
        severity="error" if batch.purpose == "train" else "warning",
        where=_place(batch, index),
        expected="logprobs that the trainer can compute from its logits and a temperature alone",
        found=f"{provenance.logprobs_mode} logprobs of tokens sampled with {in_force(provenance)}",
    )


def _outside(batch: Batch, num_tokens: int) -> Finding:
    ref = batch.refs[0]
    return finding(
        "mask-without-logprob",
        where=Where(path=ref.path) if ref.path else None,
        expected="loss_mask True inside segments of sampled tokens only",
        found=f"{num_tokens} trained positions outside of them, in a batch of {len(batch.refs)} sequences",
    )


def _ratio_tail(evidence: Evidence, limits: Limits) -> Finding:
    log_ratio = np.where(evidence.usable, evidence.trainer - evidence.inference, 0.0)
    worst = np.flatnonzero(np.abs(log_ratio) > limits.ratio_tail)
    at = worst[:1]
    return finding(
        "ratio-tail",
        where=evidence.where(at),
        expected=f"|log_ratio| of at most {limits.ratio_tail:g} nats",
        found=f"trainer {evidence.trainer[at[0]]:.4g}, inference {evidence.inference[at[0]]:.4g}; "
        f"{len(worst)} such tokens in the turn",
    )
