"""Families of distributions that an engine may have reported instead of the stated one, as predictions.

A family has a grid of parameters and predicts, from the trainer's logits, what the engine would have reported
under each. Nothing is decided here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """What the trainer says of n neighbouring tokens of one turn."""

    stated: Values
    """[n] nats at the stated temperature."""
    divisor: float
    """The stated temperature."""
    ids: NDArray[np.int64]
    """[n] the tokens."""
    logits: Tensor | None = None
    """[n, V] float32, not divided; None where nobody can be asked."""
    before: NDArray[np.int64]
    """[m] tokens of the sequence that come before, prompt included."""
    num_sampled_before: int
    """How many of the last of them the same turn sampled."""


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
    predict: Callable[[Seen, Values], Values]
    """[n], [P] -> [n, P] nats."""
    needs_logits: bool = True


def _logprobs_at(seen: Seen, divisors: Values) -> Values:
    """[n, P] logprobs of the tokens with logits divided by each of the divisors."""
    logits = _logits(seen)
    # The normaliser is smooth in the logarithm of the divisor: few nodes and a polynomial give them all.
    nodes = _chebyshev(np.log(divisors.min()), np.log(divisors.max()))
    at_nodes = torch.stack(
        [torch.logsumexp(logits / float(np.exp(node)), dim=1) * float(np.exp(node)) for node in nodes], dim=1
    )
    normalisers = at_nodes.double().numpy() @ _interpolation(nodes, np.log(divisors))
    target = _target(seen, logits)[:, None]
    predicted: Values = (target - normalisers) / divisors
    return predicted


def _temperature(seen: Seen, ratios: Values) -> Values:
    return _logprobs_at(seen, ratios * seen.divisor)


def _divided(seen: Seen, divisors: Values) -> Values:
    logits = _logits(seen)
    at_one = _target(seen, logits) - torch.logsumexp(logits, dim=1).double().numpy()
    predicted: Values = at_one[:, None] / divisors
    return predicted


def _scaled(seen: Seen, bases: Values) -> Values:
    predicted: Values = seen.stated[:, None] / np.log(bases)
    return predicted


def _negated(seen: Seen, signs: Values) -> Values:
    predicted: Values = seen.stated[:, None] * signs
    return predicted


def _top_k(seen: Seen, sizes: Values) -> Values:
    _, mass = _kept(seen)
    last = np.minimum(sizes.astype(int), mass.shape[1]) - 1
    return _renormalised(seen, mass[:, last])


def _top_p(seen: Seen, shares: Values) -> Values:
    _, mass = _kept(seen)
    # The token that crosses the share is kept too.
    sizes = np.stack([(mass < share).sum(axis=1) for share in shares], axis=1)
    return _renormalised(seen, np.take_along_axis(mass, np.minimum(sizes, mass.shape[1] - 1), axis=1))


def _min_p(seen: Seen, shares: Values) -> Values:
    chances, mass = _kept(seen)
    sizes = np.stack([(chances >= share * chances[:, :1]).sum(axis=1) for share in shares], axis=1)
    return _renormalised(seen, np.take_along_axis(mass, np.maximum(sizes, 1) - 1, axis=1))


def _renormalised(seen: Seen, mass: Values) -> Values:
    predicted: Values = seen.stated[:, None] - np.log(mass)
    return predicted


MOST_KEPT = 1024
"""Largest kept set that is told from the whole vocabulary."""


def _kept(seen: Seen) -> tuple[Values, Values]:
    """[n, K] probabilities from the largest down, and the mass of the first so many."""
    chances = torch.softmax(_logits(seen) / seen.divisor, dim=1)
    top = chances.topk(min(MOST_KEPT, chances.shape[1]), dim=1).values.double().numpy()
    return top, np.minimum(np.cumsum(top, axis=1), 1.0)


def _repetition(seen: Seen, sizes: Values) -> Values:
    return _penalised(seen, sizes, _counts(seen, whole=True), "divide")


def _presence(seen: Seen, sizes: Values) -> Values:
    return _penalised(seen, sizes, np.minimum(_counts(seen, whole=False), 1), "subtract")


def _frequency(seen: Seen, sizes: Values) -> Values:
    return _penalised(seen, sizes, _counts(seen, whole=False), "subtract")


def _known(seen: Seen) -> NDArray[np.int64]:
    known: NDArray[np.int64] = np.unique(np.concatenate([seen.before, seen.ids]))
    return known


def _counts(seen: Seen, *, whole: bool) -> Values:
    """[n, U] how often each known id came before each token: in the sequence, or in the completion so far."""
    first = 0 if whole else len(seen.before) - seen.num_sampled_before
    sequence = np.concatenate([seen.before[first:], seen.ids])
    hits = (sequence[:, None] == _known(seen)).astype(np.float64)
    counts: Values = np.cumsum(hits, axis=0) - hits
    return counts[len(sequence) - len(seen.ids) :]


def _penalised(seen: Seen, sizes: Values, counts: Values, how: str) -> Values:
    """[n, P] logprobs where known ids are held down: their logits divided by, or less, the size."""
    logits = _logits(seen)
    whole = torch.logsumexp(logits / seen.divisor, dim=1).double().numpy()
    known = _known(seen)
    column = np.searchsorted(known, seen.ids)
    mine = logits[:, torch.from_numpy(known)].double().numpy()
    rows = np.arange(len(seen.ids))
    chances = np.where(counts > 0, np.exp(mine / seen.divisor - whole[:, None]), 0.0)
    rest = np.maximum(1 - chances.sum(axis=1), 1e-9)
    predicted = np.empty((len(seen.ids), len(sizes)))
    for at, size in enumerate(sizes):
        divided = np.where(mine > 0, mine / size, mine * size)
        held = np.where(counts > 0, divided, mine) if how == "divide" else mine - size * counts
        lifted = np.where(counts > 0, np.exp(held / seen.divisor - whole[:, None]), 0.0).sum(axis=1)
        predicted[:, at] = held[rows, column] / seen.divisor - whole - np.log(rest + lifted)
    return predicted


def _largest(seen: Seen, _: Values) -> Values:
    logits = _logits(seen) / seen.divisor
    return (logits.max(dim=1).values - torch.logsumexp(logits, dim=1)).double().numpy()[:, None]


def _plain_logits(seen: Seen, _: Values) -> Values:
    predicted: Values = _target(seen, _logits(seen))[:, None] / seen.divisor
    return predicted


def _logits(seen: Seen) -> Tensor:
    if seen.logits is None:
        raise ValueError("this family needs logits")
    return seen.logits


def _target(seen: Seen, logits: Tensor) -> Values:
    values: Values = logits.gather(1, torch.from_numpy(seen.ids)[:, None])[:, 0].double().numpy()
    return values


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
        predict=_negated,
        needs_logits=False,
    ),
    Family(
        code="wrong-base",
        kind="base",
        parameters=np.array([2.0]),
        neutral=(1, 1),
        predict=_scaled,
        needs_logits=False,
    ),
    Family(
        code="wrong-base",
        kind="base",
        parameters=np.array([10.0]),
        neutral=(1, 1),
        predict=_scaled,
        needs_logits=False,
    ),
    Family(
        code="wrong-token-logprob",
        kind="rank",
        parameters=np.array([1.0]),
        neutral=(0, 0),
        predict=_largest,
    ),
    Family(
        code="logits-not-logprobs",
        kind="logits",
        parameters=np.array([1.0]),
        neutral=(0, 0),
        predict=_plain_logits,
    ),
    Family(
        code="temperature-mismatch",
        kind="temperature",
        parameters=_RATIOS,
        neutral=(0.96, 1.04),
        predict=_temperature,
    ),
    # At temperature 1 both say the same, which is temperature 1: so that it is left out here. So near it, a
    # divisor says that some tokens are noisier than others.
    Family(
        code="divided-by-temperature",
        kind="divisor",
        parameters=_RATIOS[_RATIOS < 0.96],
        neutral=(0.94, 1),
        predict=_divided,
    ),
    Family(
        code="divided-by-temperature",
        kind="divisor",
        parameters=_RATIOS[_RATIOS > 1.04],
        neutral=(1, 1.07),
        predict=_divided,
    ),
    Family(
        code="truncation-renormalized",
        kind="top_k",
        parameters=np.unique(np.round(1.12 ** np.arange(0, 60)).clip(1, MOST_KEPT)),
        neutral=(500, np.inf),
        predict=_top_k,
    ),
    Family(
        code="truncation-renormalized",
        kind="top_p",
        parameters=np.arange(0.2, 0.991, 0.01),
        neutral=(0.975, 1),
        predict=_top_p,
    ),
    Family(
        code="truncation-renormalized",
        kind="min_p",
        parameters=np.exp(np.arange(np.log(0.004), np.log(0.6), 0.1)),
        neutral=(0, 0.005),
        predict=_min_p,
    ),
    Family(
        code="penalties-applied",
        kind="repetition_penalty",
        parameters=np.exp(np.arange(-6, 17) * 0.05),
        neutral=(0.96, 1.04),
        predict=_repetition,
    ),
    Family(
        code="penalties-applied",
        kind="presence_penalty",
        parameters=np.arange(-1, 2.01, 0.1),
        neutral=(-0.08, 0.08),
        predict=_presence,
    ),
    Family(
        code="penalties-applied",
        kind="frequency_penalty",
        parameters=np.arange(-1, 2.01, 0.1),
        neutral=(-0.05, 0.05),
        predict=_frequency,
    ),
)
"""In the order of simplicity: of two that fit alike, the first is named."""
