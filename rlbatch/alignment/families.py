"""Families of distributions that an engine may have reported instead of the stated one, as predictions.

A family has a grid of parameters and predicts, from the trainer's logits, what the engine would have reported
under each. Nothing is decided here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlbatch.alignment.seen import MAX_EXPONENT, MOST_KEPT, Held, Seen

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """One kind of distribution, with its parameter's grid."""

    code: str
    kind: str
    """What the parameter is called in a finding."""
    parameters: Values
    """[P] rising."""
    neutral: tuple[float, float]
    """Between these the family says what is stated, or is too near to be told from it."""
    noisy_neutral: tuple[float, float]
    """The same in a noisy run, where clean pools fit parameters farther from what is stated."""
    predict: Callable[[Seen, Values], Values]
    """[n], [P] -> [n, P] nats."""
    needs_logits: bool = True


def _logprobs_at(seen: Seen, divisors: Values) -> Values:
    """[n, P] logprobs of the tokens with logits divided by each of the divisors."""
    # The normaliser is smooth in the logarithm of the divisor: few nodes and a polynomial give them all.
    nodes = _chebyshev(np.log(divisors.min()), np.log(divisors.max()))
    at_nodes = seen.normalisers(np.exp(nodes)) * np.exp(nodes)
    normalisers = at_nodes @ _interpolation(nodes, np.log(divisors))
    predicted: Values = (seen.target[:, None] - normalisers) / divisors
    return predicted


def _temperature(seen: Seen, ratios: Values) -> Values:
    return _logprobs_at(seen, ratios * seen.divisor)


def _divided(seen: Seen, divisors: Values) -> Values:
    predicted: Values = seen.at_one[:, None] / divisors
    return predicted


def _scaled(seen: Seen, bases: Values) -> Values:
    predicted: Values = seen.stated[:, None] / np.log(bases)
    return predicted


def _negated(seen: Seen, signs: Values) -> Values:
    predicted: Values = seen.stated[:, None] * signs
    return predicted


def _top_k(seen: Seen, sizes: Values) -> Values:
    _, mass = seen.kept
    last = np.minimum(sizes.astype(int), mass.shape[1]) - 1
    return _renormalised(seen, mass[:, last])


def _top_p(seen: Seen, shares: Values) -> Values:
    _, mass = seen.kept
    # The token that crosses the share is kept too.
    sizes = np.stack([np.searchsorted(row, shares) for row in mass])
    return _renormalised(seen, np.take_along_axis(mass, np.minimum(sizes, mass.shape[1] - 1), axis=1))


def _min_p(seen: Seen, shares: Values) -> Values:
    chances, mass = seen.kept
    sizes = np.stack([np.searchsorted(-row, -shares * row[0], side="right") for row in chances])
    return _renormalised(seen, np.take_along_axis(mass, np.maximum(sizes, 1) - 1, axis=1))


def _renormalised(seen: Seen, mass: Values) -> Values:
    predicted: Values = seen.stated[:, None] - np.log(mass)
    return predicted


def _repetition(seen: Seen, sizes: Values) -> Values:
    known = seen.known
    is_held = known.in_sequence > 0
    rest = known.rest(is_held)
    own, own_is_held = known.own(known.logits), known.own(is_held) > 0
    # A logit above 0 is divided by the size, one below is multiplied.
    above = Held.of(known, is_held & (known.logits >= 0))
    below = Held.of(known, is_held & (known.logits < 0))
    predicted = np.empty((len(rest), len(sizes)))
    for at, size in enumerate(sizes):
        lifted = above.mass(1 / size) + below.mass(size)
        held = np.where(own_is_held, np.maximum(own, 0) / size + np.minimum(own, 0) * size, own)
        predicted[:, at] = held - known.whole - np.log(rest + lifted)
    return predicted


def _presence(seen: Seen, sizes: Values) -> Values:
    return _less(seen, sizes, np.minimum(seen.known.in_completion, 1))


def _frequency(seen: Seen, sizes: Values) -> Values:
    return _less(seen, sizes, seen.known.in_completion)


def _less(seen: Seen, sizes: Values, counts: NDArray[np.int64]) -> Values:
    """[n, P] logprobs where each known id's logit is less, by the size, as often as it is counted."""
    known = seen.known
    # Ids of one count move together: their mass is summed first.
    most = int(counts.max(initial=0))
    mass = (
        np.stack([(known.chances * (counts == count)).sum(axis=1) for count in range(1, most + 1)], axis=1)
        if most
        else np.zeros((len(counts), 0))
    )
    steps = sizes / seen.divisor
    lifted = mass @ np.exp(np.minimum(-np.arange(1, most + 1)[:, None] * steps, MAX_EXPONENT))
    held = known.own(known.logits)[:, None] - known.own(counts)[:, None] * steps
    predicted: Values = held - known.whole[:, None] - np.log(known.rest(counts > 0)[:, None] + lifted)
    return predicted


def _largest(seen: Seen, _: Values) -> Values:
    best = seen.given_logits.amax(dim=1).double().numpy() / seen.divisor
    predicted: Values = (best - seen.whole)[:, None]
    return predicted


def _plain_logits(seen: Seen, _: Values) -> Values:
    predicted: Values = seen.target[:, None] / seen.divisor
    return predicted


_NUM_NODES = 14


def _chebyshev(low: float, high: float) -> Values:
    angles = np.pi * (np.arange(_NUM_NODES) + 0.5) / _NUM_NODES
    nodes: Values = (low + high) / 2 + (high - low) / 2 * np.cos(angles)
    return nodes


def _interpolation(nodes: Values, at: Values) -> Values:
    """[nodes, at] weights of the polynomial through the nodes, in barycentric form."""
    angles = np.pi * (np.arange(len(nodes)) + 0.5) / len(nodes)
    signs = np.where(np.arange(len(nodes)) % 2, -1.0, 1.0) * np.sin(angles)
    apart = at - nodes[:, None]
    terms = signs[:, None] / np.where(apart == 0, 1e-300, apart)
    weights: Values = terms / terms.sum(axis=0)
    return weights


_RATIOS = np.exp(np.arange(-38, 36) * 0.025)
"""From 0.39 to 2.4 in steps of one fortieth."""

FAMILIES: tuple[Family, ...] = (
    Family(
        code="sign-flipped",
        kind="sign",
        parameters=np.array([-1.0]),
        neutral=(1, 1),
        noisy_neutral=(1, 1),
        predict=_negated,
        needs_logits=False,
    ),
    Family(
        code="wrong-base",
        kind="base",
        parameters=np.array([2.0]),
        neutral=(1, 1),
        noisy_neutral=(1, 1),
        predict=_scaled,
        needs_logits=False,
    ),
    Family(
        code="wrong-base",
        kind="base",
        parameters=np.array([10.0]),
        neutral=(1, 1),
        noisy_neutral=(1, 1),
        predict=_scaled,
        needs_logits=False,
    ),
    Family(
        code="wrong-token-logprob",
        kind="rank",
        parameters=np.array([1.0]),
        neutral=(0, 0),
        noisy_neutral=(0, 0),
        predict=_largest,
    ),
    Family(
        code="logits-not-logprobs",
        kind="logits",
        parameters=np.array([1.0]),
        neutral=(0, 0),
        noisy_neutral=(0, 0),
        predict=_plain_logits,
    ),
    Family(
        code="temperature-mismatch",
        kind="temperature",
        parameters=_RATIOS,
        neutral=(0.96, 1.04),
        noisy_neutral=(0.94, 1.06),
        predict=_temperature,
    ),
    # At temperature 1 both say the same, which is temperature 1: so that it is left out here. So near it, a
    # divisor says that some tokens are noisier than others.
    Family(
        code="divided-by-temperature",
        kind="divisor",
        parameters=_RATIOS[_RATIOS < 0.96],
        neutral=(0.94, 1),
        noisy_neutral=(0.94, 1),
        predict=_divided,
    ),
    Family(
        code="divided-by-temperature",
        kind="divisor",
        parameters=_RATIOS[_RATIOS > 1.04],
        neutral=(1, 1.07),
        noisy_neutral=(1, 1.08),
        predict=_divided,
    ),
    Family(
        code="truncation-renormalized",
        kind="top_k",
        parameters=np.unique(np.round(1.12 ** np.arange(0, 60)).clip(1, MOST_KEPT)),
        neutral=(500, np.inf),
        noisy_neutral=(200, np.inf),
        predict=_top_k,
    ),
    Family(
        code="truncation-renormalized",
        kind="top_p",
        parameters=np.arange(0.2, 0.991, 0.01),
        neutral=(0.975, 1),
        noisy_neutral=(0.935, 1),
        predict=_top_p,
    ),
    Family(
        code="truncation-renormalized",
        kind="min_p",
        parameters=np.exp(np.arange(np.log(0.004), np.log(0.6), 0.1)),
        neutral=(0, 0.005),
        noisy_neutral=(0, 0.05),
        predict=_min_p,
    ),
    Family(
        code="penalties-applied",
        kind="repetition_penalty",
        parameters=np.exp(np.arange(-6, 17) * 0.05),
        neutral=(0.96, 1.04),
        noisy_neutral=(0.9, 1.05),
        predict=_repetition,
    ),
    Family(
        code="penalties-applied",
        kind="presence_penalty",
        parameters=np.arange(-1, 2.01, 0.1),
        neutral=(-0.08, 0.08),
        noisy_neutral=(-0.6, 0.25),
        predict=_presence,
    ),
    Family(
        code="penalties-applied",
        kind="frequency_penalty",
        parameters=np.arange(-1, 2.01, 0.1),
        neutral=(-0.05, 0.05),
        noisy_neutral=(-0.3, 0.15),
        predict=_frequency,
    ),
)
"""In the order of simplicity: of two that fit alike, the first is named."""
