"""`check_sound` and `require_sound`: all checks over a list of samples, as findings or as an error."""

from collections.abc import Sequence

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, SoundnessError, Where
from rlbatch.records import PURPOSES, Origin, Purpose, Sample, check_samples, origins_of
from rlbatch.records.structure import check_choice
from rlbatch.soundness.checks import CHECKS, Subject


def check_sound(
    samples: Sequence[Sample],
    *,
    purpose: Purpose,
    vocab_size: int | None = None,
    origins: Sequence[Origin] | None = None,
) -> tuple[Finding, ...]:
    """Everything that can be known of the samples without a trainer; no fault of theirs raises.

    Args:
        samples: as they came from one file, or from anywhere.
        purpose: under `audit` greedy tokens are fine, and what cannot be compared is a warning.
        vocab_size: rows of the model's head, where a model is at hand.
        origins: one a sample, for the findings; without, its place in `samples`.
    """
    check_choice("purpose", purpose, PURPOSES)
    check_samples(samples)
    origins = origins_of(samples, origins)
    findings = [
        found
        for sample, origin in zip(samples, origins, strict=True)
        for check in CHECKS
        for found in check(Subject(sample=sample, purpose=purpose, vocab_size=vocab_size, origin=origin))
    ]
    if samples and not any(sample.loss_mask.any() for sample in samples):
        findings.append(
            finding(
                "nothing-trained",
                where=Where(path=origins[0].path),
                expected="at least one trained token",
                found=f"none in {len(samples)} samples of {sum(len(sample) for sample in samples)} tokens",
            )
        )
    return tuple(findings)


def require_sound(
    samples: Sequence[Sample],
    *,
    purpose: Purpose = "train",
    vocab_size: int | None = None,
    origins: Sequence[Origin] | None = None,
) -> Sequence[Sample]:
    """The same samples, or an error that names every fault in them.

    Raises:
        SoundnessError: a finding of error level; warnings pass.
        RecordError: what is given is no sequence of samples.
    """
    findings = check_sound(samples, purpose=purpose, vocab_size=vocab_size, origins=origins)
    errors = [found for found in findings if found.severity == "error"]
    if errors:
        raise SoundnessError.of(*errors)
    return samples
