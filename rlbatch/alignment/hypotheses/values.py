"""Values that nothing but themselves convicts: not finite, positive, of the wrong sign, exactly 0."""

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.kept_sets import outside
from rlbatch.alignment.limits import (
    LAG_ACCEPTED_SHARE,
    LEFT_MOST,
    RENORMALISED_ERRORS,
    RENORMALISED_LEAST,
    RENORMALISED_MIN_TOKENS,
    SIGN_MIN_TOKENS,
    ZERO_CLEAR,
    ZERO_DEEP,
    ZERO_MIN_EVIDENCE,
    ZERO_NOISY,
    ZERO_NOISY_MIN_TOKENS,
    ZERO_NOISY_SHARE,
    ZERO_OLD_MIN_EVIDENCE,
    ZERO_OLD_MIN_TOKENS,
    ZERO_OLD_SHARE,
    ZERO_REST_TOKENS,
    ZERO_TRAINER_BELOW,
)
from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch.records import Provenance
from rlbatch.soundness.values import POSITIVE_TOLERANCE, VALUE_FAULTS, found_text
from rlbatch_kernels import RESIDUAL_CLIP


def trainer_not_finite(evidence: Evidence) -> Finding | None:
    """NaN or infinity on the trainer's side, but for -inf of a token outside its kept set."""
    bad = np.flatnonzero(evidence.trained & ~np.isfinite(evidence.trainer) & ~outside(evidence))
    if not len(bad):
        return None
    return finding(
        "trainer-not-finite",
        where=evidence.where(bad),
        expected="finite trainer logprobs at trained tokens",
        found=found_text(evidence.trainer, bad, evidence.first_token),
    )


def sign_flipped(evidence: Evidence) -> Finding | None:
    """Minus one side is the other; the side above 0 is the one that is flipped."""
    usable = evidence.usable
    trainer, inference = evidence.trainer[usable], evidence.inference[usable]
    off = np.minimum(np.abs(trainer - inference), RESIDUAL_CLIP)
    left = np.minimum(np.abs(trainer + inference), RESIDUAL_CLIP)
    above = {"engine": inference > POSITIVE_TOLERANCE, "trainer": trainer > POSITIVE_TOLERANCE}
    side = max(above, key=lambda name: int(above[name].sum()))
    if np.count_nonzero(above[side] & (off - left > LEFT_MOST)) < SIGN_MIN_TOKENS:
        return None
    if left.mean() > min(LEFT_MOST, LAG_ACCEPTED_SHARE * off.mean()):
        return None
    return finding(
        "sign-flipped",
        where=evidence.place,
        expected="logprobs of at most 0 on both sides",
        found=f"the {side}'s are above 0 at {int(above[side].sum())} of {len(off)} tokens; with the sign "
        f"turned they leave {left.mean():.3g} nats of {off.mean():.3g}",
    )


def impossible_value(evidence: Evidence) -> Finding | None:
    """NaN, infinity, a marker or a positive value on the engine's side."""
    for fault in VALUE_FAULTS:
        bad = np.flatnonzero(evidence.trained & fault.test(evidence.inference))
        if len(bad):
            return finding(
                fault.code,
                where=evidence.where(bad),
                expected=fault.expected,
                found=found_text(evidence.inference, bad, evidence.first_token),
            )
    return None


def trainer_positive(evidence: Evidence) -> Finding | None:
    """A positive value on the trainer's side."""
    positive: NDArray[np.bool_] = evidence.usable & (evidence.trainer > POSITIVE_TOLERANCE)
    bad = np.flatnonzero(positive)
    if not len(bad):
        return None
    return finding(
        "logprob-positive",
        where=evidence.where(bad),
        expected="trainer logprobs of at most 0",
        found=f"the trainer's is {found_text(evidence.trainer, bad, evidence.first_token)}",
        likely="the trainer passed logits, or a kernel is wrong",
        fix="pass rlbatch.scoring.trainer_logprobs(model, batch), and compare your kernel with it on one row",
    )


def zero_filled(evidence: Evidence) -> Finding | None:
    """Exact zeros where the parameters in force rule them out."""
    if not evidence.comparable or zero_is_possible(evidence.provenance):
        return None
    zero = evidence.usable & (evidence.inference == 0)
    bad = np.flatnonzero(zero & (evidence.trainer < ZERO_TRAINER_BELOW))
    needed = ZERO_MIN_EVIDENCE if evidence.current else ZERO_OLD_MIN_EVIDENCE
    num_zeros = np.count_nonzero(zero)
    rest = evidence.at_zero()[evidence.usable & ~zero]
    if evidence.current and len(rest) >= ZERO_REST_TOKENS and rest.mean() > evidence.most_left:
        # All of it is off: the zeros belong to other tokens, as the rest does.
        return None
    if len(rest) and rest.mean() > ZERO_NOISY:
        # Where the trainer's own noise takes certainty away, only several clear cases are no chance.
        bad = bad[evidence.trainer[bad] < ZERO_CLEAR]
        # Of many true zeros some are bound to be unsure in the trainer.
        least = max(ZERO_NOISY_MIN_TOKENS, ZERO_NOISY_SHARE * num_zeros)
        needed = np.inf if len(bad) < least else ZERO_OLD_MIN_EVIDENCE
    if not evidence.current and len(bad) < max(ZERO_OLD_MIN_TOKENS, ZERO_OLD_SHARE * num_zeros):
        # Older weights were certain of tokens of which the trainer no longer is.
        return None
    if -evidence.trainer[bad].sum() < needed:
        return None
    is_deep = np.count_nonzero(evidence.trainer[bad] < ZERO_DEEP) >= ZERO_NOISY_MIN_TOKENS
    if not is_deep and _renormalised(evidence, zero):
        return None
    return finding(
        "zero-filled",
        where=evidence.where(bad),
        expected="an inference logprob of exactly 0 only where the trainer's probability is 1",
        found=f"0 at {len(bad)} of {int(evidence.trained.sum())} trained tokens, where the trainer has "
        f"{evidence.trainer[bad].mean():.3g} nats on average",
    )


def _renormalised(evidence: Evidence, zero: NDArray[np.bool_]) -> bool:
    """Whether values that are not 0 lie above the trainer's too: then a kept set of one made the zeros."""
    above = -evidence.log_ratio()[evidence.usable & ~zero]
    if len(above) < RENORMALISED_MIN_TOKENS:
        return False
    error = float(above.std()) / len(above) ** 0.5
    return bool(above.mean() > max(RENORMALISED_LEAST, RENORMALISED_ERRORS * error))


def zero_is_possible(provenance: Provenance) -> bool:
    """Whether an exact 0 can be right: a kept set of one token, a grammar, a forced token."""
    sampling = provenance.sampling
    if provenance.logprobs_mode == "raw":
        return sampling.structured_output
    return sampling.truncated or sampling.reshaped
