"""Hypotheses on one suspect segment: each says what it would explain, or nothing.

Pure functions from `Evidence` to a finding, in one visible tuple. They run on suspects only, on the host.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.lags import Shift, shift_from, whole_shift
from rlbatch.alignment.limits import (
    GROSS_MEAN,
    GROSS_MIN_TOKENS,
    GROSS_TRIMMED_SHARE,
    STRANGER_MIN_TOKENS,
    STRANGER_MIN_UNCERTAIN,
    STRANGER_RANK,
    STRANGER_SHARE,
    UNCERTAIN_BELOW,
    WINDOW,
    ZERO_OLD_TRAINER_BELOW,
    ZERO_TRAINER_BELOW,
)
from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where
from rlbatch.records import Provenance
from rlbatch.soundness.values import VALUE_FAULTS, found_text
from rlbatch_kernels import RESIDUAL_CLIP


def trainer_not_finite(evidence: Evidence) -> Finding | None:
    """NaN or infinity on the trainer's side."""
    bad = np.flatnonzero(evidence.trained & ~np.isfinite(evidence.trainer))
    if not len(bad):
        return None
    return finding(
        "trainer-not-finite",
        where=evidence.where(bad),
        expected="finite trainer logprobs at trained tokens",
        found=found_text(evidence.trainer, bad, evidence.first_token),
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


def shifted(evidence: Evidence) -> Finding | None:
    """Another lag than 0 explains the whole segment."""
    shift = whole_shift(evidence)
    return None if shift is None else _shift_finding("shifted", evidence, shift)


def shifted_from(evidence: Evidence) -> Finding | None:
    """Lag 0 explains the segment up to some token, and another lag from there on."""
    shift = shift_from(evidence)
    if shift is None:
        return None
    return _shift_finding("shifted-from", evidence.part(shift.start, len(evidence.trained)), shift)


def zero_filled(evidence: Evidence) -> Finding | None:
    """Exact zeros where the parameters in force rule them out."""
    if not evidence.comparable or zero_is_possible(evidence.provenance):
        return None
    below = ZERO_TRAINER_BELOW if evidence.current else ZERO_OLD_TRAINER_BELOW
    bad = np.flatnonzero(evidence.usable & (evidence.inference == 0) & (evidence.trainer < below))
    if not len(bad):
        return None
    return finding(
        "zero-filled",
        where=evidence.where(bad),
        expected="an inference logprob of exactly 0 only where the trainer's probability is 1",
        found=f"0 at {len(bad)} of {int(evidence.trained.sum())} trained tokens, where the trainer has "
        f"{evidence.trainer[bad].mean():.3g} nats on average",
    )


def unexplained(evidence: Evidence) -> Finding | None:
    """A stretch that is grossly off, which nothing before explains.

    Of older weights it is a warning, unless the values agree no better than those of strangers: age moves
    logprobs, but it does not give a token another token's.
    """
    if not evidence.comparable:
        return None
    gross = [window for window in _windows(evidence) if _trimmed_mean(window) >= GROSS_MEAN]
    if not gross:
        return None
    stretch = evidence.part(
        gross[0].first_token - evidence.first_token,
        gross[-1].first_token - evidence.first_token + len(gross[-1].trained),
    )
    residuals = ", ".join(f"{value:.3g} at {lag:+d}" for lag, value in stretch.residuals().items())
    is_error = evidence.current or _are_strangers(stretch)
    return finding(
        "unexplained",
        severity="error" if is_error else "warning",
        where=stretch.place,
        expected=f"mean |log_ratio| below {GROSS_MEAN} nats, without the largest tenth",
        found=f"{_trimmed_mean(stretch):.3g} nats over {int(stretch.usable.sum())} tokens; "
        f"all of them by lag {residuals}",
    )


CAUSES: tuple[Callable[[Evidence], Finding | None], ...] = (
    trainer_not_finite,
    impossible_value,
    shifted_from,
    shifted,
    zero_filled,
    unexplained,
)
"""By precedence: the first that finds something is told.

A shift moves true zeros onto other tokens, so it is asked about before zeros are.
"""


def causes_of(evidence: Evidence) -> Iterator[Callable[[Evidence], Finding | None]]:
    """The hypotheses that apply: only the trainer's where nothing comparable was reported."""
    reported = evidence.comparable or np.isfinite(evidence.inference[evidence.trained]).any()
    yield from CAUSES if reported else (trainer_not_finite,)


def zero_is_possible(provenance: Provenance) -> bool:
    """Whether an exact 0 can be right: a kept set of one token, a grammar, a forced token."""
    sampling = provenance.sampling
    if provenance.logprobs_mode == "raw":
        return sampling.structured_output
    return sampling.truncated or sampling.reshaped


def _shift_finding(code: str, evidence: Evidence, shift: Shift) -> Finding:
    residuals = evidence.residuals()
    place: Where = evidence.place
    rivals = "".join(f", {residuals[lag]:.3g} at lag {lag:+d}" for lag in shift.rivals)
    return finding(
        code,
        where=place,
        expected="trainer and inference logprobs agree best at lag 0",
        found=f"mean |log_ratio| {residuals[0]:.3g} nats at lag 0, {residuals[shift.lag]:.3g} at lag "
        f"{shift.lag:+d}{rivals}, over {int(evidence.usable.sum())} tokens"
        + (": the row repeats itself, so either may be it" if rivals else ""),
        likely=_LIKELY.get((code, shift.lag > 0)),
    )


_LIKELY = {
    ("shifted", False): "the list of logprobs has an entry in front that the list of ids lost",
    ("shifted", True): "the list of logprobs lost an entry in front that the list of ids still has",
}


def _windows(evidence: Evidence) -> Iterator[Evidence]:
    """Stretches of `WINDOW` tokens with enough usable ones; the last may be shorter."""
    for start in range(0, len(evidence.trained), WINDOW):
        window = evidence.part(start, start + WINDOW)
        if window.usable.sum() >= GROSS_MIN_TOKENS:
            yield window


def _trimmed_mean(evidence: Evidence) -> float:
    """Mean clipped |difference| without the largest tenth, at least one token."""
    errors = np.sort(evidence.at_zero()[evidence.usable])
    kept = errors[: len(errors) - max(1, round(GROSS_TRIMMED_SHARE * len(errors)))]
    return float(kept.mean()) if len(kept) else 0.0


def _are_strangers(evidence: Evidence) -> bool:
    """Whether engine and trainer agree no better than if their tokens had been paired at random."""
    trainer, inference = (side[evidence.usable] for side in (evidence.trainer, evidence.inference))
    uncertain = min((trainer < UNCERTAIN_BELOW).sum(), (inference < UNCERTAIN_BELOW).sum())
    if len(trainer) < STRANGER_MIN_TOKENS or uncertain < STRANGER_MIN_UNCERTAIN:
        return False
    paired = np.minimum(np.abs(trainer - inference), RESIDUAL_CLIP).mean()
    at_random = _means_at_random(trainer, inference)
    fit_as_well = float((at_random <= paired).mean())
    return bool(paired >= STRANGER_SHARE * at_random.mean() and fit_as_well >= STRANGER_RANK)


def _means_at_random(trainer: NDArray[np.float64], inference: NDArray[np.float64]) -> NDArray[np.float64]:
    """[R] mean clipped |difference| under rolls by up to 64 spread-out steps."""
    steps = np.unique(np.linspace(1, len(trainer) - 1, 64).round().astype(int))
    rolled = [np.abs(trainer - np.roll(inference, step)) for step in steps]
    means: NDArray[np.float64] = np.minimum(rolled, RESIDUAL_CLIP).mean(axis=1)
    return means
