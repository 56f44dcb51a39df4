"""What is off and fits no known cause: told with its evidence, and never given a name."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.kept_sets import is_renormalised
from rlbatch.alignment.limits import (
    DOUBT_DROPS_FROM,
    DOUBT_MEAN,
    DOUBT_SPREAD,
    GROSS_MEAN,
    GROSS_MIN_TOKENS,
    GROSS_TRIMMED_SHARE,
    PEERS_OFF,
    PEERS_QUIET,
    PEERS_TOKEN_OFF,
    STRANGER_MIN_TOKENS,
    STRANGER_MIN_UNCERTAIN,
    STRANGER_RANK,
    STRANGER_SHARE,
    UNCERTAIN_BELOW,
    WINDOW,
)
from rlbatch.catalogue import finding
from rlbatch.errors import Finding


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
        found=f"{mean:.3g} nats over {int(run.usable.sum())} tokens; {_by_lag(run)}{more}{_untold(evidence)}",
        likely=_likely(evidence),
        fix=_fix(evidence),
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
        found=f"{errors.mean():.3g} nats; {_by_lag(evidence)}{_untold(evidence)}",
        likely=_likely(evidence),
        fix=_fix(evidence),
    )


def unlike_its_peers(evidence: Evidence) -> Finding | None:
    """Off in a run without noise, in more than one token, and no cause fits: a warning."""
    if not evidence.comparable or not evidence.current or evidence.floor is None:
        return None
    errors = np.sort(evidence.at_zero()[evidence.usable])[:-1]
    if evidence.floor > PEERS_QUIET or not len(errors):
        return None
    # One wild token is a ratio-tail.
    if errors.mean() < PEERS_OFF and errors[-1] < PEERS_TOKEN_OFF:
        return None
    bad = np.flatnonzero(evidence.at_zero() >= errors[-1])
    return finding(
        "unexplained",
        severity="warning",
        where=evidence.where(bad),
        expected=f"differences as in other turns, where mean |log_ratio| is {evidence.floor:.2g} nats",
        found=f"{errors.mean():.3g} nats over {len(errors)} tokens without the largest{_untold(evidence)}",
        likely=_likely(evidence),
        fix=_fix(evidence),
    )


def _untold(evidence: Evidence) -> str:
    """What could not be asked."""
    if evidence.ask is not None:
        return ""
    if is_renormalised(evidence):
        return "; over kept sets no temperature, truncation, penalty or wrong id can be told"
    return "; without logits_for no temperature, truncation, penalty or wrong id can be told"


def _could_be_asked(evidence: Evidence) -> bool:
    return evidence.ask is None and not is_renormalised(evidence)


def _likely(evidence: Evidence) -> str | None:
    if not _could_be_asked(evidence):
        return None
    return "other tokens, another model or another distribution, on either side: two lists alone do not say"


def _fix(evidence: Evidence) -> str | None:
    if not _could_be_asked(evidence):
        return None
    return "pass logits_for=rlbatch.scoring.logits_for(model): with logits most causes have a name"


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
