"""Hypotheses on one suspect segment: each says what it would explain, or nothing.

Pure functions from `Evidence` to a finding, in one visible tuple. They run on suspects only, on the host.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.lags import Shift, shift_from, shift_within, whole_shift
from rlbatch.alignment.limits import (
    DOUBT_DROPS_FROM,
    DOUBT_MEAN,
    DOUBT_SPREAD,
    GROSS_MEAN,
    GROSS_MIN_TOKENS,
    GROSS_TRIMMED_SHARE,
    STRANGER_MIN_TOKENS,
    STRANGER_MIN_UNCERTAIN,
    STRANGER_RANK,
    STRANGER_SHARE,
    UNCERTAIN_BELOW,
    WINDOW,
    ZERO_MIN_EVIDENCE,
    ZERO_OLD_MIN_EVIDENCE,
    ZERO_TRAINER_BELOW,
)
from rlbatch.catalogue import finding
from rlbatch.errors import Finding
from rlbatch.records import Provenance
from rlbatch.soundness.values import VALUE_FAULTS, found_text


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
    return _shift_finding("shifted-from", evidence, shift)


def shifted_within(evidence: Evidence) -> Finding | None:
    """Another lag explains a stretch of the segment, and lag 0 the rest."""
    shift = shift_within(evidence)
    return None if shift is None else _shift_finding("shifted", evidence, shift)


def zero_filled(evidence: Evidence) -> Finding | None:
    """Exact zeros where the parameters in force rule them out."""
    if not evidence.comparable or zero_is_possible(evidence.provenance):
        return None
    zero = evidence.usable & (evidence.inference == 0)
    bad = np.flatnonzero(zero & (evidence.trainer < ZERO_TRAINER_BELOW))
    needed = ZERO_MIN_EVIDENCE if evidence.current else ZERO_OLD_MIN_EVIDENCE
    if -evidence.trainer[bad].sum() < needed:
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
    told = [(run.current or _are_strangers(run), _trimmed_mean(run), run) for run in _gross_runs(evidence)]
    if not told:
        return None
    is_error, mean, run = max(told, key=lambda each: each[:2])
    more = f"; {len(told)} such stretches in the turn" if len(told) > 1 else ""
    return finding(
        "unexplained",
        severity="error" if is_error else "warning",
        where=run.place,
        expected=f"mean |log_ratio| below {GROSS_MEAN} nats, without the largest tenth",
        found=f"{mean:.3g} nats over {int(run.usable.sum())} tokens; {_by_lag(run)}{more}",
    )


def doubtful(evidence: Evidence) -> Finding | None:
    """Too far off for noise, and too short for a verdict: a warning, at any age."""
    errors = np.sort(evidence.at_zero()[evidence.usable])
    if not evidence.comparable or not 2 <= len(errors) < GROSS_MIN_TOKENS:
        return None
    errors = errors[:-1] if len(errors) >= DOUBT_DROPS_FROM else errors
    most = DOUBT_MEAN + DOUBT_SPREAD / len(errors) ** 0.5
    if errors.mean() <= most:
        return None
    return finding(
        "unexplained",
        severity="warning",
        where=evidence.place,
        expected=f"mean |log_ratio| of at most {most:.2f} nats over {len(errors)} tokens",
        found=f"{errors.mean():.3g} nats; {_by_lag(evidence)}",
    )


CAUSES: tuple[Callable[[Evidence], Finding | None], ...] = (
    trainer_not_finite,
    impossible_value,
    shifted_from,
    shifted,
    shifted_within,
    zero_filled,
    unexplained,
    doubtful,
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
    stretch = evidence.part(shift.start, shift.stop)
    residuals = stretch.residuals()
    rivals = "".join(f", {residuals[lag]:.3g} at lag {lag:+d}" for lag in shift.rivals)
    is_whole = shift.stop - shift.start == len(evidence.trained)
    return finding(
        code,
        where=stretch.place,
        expected="trainer and inference logprobs agree best at lag 0",
        found=f"mean |log_ratio| {residuals[0]:.3g} nats at lag 0, {residuals[shift.lag]:.3g} at lag "
        f"{shift.lag:+d}{rivals}, over {int(stretch.usable.sum())} tokens"
        + (": the row repeats itself, so which it is cannot be told" if rivals else ""),
        likely=_likely(shift.lag) if code == "shifted" and is_whole else None,
    )


def _likely(lag: int) -> str:
    entries = "an entry" if abs(lag) == 1 else f"{abs(lag)} entries"
    if lag < 0:
        return f"the list of logprobs has {entries} in front that the list of ids lost"
    return f"the list of logprobs lost {entries} in front that the list of ids still has"


def _by_lag(evidence: Evidence) -> str:
    parts = [f"{value:.3g} at {lag:+d}" for lag, value in evidence.residuals().items()]
    return f"all of them by lag {', '.join(parts)}"


def _gross_runs(evidence: Evidence) -> Iterator[Evidence]:
    """Neighbouring windows that are all gross, joined."""
    start: int | None = None
    for at in range(0, len(evidence.trained) + WINDOW, WINDOW):
        window = evidence.part(at, at + WINDOW)
        is_gross = window.usable.sum() >= GROSS_MIN_TOKENS and _trimmed_mean(window) >= GROSS_MEAN
        if is_gross and start is None:
            start = at
        if not is_gross and start is not None:
            yield evidence.part(start, min(at, len(evidence.trained)))
            start = None


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
    paired = _spread(trainer - inference)
    at_random = np.array([_spread(trainer - np.roll(inference, step)) for step in _steps(len(trainer))])
    fit_as_well = float((at_random <= paired).mean())
    return bool(paired >= STRANGER_SHARE * at_random.mean() and fit_as_well >= STRANGER_RANK)


def _steps(length: int) -> list[int]:
    """Up to 64 rolls, spread out: each pairs every token with another one."""
    steps: list[int] = np.unique(np.linspace(1, length - 1, 64).round().astype(int)).tolist()
    return steps


def _spread(differences: NDArray[np.float64]) -> float:
    """Mean distance from the median: a policy that lowered all its tokens alike is no stranger to them."""
    return float(np.abs(differences - np.median(differences)).mean())
