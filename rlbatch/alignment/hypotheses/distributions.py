"""Was it another distribution? All families against each other and against what is stated, on one exhibit.

The exhibit may be a stretch of one segment, or of many of one provenance joined together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.exhibits import Exhibit
from rlbatch.alignment.families import FAMILIES, Family
from rlbatch.alignment.limits import LAG_ACCEPTED_SHARE, ZERO_TRAINER_BELOW
from rlbatch.alignment.noisy import Noise, NoisyFit, between, noisy_fit
from rlbatch.alignment.rivals import halves_agree, has_ratio, turn_of
from rlbatch.alignment.subtle_limits import (
    DIVISOR_COST,
    DIVISOR_NEAR_ONE,
    FAMILY_HOPELESS_SHARE,
    FAMILY_LEFT_SHARE,
    FAMILY_MARGIN_SHARE,
    FAMILY_MIN_GAIN,
    FAMILY_MIN_INFORMATIVE,
    FAMILY_MIN_MARGIN,
    FAMILY_OLD_SHARE,
    FAMILY_PARAMETER,
    FAMILY_SIMPLER,
    FAMILY_SLOPE,
    FAMILY_SLOPE_ERRORS,
    FAMILY_SLOPE_MOST,
    NOISY_LEFT,
    NOISY_MIN_GAIN,
    NOISY_MOST_VARIANCE,
    NOISY_SLOPE,
    NOISY_TOKENS,
    NOISY_ZEROS_LEFT,
    RIVAL_BASE_LEFT,
    RIVAL_DIVISOR,
    RIVAL_FEW_LEFT,
    RIVAL_LEFT,
    RIVAL_TOKENS,
    RIVAL_TURNS,
    UNSURE_BELOW,
)
from rlbatch.alignment.tournament import Fit, fit
from rlbatch.catalogue import finding
from rlbatch.errors import Finding, Where
from rlbatch_kernels import RESIDUAL_CLIP

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The family that explains an exhibit."""

    family: Family
    fit: Fit


def other_distribution(exhibit: Exhibit, *, most_left: float, current: bool) -> Winner | None:
    """The family that explains the values and what is stated does not; None where none does, or two do.

    Args:
        exhibit: what is judged.
        most_left: mean |residual|, nats, that noise may leave.
        current: of the trainer's own weights. Values of older ones are off anyway: what explains them must
            explain nearly all.
    """
    fits = [
        Winner(family=family, fit=fit(exhibit.inference, exhibit.stated, predicted, family.parameters))
        for family, predicted in zip(FAMILIES, exhibit.predictions, strict=True)
        if predicted is not None
    ]
    if current and exhibit.collision is not None and _is_noisy(exhibit, fits):
        return _beneath_noise(exhibit, exhibit.collision)
    stated = exhibit.divisor
    best = fits[0]
    for other in fits[1:]:
        if _worth(other, stated) > _worth(best, stated) + FAMILY_SIMPLER:
            best = other
    if not _holds(best, exhibit, most_left, current=current) or not _exact_holds(best):
        return None
    rivals = [_worth(each, stated) for each in fits if each.family.code != best.family.code]
    rivals.append(_gain_of_zeros(exhibit))
    margin = FAMILY_MIN_MARGIN
    if not _is_exact(best):
        margin = max(margin, FAMILY_MARGIN_SHARE * best.fit.gain)
    if not _beats_other_weights(best, exhibit):
        return None
    return best if _worth(best, stated) - max(rivals) >= margin else None


def _is_noisy(exhibit: Exhibit, fits: Sequence[Winner]) -> bool:
    """Whether no explanation leaves as little as an engine's own noise, of enough tokens to model it."""
    left = min(each.fit.width for each in fits)
    num_unsure = int(np.count_nonzero(exhibit.stated < UNSURE_BELOW))
    return left > NOISY_LEFT and num_unsure >= NOISY_TOKENS


def _beneath_noise(exhibit: Exhibit, collision: Values) -> Winner | None:
    """`other_distribution` of a noisy run, by what noise in the logits does."""
    unsure = exhibit.stated < UNSURE_BELOW
    inference, stated = exhibit.inference[unsure], exhibit.stated[unsure]
    noise = Noise.of(stated, collision[unsure])

    def of(predicted: Values, parameters: Values) -> NoisyFit:
        return noisy_fit(inference, predicted[unsure], parameters, noise)

    nothing = of(exhibit.stated[:, None], np.ones(1))
    rivals = [("", 0.0)]
    best: tuple[float, Family, NoisyFit, Values] | None = None
    for family, predicted in zip(FAMILIES, exhibit.predictions, strict=True):
        if predicted is None:
            continue
        low, high = family.noisy_neutral
        found = of(predicted, family.parameters)
        if low <= found.parameter <= high:
            continue
        worth = found.score - nothing.score - (0.0 if len(family.parameters) == 1 else FAMILY_PARAMETER)
        rivals.append((family.code, worth))
        if best is None or worth > best[0] + max(FAMILY_SIMPLER, FAMILY_MARGIN_SHARE * best[0]):
            best = worth, family, found, predicted
    if best is None:
        return None
    worth, family, found, grid = best
    column = between(grid, found.place)
    told = fit(inference - noise.mean(found.variance), stated, column[unsure][:, None], np.ones(1))
    left = np.minimum(np.abs(exhibit.inference - column), RESIDUAL_CLIP).mean()
    told = replace(told, parameter=found.parameter, gain=found.score - nothing.score, width=float(left))
    winner = Winner(family=family, fit=told)
    # What divides logprobs divides their noise.
    divisor = found.parameter if family.kind in ("divisor", "base") else 1.0
    margin = FAMILY_MIN_MARGIN if _is_exact(winner) else max(FAMILY_MIN_MARGIN, FAMILY_MARGIN_SHARE * worth)
    # A kept set of one token leaves zeros as a buffer does, and says where.
    zeros = column[exhibit.inference == 0]
    holds = (
        worth >= NOISY_MIN_GAIN
        and np.count_nonzero(zeros < ZERO_TRAINER_BELOW) <= NOISY_ZEROS_LEFT * len(zeros)
        and found.variance * min(divisor, 1.0) ** 2 <= NOISY_MOST_VARIANCE
        and told.num_informative >= FAMILY_MIN_INFORMATIVE
        and abs(told.slope - 1) <= NOISY_SLOPE
        and worth - max(value for code, value in rivals if code != family.code) >= margin
    )
    if not holds or not _beats_other_weights(winner, exhibit):
        return None
    said, _ = noise.said(inference[:, None] - np.stack([stated, column[unsure]], axis=1))
    agreed = halves_agree(said[:, 1] - said[:, 0], turn_of(exhibit.offset)[unsure])
    return winner if agreed or _is_exact(winner) else None


def _beats_other_weights(winner: Winner, exhibit: Exhibit) -> bool:
    """Whether other weights would not look like it as well, where more than an engine's own noise is left."""
    family, found = winner.family, winner.fit
    off = float(np.minimum(np.abs(exhibit.inference - exhibit.stated), RESIDUAL_CLIP).mean())
    if found.width <= NOISY_LEFT:
        return True
    if _is_exact(winner):
        return family.parameters[0] != 10 or found.width <= RIVAL_BASE_LEFT * off
    if len(np.unique(turn_of(exhibit.offset))) < RIVAL_TURNS:
        return False
    if family.kind == "divisor" and abs(found.parameter / exhibit.divisor - 1) > RIVAL_DIVISOR:
        return False
    if exhibit.collision is None or family.code not in ("truncation-renormalized", "divided-by-temperature"):
        is_long = len(exhibit.inference) >= RIVAL_TOKENS
        return found.width <= (RIVAL_LEFT if is_long else RIVAL_FEW_LEFT) * off
    grid = exhibit.predictions[FAMILIES.index(family)]
    if grid is None:
        return False
    place = float(np.interp(found.parameter, family.parameters, np.arange(len(family.parameters))))
    return has_ratio(exhibit, exhibit.collision, between(grid, place))


def is_hopeless(exhibit: Exhibit) -> bool:
    """Whether every family leaves nearly all of the differences, whatever its parameter."""
    off = np.minimum(np.abs(exhibit.inference - exhibit.stated), RESIDUAL_CLIP).mean()
    return all(
        np.minimum(np.abs(exhibit.inference[:, None] - predicted), RESIDUAL_CLIP).mean(axis=0).min()
        > FAMILY_HOPELESS_SHARE * off
        for predicted in exhibit.predictions
        if predicted is not None
    )


def _is_exact(each: Winner) -> bool:
    """Whether there is no parameter to choose. One that has may contain it: base 2 is a divisor of 0.693."""
    return len(each.family.parameters) == 1


def _exact_holds(each: Winner) -> bool:
    """Whether no other factor does better (1.5 is not base 2), and hardly a token speaks against it."""
    if not _is_exact(each):
        return True
    found = each.fit
    other = max(FAMILY_MIN_MARGIN, FAMILY_MARGIN_SHARE * found.gain)
    return found.free_gain <= found.gain + other and found.num_against <= LAG_ACCEPTED_SHARE * found.num_for


def _worth(each: Winner, stated: float) -> float:
    """Gain, less what a parameter costs: it would fit something by itself.

    Args:
        each: a family at its parameter.
        stated: what logits are divided by, as stated.
    """
    gain = each.fit.gain
    if each.family.kind == "divisor" and _is_near_another(each.fit.parameter, stated):
        gain -= DIVISOR_COST * gain
    return gain - (0.0 if _is_exact(each) else FAMILY_PARAMETER)


def _is_near_another(divisor: float, stated: float) -> bool:
    """Whether it is near 1, or near the logarithm of a base and not near the temperature that is stated."""
    bases = [float(np.log(family.parameters[0])) for family in FAMILIES if family.kind == "base"]
    is_base = any(abs(divisor / each - 1) < DIVISOR_NEAR_ONE for each in bases)
    return abs(divisor - 1) < DIVISOR_NEAR_ONE or (is_base and abs(divisor / stated - 1) >= DIVISOR_NEAR_ONE)


def _gain_of_zeros(exhibit: Exhibit) -> float:
    """Log likelihood ratio, nats, of a buffer of zeros: it explains every exact 0, and nothing else."""
    filled = np.where(exhibit.inference == 0, 0.0, exhibit.stated)
    return fit(exhibit.inference, exhibit.stated, filled[:, None], np.ones(1)).gain


def _holds(best: Winner, exhibit: Exhibit, most_left: float, *, current: bool) -> bool:
    low, high = best.family.neutral
    found = best.fit
    off = float(np.minimum(np.abs(exhibit.inference - exhibit.stated), RESIDUAL_CLIP).mean())
    most_left = min(most_left, (FAMILY_LEFT_SHARE if current else FAMILY_OLD_SHARE) * off)
    return (
        not low <= found.parameter <= high
        and _worth(best, exhibit.divisor) >= FAMILY_MIN_GAIN
        and found.num_informative >= FAMILY_MIN_INFORMATIVE
        and found.width <= most_left
        and abs(found.slope - 1) <= FAMILY_SLOPE + FAMILY_SLOPE_ERRORS * found.slope_error
        and abs(found.slope - 1) <= FAMILY_SLOPE_MOST
    )


def distribution_finding(winner: Winner, exhibit: Exhibit, *, where: Where, scope: str = "") -> Finding:
    """What is told of it.

    Args:
        winner: the family, at its parameter.
        exhibit: what it explains.
        where: the place.
        scope: said after the number of tokens, as in " of 12 turns".
    """
    off = np.minimum(np.abs(exhibit.inference - exhibit.stated), RESIDUAL_CLIP).mean()
    return finding(
        winner.family.code,
        where=where,
        expected=f"logprobs at temperature {exhibit.divisor:g}, nothing else in force, as stated",
        found=f"{described(winner, exhibit.divisor)} leaves {winner.fit.width:.3g} nats of {off:.3g} over "
        f"{len(exhibit.inference)} tokens{scope}",
    )


def described(winner: Winner, divisor: float) -> str:
    """The explanation in words.

    Example:
        temperature 0.7, where 1 is stated
    """
    kind, value = winner.family.kind, winner.fit.parameter
    if kind == "temperature":
        return f"temperature {value * divisor:.3g}, where {divisor:g} is stated,"
    if kind == "divisor":
        return f"the logprob at temperature 1, divided by {value:.3g},"
    if kind == "base":
        return f"base {value:g} in place of e"
    if kind == "sign":
        return "minus the trainer's logprob"
    if kind == "rank":
        return "the largest logprob of each position"
    if kind == "logits":
        return "the logit of each token"
    return f"{kind} {value:.0f}" if kind == "top_k" else f"{kind} {value:.3g}"
