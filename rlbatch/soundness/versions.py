"""Checks on which weights drew which tokens."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Severity, Where
from rlbatch.records import UNKNOWN_VERSION, Purpose
from rlbatch.soundness.subject import Members, Subject


def version_too_old(subject: Subject) -> Iterator[Finding]:
    """Trained tokens that weights drew which are further behind the trainer's than the caller allows."""
    newest, most = subject.expected.trainer_version, subject.expected.max_version_lag
    if newest is None or most is None:
        return
    version = subject.policy_version
    old = (version < newest - most) & (version != UNKNOWN_VERSION)
    for run, tokens in subject.by_run(np.flatnonzero(old & subject.loss_mask & subject.sampled)):
        oldest = int(version[subject.tokens_of(run)][tokens].min())
        yield finding(
            "version-too-old",
            severity=_severity(subject.expected.purpose),
            where=subject.where_run(run, tokens),
            expected=f"at most {most} versions behind the trainer's {newest}",
            found=f"version {oldest}, {newest - oldest} behind{_share(subject, run, tokens)}",
        )


def version_ahead(subject: Subject) -> Iterator[Finding]:
    """Trained tokens of weights that the trainer does not have yet."""
    newest = subject.expected.trainer_version
    if newest is None:
        return
    version = subject.policy_version
    for run, tokens in subject.by_run(
        np.flatnonzero((version > newest) & subject.loss_mask & subject.sampled)
    ):
        found = int(version[subject.tokens_of(run)][tokens].max())
        yield finding(
            "version-ahead",
            severity=_severity(subject.expected.purpose),
            where=subject.where_run(run, tokens),
            expected=f"versions up to the trainer's {newest}",
            found=f"version {found}, {found - newest} ahead{_share(subject, run, tokens)}",
        )


def version_unknown(members: Members) -> Iterator[Finding]:
    """Samples of which none says a version, beside a trainer that has one."""
    newest = members.expected.trainer_version
    if newest is None:
        return
    num_trained = 0
    for sample in members.samples:
        versions = sample.policy_version[sample.loss_mask]
        if (versions != UNKNOWN_VERSION).any():
            return
        num_trained += len(versions)
    if num_trained:
        yield finding(
            "version-unknown",
            where=Where(path=members.origins[0].path),
            expected=f"versions to hold against the trainer's {newest}",
            found=f"none at any of {num_trained} trained tokens in {len(members.samples)} samples",
        )


def version_gap(subject: Subject) -> Iterator[Finding]:
    """Sampled tokens without a version in a turn that has one for others."""
    version = subject.policy_version
    # A turn that has both has a change between them.
    at = subject.version_changes
    at = at[(version[at] == UNKNOWN_VERSION) | (version[at - 1] == UNKNOWN_VERSION)]
    for run, _ in subject.by_run(at):
        tokens = np.flatnonzero(version[subject.tokens_of(run)] == UNKNOWN_VERSION)
        yield finding(
            "version-gap",
            where=subject.where_run(run, tokens),
            expected="a version for every token of a turn, or for none",
            found=f"no version at token {subject.first_token(run) + tokens[0]}{_share(subject, run, tokens)}",
        )


def version_mixed(subject: Subject) -> Iterator[Finding]:
    """Turns that several versions of the weights drew."""
    version, at = subject.policy_version, subject.version_changes
    at = at[(version[at] != UNKNOWN_VERSION) & (version[at - 1] != UNKNOWN_VERSION)]
    for run, tokens in subject.by_run(at):
        versions = version[subject.tokens_of(run)]
        shown = ", ".join(map(str, [versions[0], *versions[tokens]]))
        back = bool((versions[tokens] < versions[tokens - 1]).any())
        yield finding(
            "version-mixed",
            where=subject.where_run(run),
            expected="one version of the weights for one turn",
            found=f"versions {shown}; the first change is at token {subject.first_token(run) + tokens[0]}",
            likely="the labels are of other tokens: weights do not go back" if back else None,
        )


def _severity(purpose: Purpose) -> Severity:
    return "warning" if purpose == "audit" else "error"


def _share(subject: Subject, run: int, tokens: NDArray[np.intp]) -> str:
    length = int(subject.runs.stop[run] - subject.runs.start[run])
    return f", {len(tokens)} of {length} tokens"
