"""Hypotheses on one suspect segment: each says what it would explain, or nothing.

Pure functions from `Evidence` (numpy, float64) to a finding. They run on suspects only, on the host.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.limits import (
    GROSS_MEAN,
    GROSS_MIN_TOKENS,
    LAG_ACCEPTED_SHARE,
    LAG_FLOOR,
    LAG_MIN_VOTES,
    LAG_VOTE,
    ZERO_TRAINER_BELOW,
)
from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Severity, Where
from rlbatch.records import Provenance
from rlbatch.soundness.values import VALUE_FAULTS, found_text
from rlbatch_kernels import LAGS, RESIDUAL_CLIP


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """One segment on the host."""

    trainer: NDArray[np.float64]
    """[N] nats."""
    inference: NDArray[np.float64]
    """[N] nats."""
    trained: NDArray[np.bool_]
    """[N]; nothing is concluded from other tokens."""
    provenance: Provenance
    comparable: bool
    current: bool
    """Drawn by the very weights that the trainer has."""
    place: Where
    """The whole segment."""

    def where(self, tokens: NDArray[np.intp]) -> Where:
        """The span from the first to the last of `tokens`, counted in the sample."""
        start = self.place.start or 0
        return replace(self.place, start=start + int(tokens[0]), stop=start + int(tokens[-1]) + 1)

    @property
    def usable(self) -> NDArray[np.bool_]:
        """[N]; trained and finite on both sides."""
        return self.trained & np.isfinite(self.trainer) & np.isfinite(self.inference)


def trainer_not_finite(evidence: Evidence) -> Finding | None:
    """NaN or infinity on the trainer's side."""
    bad = np.flatnonzero(evidence.trained & ~np.isfinite(evidence.trainer))
    if not len(bad):
        return None
    return finding(
        "trainer-not-finite",
        where=evidence.where(bad),
        expected="finite trainer logprobs at trained tokens",
        found=found_text(evidence.trainer, bad, evidence.place.start or 0),
    )


def impossible_value(evidence: Evidence) -> Finding | None:
    """NaN, infinity or a positive value on the engine's side."""
    for fault in VALUE_FAULTS:
        bad = np.flatnonzero(evidence.trained & fault.test(evidence.inference))
        if len(bad):
            return finding(
                fault.code,
                where=evidence.where(bad),
                expected=fault.expected,
                found=found_text(evidence.inference, bad, evidence.place.start or 0),
            )
    return None


def zero_filled(evidence: Evidence) -> Finding | None:
    """Exact zeros where the parameters in force rule them out."""
    if not evidence.comparable or zero_is_possible(evidence.provenance):
        return None
    zero = evidence.usable & (evidence.inference == 0)
    bad = np.flatnonzero(zero & (evidence.trainer < ZERO_TRAINER_BELOW))
    if not len(bad):
        return None
    return finding(
        "zero-filled",
        where=evidence.where(bad),
        expected="an inference logprob of exactly 0 only where the trainer's probability is 1",
        found=f"0 at {len(bad)} of {int(evidence.trained.sum())} trained tokens, where the trainer has "
        f"{evidence.trainer[bad].mean():.3g} nats on average",
    )


def shifted(evidence: Evidence) -> Finding | None:
    """Another lag than 0 explains the segment, by a margin and with witnesses on both sides of the pairs."""
    residuals = {lag: error.mean() for lag in LAGS if len(error := _residual(evidence, lag)[1])}
    if len(residuals) < 2 or 0 not in residuals:
        return None
    lag = min(residuals, key=lambda key: (residuals[key], abs(key)))
    next_best = min(value for key, value in residuals.items() if key != lag)
    if lag == 0 or residuals[lag] >= LAG_ACCEPTED_SHARE * next_best:
        return None
    if evidence.comparable and residuals[lag] > LAG_FLOOR:
        return None
    if not _witnessed(evidence, lag):
        return None
    return finding(
        "shifted",
        where=evidence.place,
        expected="trainer and inference logprobs agree best at lag 0",
        found=f"mean |log_ratio| {residuals[0]:.3g} nats at lag 0, {residuals[lag]:.3g} at lag {lag:+d}, "
        f"over {int(evidence.usable.sum())} tokens",
        likely=_SHIFT_LIKELY[lag > 0],
    )


_SHIFT_LIKELY = {
    False: "the list of logprobs has an entry in front that the list of ids lost",
    True: "the list of logprobs lost an entry in front that the list of ids still has",
}


def unexplained(evidence: Evidence) -> Finding | None:
    """A gross mismatch that nothing above explains; of older weights it is a warning."""
    usable = evidence.usable
    if not evidence.comparable or usable.sum() < GROSS_MIN_TOKENS:
        return None
    error = np.minimum(np.abs(evidence.trainer - evidence.inference)[usable], RESIDUAL_CLIP)
    if error.mean() < GROSS_MEAN:
        return None
    residuals = ", ".join(
        f"{values.mean():.3g} at {lag:+d}" for lag in LAGS if len(values := _residual(evidence, lag)[1])
    )
    severity: Severity = "error" if evidence.current else "warning"
    return finding(
        "unexplained",
        severity=severity,
        where=evidence.place,
        expected=f"mean clipped |log_ratio| below {GROSS_MEAN} nats",
        found=f"{error.mean():.3g} nats over {len(error)} tokens; by lag {residuals}",
    )


CAUSES: tuple[Callable[[Evidence], Finding | None], ...] = (
    trainer_not_finite,
    impossible_value,
    shifted,
    zero_filled,
)
"""By precedence: the first that finds something is the cause, and takes the segment out of the drift.

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


def _residual(evidence: Evidence, lag: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Positions t of the pairs (inference t, trainer t + lag), and their clipped |difference|."""
    usable = evidence.usable
    length = len(usable)
    at = np.arange(max(0, -lag), max(0, -lag, min(length, length - lag)))
    at = at[usable[at] & usable[at + lag]]
    return at, np.minimum(np.abs(evidence.inference[at] - evidence.trainer[at + lag]), RESIDUAL_CLIP)


def _witnessed(evidence: Evidence, lag: int) -> bool:
    """Whether single tokens speak for the lag, on each side of the pairs, and hardly any against it.

    Pairs at a lag leave out an edge of each list. Without witnesses on both sides, one odd value at an edge
    would be explained by being left out.
    """
    at, error = _residual(evidence, lag)
    at_zero = np.minimum(np.abs(evidence.trainer - evidence.inference), RESIDUAL_CLIP)
    for side in (at_zero[at], at_zero[at + lag]):
        votes_for = np.count_nonzero(side - error > LAG_VOTE)
        votes_against = np.count_nonzero(error - side > LAG_VOTE)
        if votes_for < LAG_MIN_VOTES or votes_against > votes_for * LAG_ACCEPTED_SHARE:
            return False
    return True
