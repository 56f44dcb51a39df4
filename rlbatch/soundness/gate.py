"""`check_sound` and `require_sound`: all checks over a list of samples, as findings or as an error."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, SoundnessError, Where
from rlbatch.records import PURPOSES, Origin, Purpose, Sample, StoredSamples, check_samples, origins_of
from rlbatch.records.structure import check_choice
from rlbatch.soundness.distributions import (
    greedy_sampled,
    incomparable,
    modes_mixed,
    temperature_contradicted,
)
from rlbatch.soundness.members import (
    duplicate_sample,
    field_missing_in_some,
    group_incomplete,
    turn_prefix_broken,
)
from rlbatch.soundness.routing import routing_shapes_differ, routing_wrong
from rlbatch.soundness.stops import bos_wrong, finish_mismatch, mask_drops_eos, stop_overrun
from rlbatch.soundness.subject import Expectations, Members, Scratch, Subject
from rlbatch.soundness.tokens import (
    advantage_not_finite,
    impossible_other_logprobs,
    impossible_values,
    low_precision_logprobs,
    mask_without_logprob,
    token_out_of_range,
)
from rlbatch.soundness.versions import (
    version_ahead,
    version_gap,
    version_mixed,
    version_too_old,
    version_unknown,
)

PART_TOKENS = 2**18
"""Tokens that are looked at together: their arrays stay in a core's cache from check to check."""

CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    token_out_of_range,
    impossible_values,
    impossible_other_logprobs,
    low_precision_logprobs,
    mask_without_logprob,
    mask_drops_eos,
    bos_wrong,
    stop_overrun,
    finish_mismatch,
    routing_wrong,
    advantage_not_finite,
    temperature_contradicted,
    modes_mixed,
    greedy_sampled,
    incomparable,
    version_too_old,
    version_ahead,
    version_gap,
    version_mixed,
    turn_prefix_broken,
)
"""Every check on samples one by one, in the order in which findings about one sample are told."""

SET_CHECKS: tuple[Callable[[Members], Iterator[Finding]], ...] = (
    duplicate_sample,
    group_incomplete,
    field_missing_in_some,
    routing_shapes_differ,
)
"""Checks on how samples go together. Only what is trained goes together; an audit reads piece by piece."""


def check_sound(
    samples: Sequence[Sample],
    *,
    purpose: Purpose,
    vocab_size: int | None = None,
    origins: Sequence[Origin] | None = None,
    trainer_version: int | None = None,
    max_version_lag: int | None = None,
    group_size: int | None = None,
) -> tuple[Finding, ...]:
    """Everything that can be known of the samples without a trainer; no fault of theirs raises.

    Args:
        samples: as they came from one file, or from anywhere.
        purpose: under `audit` greedy tokens are fine, what cannot be compared is a warning, and whether the
            samples belong together is not looked at.
        vocab_size: rows of the model's head, where a model is at hand.
        origins: one a sample, for the findings; without, its place in `samples`.
        trainer_version: `policy_version` of the weights in the trainer.
        max_version_lag: how many versions older a trained token may be; needs `trainer_version`.
        group_size: trajectories that every group in `samples` must have.

    Raises:
        RecordError: what is given is no sequence of samples; a number below what it may be; a
            `max_version_lag` without a `trainer_version`.
    """
    check_choice("purpose", purpose, PURPOSES)
    check_samples(samples)
    origins = origins_of(samples, origins)
    expected = Expectations(
        purpose=purpose,
        vocab_size=vocab_size,
        trainer_version=trainer_version,
        max_version_lag=max_version_lag,
        group_size=group_size,
    )
    if not samples:
        return ()
    # A sequence need not give slices of itself; a tuple does.
    return _findings(
        Members(
            samples=tuple(samples),
            origins=tuple(origins),
            expected=expected,
            stretches=samples.stretches if isinstance(samples, StoredSamples) else (),
        )
    )


def require_sound(
    samples: Sequence[Sample],
    *,
    purpose: Purpose = "train",
    vocab_size: int | None = None,
    origins: Sequence[Origin] | None = None,
    trainer_version: int | None = None,
    max_version_lag: int | None = None,
    group_size: int | None = None,
) -> Sequence[Sample]:
    """The same samples, or an error that names every fault in them; the arguments of `check_sound`.

    Raises:
        SoundnessError: a finding of severity error; warnings pass.
        RecordError: what is given is no sequence of samples, or the numbers make no sense.
    """
    findings = check_sound(
        samples,
        purpose=purpose,
        vocab_size=vocab_size,
        origins=origins,
        trainer_version=trainer_version,
        max_version_lag=max_version_lag,
        group_size=group_size,
    )
    errors = [found for found in findings if found.severity == "error"]
    if errors:
        raise SoundnessError.of(*errors)
    return samples


def _findings(members: Members) -> tuple[Finding, ...]:
    findings, num_trained = [], 0
    scratch = Scratch()
    for part in members.parts(max_tokens=PART_TOKENS):
        subject = Subject.of(part, scratch)
        num_trained += int(np.count_nonzero(subject.loss_mask))
        findings += [found for check in CHECKS for found in check(subject)]
    if members.expected.purpose != "audit":
        findings += [found for check in SET_CHECKS for found in check(members)]
    if findings:
        # Sample by sample, as they lie in the list, and of one sample in the order of the checks.
        place = {(origin.path, origin.index): at for at, origin in enumerate(members.origins)}
        findings.sort(key=lambda found: place[found.where.path, found.where.sample or 0])
    findings += version_unknown(members)
    if not num_trained:
        findings.append(_nothing_trained(members))
    return tuple(findings)


def _nothing_trained(members: Members) -> Finding:
    num_tokens = sum(len(sample) for sample in members.samples)
    return finding(
        "nothing-trained",
        where=Where(path=members.origins[0].path),
        expected="at least one trained token",
        found=f"none in {len(members.samples)} samples of {num_tokens} tokens",
    )
