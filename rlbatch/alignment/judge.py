"""From tables to verdicts: which segments are suspect, what is wrong with them, how far the rest drifted.

One `Judge` sees one step, or one file: limits apply to what it has seen together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.company import without_names_of_few, without_odd_names
from rlbatch.alignment.drift import Drift, age_of, drift_findings, metrics
from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.exhibits import Exhibit, exhibit_of
from rlbatch.alignment.hypotheses.passes import passes_differ, passes_disagree
from rlbatch.alignment.inquiry import Inquiry
from rlbatch.alignment.kept_sets import outside, outside_finding
from rlbatch.alignment.limits import COMPANY_MIN, COMPANY_SHARE, Limits
from rlbatch.alignment.logits import LogitsFor
from rlbatch.alignment.measure import COLUMN, Measured
from rlbatch.alignment.pools import Pool
from rlbatch.alignment.ratio_means import ratio_findings
from rlbatch.alignment.scene import place_of
from rlbatch.alignment.strays import MOST_STRAYS, Stray, in_other_batches
from rlbatch.alignment.subtle_limits import LOOK_TURN_TOKENS
from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where
from rlbatch.records import Provenance
from rlbatch.soundness.distributions import in_force


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found of everything a judge has seen."""

    findings: tuple[Finding, ...]
    """Errors first, and of these what is named."""
    judged: bool
    """False where there was too little to go by, or part could not be compared: not called sound."""
    metrics: dict[str, float]
    """`rlbatch/<quantity>/<reduction>`, over segments without an accepted cause."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity error."""
        return tuple(found for found in self.findings if found.severity == "error")


@dataclass(slots=True, kw_only=True)
class Judge:
    """Collects the findings of measured batches, then judges them together."""

    trainer_version: int | None
    """Version of the trainer's weights; None where they are those that sampled everything, as in an audit."""
    limits: Limits = field(default_factory=Limits)
    logits_for: LogitsFor | None = None
    """Asked for the logits of suspects; without it some causes cannot be told from each other."""
    findings: list[Finding] = field(default_factory=list)
    """Of single segments, and after `settle` of pools of them."""
    drift: Drift = field(default_factory=Drift)
    """Complete after `settle`."""
    pools: dict[Provenance, Pool] = field(default_factory=dict)
    """Segments without a cause of their own, by provenance, until `settle`."""
    strays: list[Stray] = field(default_factory=list)
    """Rows that are off without a cause, until `settle`."""
    num_trained: int = 0
    num_excluded_segments: int = 0
    """Segments with an accepted cause, or not comparable."""
    all_comparable: bool = True

    def add(self, measured: Measured) -> None:
        """Judge the segments of one batch; waits for its table.

        Raises:
            AlignmentError: `batch-mismatch`, where `logits_for` fails or answers what was not asked.
        """
        batch, table = measured.batch, measured.table()
        self._count(measured, table)
        comparable = np.zeros(len(table), bool)
        for provenance, mine in measured.by_provenance:
            comparable[mine] = provenance.comparable(batch.purpose)
        age_by_version = {
            version: age_of(version, self.trainer_version) for version in set(batch.segment_versions)
        }
        ages = np.array([age_by_version[version] for version in batch.segment_versions], np.int64)
        inquiry = Inquiry(
            measured=measured, table=table, comparable=comparable, ages=ages, logits_for=self.logits_for
        )
        ahead = self._refuse_ahead(measured, table)
        told = inquiry.exact()
        looked = self._look(inquiry, set(told))
        single = inquiry.single([*told, *looked])
        everything = without_names_of_few(told | looked | single)
        for _, mine in measured.by_provenance:
            named = without_odd_names({at: found for at, found in everything.items() if mine[at]})
            told |= {at: named[at] for at in named.keys() & told.keys()}
            single |= {at: named[at] for at in named.keys() & single.keys()}
        self.findings += told.values()
        explained = np.zeros(len(table), bool)
        errors = [at for at, found in (told | single).items() if found.severity == "error"]
        explained[[*errors, *looked]] = True
        refused = ~comparable & (table[:, COLUMN["count"]] > 0)
        self.all_comparable &= not refused.any()
        self.findings += [
            _incomparable(measured, int(index)) for index in np.flatnonzero(refused & ~explained)
        ]
        kept = comparable & ~explained & ~ahead
        tails = kept & (table[:, COLUMN["max_abs_log_ratio"]] > self.limits.ratio_tail)
        for at in np.flatnonzero(tails).tolist():
            self._pool_of(batch.provenances[at]).findings.append(
                _ratio_tail(inquiry.evidence(at), self.limits)
            )
        for at, found in single.items():
            pool = self._pool_of(batch.provenances[at])
            if found.code == "dropout-on":
                # It is on in all rows of the step, and what was found of them beside it is its work.
                pool.cause = found
            else:
                pool.findings.append(found)
            if found.code == "unexplained" and found.severity == "error" and len(self.strays) < MOST_STRAYS:
                self.strays.append(Stray.of(inquiry.evidence(at), found))
        self.num_excluded_segments += int((~kept).sum())
        for provenance, mine in measured.by_provenance:
            pool = self._pool_of(provenance)
            drawn = provenance.trainable
            pool.drift.add_rows(table[mine & kept], ages[mine & kept], drawn=drawn)
            pool.num_segments += int((mine & kept).sum())
        beyond = kept & (table[:, COLUMN["num_trainer_not_finite"]] > 0)
        for index in np.flatnonzero(beyond).tolist():
            self._tell_outside(inquiry.evidence(index), int(ages[index]))

    def settle(self) -> None:
        """Judge what pools of segments show together: then findings and drift are complete."""
        pools, self.pools = self.pools, {}
        causes = [pool.cause for pool in pools.values() if pool.cause is not None]
        restless = next((cause for cause in causes if cause.code == "dropout-on"), None)
        if restless is not None:
            for pool in pools.values():
                pool.cause = restless
        placed, self.strays = in_other_batches(self.strays), []
        doubts: list[Finding] = []
        for pool in pools.values():
            told = self.findings if pool.is_explained else doubts
            if pool.cause is not None and pool.cause not in told:
                told.append(pool.cause)
            if pool.is_explained:
                self.num_excluded_segments += pool.num_segments
            else:
                self.findings += [placed.get(id(found), found) for found in pool.findings]
                self.drift.merge(pool.drift)
        # A doubt says nothing beside what is told for sure.
        self.findings += [] if self.findings else doubts
        # A judge that has settled may go to another process; it asks nobody any more.
        self.logits_for = None

    def merge(self, other: "Judge") -> None:
        """Take in what another judge has seen of the same step."""
        self.settle()
        other.settle()
        self.findings += other.findings
        self.drift.merge(other.drift)
        self.num_trained += other.num_trained
        self.num_excluded_segments += other.num_excluded_segments
        self.all_comparable &= other.all_comparable

    def verdict(self) -> Verdict:
        """What all batches together say."""
        self.settle()
        findings = [*self.findings, *drift_findings(self.drift.by_age, self.limits)]
        # What is told for sure, and what old data does, may move the mean as well.
        if not any(found.severity == "error" or found.code == "stale" for found in findings):
            findings += ratio_findings(self.drift.by_age)
        # A cause that is named says more than what is not: it is read first, and gives the error its code.
        findings.sort(key=lambda found: (found.severity != "error", found.code == "unexplained"))
        doubtful = any(found.code in DOUBTS for found in findings)
        return Verdict(
            findings=tuple(findings),
            judged=self.all_comparable and not doubtful and self.drift.judged(self.limits),
            metrics=metrics(self.drift, self.num_excluded_segments),
        )

    def _refuse_ahead(self, measured: Measured, table: NDArray[np.float64]) -> NDArray[np.bool_]:
        """[G]; trained segments of weights that the trainer does not have yet: of no known age."""
        newest = self.trainer_version
        if newest is None:
            return np.zeros(len(table), bool)
        versions = np.array(measured.batch.segment_versions, np.int64)
        ahead: NDArray[np.bool_] = (versions > newest) & (table[:, COLUMN["count"]] > 0)
        if ahead.any():
            self.findings.append(_version_ahead(measured, np.flatnonzero(ahead).tolist(), newest))
        return ahead

    def _count(self, measured: Measured, table: NDArray[np.float64]) -> None:
        trained = measured.num_trained()
        self.num_trained += trained
        outside = trained - int(table[:, COLUMN["count"]].sum())
        if outside:
            self.findings.append(_outside(measured, outside))

    def _pool_of(self, provenance: Provenance) -> Pool:
        return self.pools.setdefault(provenance, Pool())

    def _look(self, inquiry: Inquiry, told: set[int]) -> dict[int, Finding]:
        """Let every pool look at its segments; the causes of those of pools that one explains as a whole."""
        explained: dict[int, Finding] = {}
        left = inquiry.comparable.copy()
        left[list(told)] = False
        # What few segments are left of a batch that something explains, they are no pool of their own.
        if len(told) >= COMPANY_MIN and left.sum() <= COMPANY_SHARE * len(told):
            return explained
        for provenance, mine in inquiry.measured.by_provenance:
            pool = self._pool_of(provenance)
            pool.look(inquiry, mine & left & (inquiry.ages == 0))
        self._compare_passes(inquiry)
        for provenance, mine in inquiry.measured.by_provenance:
            pool = self._pool_of(provenance)
            if pool.cause is not None and pool.is_explained:
                explained |= dict.fromkeys(np.flatnonzero(mine & left).tolist(), pool.cause)
        return explained

    def _compare_passes(self, inquiry: Inquiry) -> None:
        """A trainer that does not agree with itself is no matter of provenance: it is told of all pools."""
        exhibits = [each for pool in self.pools.values() for each in pool.exhibits]
        told = passes_differ([*_of_first_sequence(inquiry, exhibits), *exhibits])
        for pool in self.pools.values():
            if told is not None and pool.exhibits and not pool.is_explained:
                pool.cause = told

    def _tell_outside(self, evidence: Evidence, age: int) -> None:
        """Tokens outside the trainer's own kept set: pointed out, and counted in their pool."""
        found = outside_finding(evidence)
        if found is not None:
            self.findings.append(found)
            self.pools[evidence.provenance].drift.add_outside(age, int(outside(evidence).sum()))


def _of_first_sequence(inquiry: Inquiry, exhibits: Sequence[Exhibit]) -> list[Exhibit]:
    """What nothing before it in the pack can have spoilt, where all that was looked at comes later."""
    if any(each.index <= 0 for each in exhibits) or not passes_disagree(exhibits):
        return []
    batch = inquiry.measured.batch
    first = [at for at, part in enumerate(batch.host_segments) if batch.ref_of(part) is batch.refs[0]]
    looked = [
        exhibit_of(inquiry.evidence(at), max_tokens=LOOK_TURN_TOKENS)
        for at in first
        if inquiry.comparable[at]
    ]
    return [each for each in looked if each is not None]


DOUBTS = ("unexplained", "kld-high", "ratio-mean-off", "prefix-differs")
"""Codes that leave open what is wrong, even as warnings: with one of them nothing is called sound."""

REASONS = (*DOUBTS, "incomparable", "nothing-trained")
"""Codes that say themselves why something is not judged."""


def _incomparable(measured: Measured, index: int) -> Finding:
    batch = measured.batch
    provenance = batch.provenances[index]
    greedy = batch.purpose != "audit" and provenance.sampling.greedy
    return finding(
        "greedy-sampled" if greedy else "incomparable",
        severity="warning" if batch.purpose == "audit" else "error",
        where=place_of(batch, index, measured.number),
        expected="logprobs that the trainer can compute from its logits and a temperature alone",
        found=f"{provenance.logprobs_mode} logprobs of tokens sampled with {in_force(provenance)}",
    )


def _version_ahead(measured: Measured, ahead: Sequence[int], newest: int) -> Finding:
    batch = measured.batch
    found = max(batch.segment_versions[at] for at in ahead)
    return finding(
        "version-ahead",
        severity="warning" if batch.purpose == "audit" else "error",
        where=place_of(batch, ahead[0], measured.number),
        expected=f"versions up to the trainer's {newest}",
        found=f"version {found} in {len(ahead)} of {len(batch.host_segments)} turns of the batch",
    )


def _outside(measured: Measured, num_tokens: int) -> Finding:
    batch = measured.batch
    ref = batch.refs[0]
    return finding(
        "mask-without-logprob",
        where=Where(batch=measured.number, path=ref.path),
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
