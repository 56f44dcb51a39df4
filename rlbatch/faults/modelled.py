"""Faults that take the model's logits to plant: another distribution, or a trainer that scores wrongly."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.faults.planting import ModelFault, Score, Scored, long_segments, with_provenances
from rlbatch.faults.subtle import restated, temperature_apart
from rlbatch.records import TOKEN_FIELDS, Provenance, Sample

_Each = Callable[[Scored, np.random.Generator], Scored]
_Values = NDArray[np.float64]


def _each(corrupt: _Each) -> Callable[[Sequence[Scored], np.random.Generator, Score], list[Scored]]:
    """A corruption of each by itself, which needs no further scoring."""

    def of_all(scored: Sequence[Scored], rng: np.random.Generator, _: Score) -> list[Scored]:
        return [corrupt(each, rng) for each in scored]

    return of_all


def _each_alike(
    corrupt: _Each,
) -> Callable[[Sequence[Scored], np.random.Generator, Score], list[Scored]]:
    """The same with one draw for all: a fault in how a whole run is set up."""

    def of_all(scored: Sequence[Scored], rng: np.random.Generator, _: Score) -> list[Scored]:
        seed = int(rng.integers(2**32))
        return [corrupt(each, np.random.default_rng(seed)) for each in scored]

    return of_all


def _sampled(scored: Scored) -> NDArray[np.intp]:
    return np.flatnonzero(scored.sample.turn >= 0)


def _predicting(scored: Scored, at: NDArray[np.intp]) -> _Values:
    """[N, V] logits that predict tokens `at`, divided by their temperature."""
    rows: _Values = scored.logits[at - 1].astype(np.float64) / scored.sample.temperature[at, None]
    return rows


def _log_softmax(logits: _Values) -> _Values:
    shifted = logits - logits.max(-1, keepdims=True)
    normalised: _Values = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def _moved(scored: Scored, at: NDArray[np.intp], by: _Values) -> Sample:
    """The sample with the engine's values moved, so that its own noise stays in them."""
    logprobs = scored.sample.inference_logprobs.copy()
    own = logprobs[at].astype(np.float64)
    # A logprob stays below 0: what would pass it comes as near as it was to be moved.
    logprobs[at] = np.where(own + by < 0, own + by, own * np.exp(-np.abs(by)))
    return replace(scored.sample, inference_logprobs=logprobs)


def _with_trainer(scored: Scored, at: NDArray[np.intp], values: _Values) -> Scored:
    logprobs = scored.trainer_logprobs.copy()
    logprobs[at] = values
    return replace(scored, trainer_logprobs=logprobs)


def _wrong_token_logprob(scored: Scored, rng: np.random.Generator) -> Scored:
    # The largest logprob of each position, whichever token was drawn.
    at = _sampled(scored)
    by = _log_softmax(_predicting(scored, at)).max(-1) - scored.trainer_logprobs[at]
    if np.count_nonzero(by > 0.1) < 8:
        return scored
    return replace(scored, sample=_moved(scored, at, by))


def _no_causal_shift(scored: Scored, rng: np.random.Generator) -> Scored:
    # The logits of the token itself score it, instead of those of the token before.
    at = _sampled(scored)
    own = scored.logits[at].astype(np.float64) / scored.sample.temperature[at, None]
    return _with_trainer(scored, at, _log_softmax(own)[np.arange(len(at)), scored.sample.token_ids[at]])


def _sign_flipped(scored: Scored, rng: np.random.Generator) -> Scored:
    at = _sampled(scored)
    if np.count_nonzero(scored.trainer_logprobs[at] < -0.3) < 8:
        return scored
    return _with_trainer(scored, at, -scored.trainer_logprobs[at])


def _logits_not_logprobs(scored: Scored, rng: np.random.Generator) -> Scored:
    at = _sampled(scored)
    return _with_trainer(scored, at, _predicting(scored, at)[np.arange(len(at)), scored.sample.token_ids[at]])


def _divided_by_temperature(scored: Scored, rng: np.random.Generator) -> Scored:
    # Logprobs at temperature 1, divided by a temperature: which is not the same as dividing the logits.
    at = _sampled(scored)
    if len(at) < 4:
        return scored
    at_one = scored.logits[at - 1].astype(np.float64)
    by = _log_softmax(at_one)[np.arange(len(at)), scored.sample.token_ids[at]] - scored.trainer_logprobs[at]
    moved = _moved(scored, at, by)
    divisor = round(temperature_apart(rng), 3)
    logprobs = moved.inference_logprobs / np.float32(divisor)
    stated = restated(replace(moved, inference_logprobs=logprobs), divisor)
    values = _log_softmax(at_one / divisor)[np.arange(len(at)), scored.sample.token_ids[at]]
    return _with_trainer(replace(scored, sample=stated), at, values)


def _truncation_renormalized(scored: Scored, rng: np.random.Generator) -> Scored:
    # Divided by the mass of the kept set. A token outside it could not have been drawn: it is not trained.
    at = _sampled(scored)
    if not long_segments(scored.sample, min_length=8):
        return scored
    logprobs = _log_softmax(_predicting(scored, at))
    order = np.sort(np.exp(logprobs), axis=-1)[:, ::-1]
    mass = np.cumsum(order, axis=-1)
    if rng.integers(2):
        size = np.full(len(at), int(rng.integers(5, 51)))
    else:
        size = (mass < rng.uniform(0.5, 0.95)).sum(-1) + 1
    last = np.minimum(size, order.shape[-1]) - 1
    places = np.arange(len(at))
    by = -np.log(mass[places, last])
    kept = np.exp(logprobs[places, scored.sample.token_ids[at]]) >= order[places, last]
    # A turn whose last token, or whose stop token, could not have been drawn would have ended elsewhere.
    stops = [token for stated in scored.sample.provenances for token in stated.eos_token_ids]
    ends = np.append(np.diff(scored.sample.turn[at]) != 0, True)
    ends |= np.isin(scored.sample.token_ids[at], stops)
    if np.count_nonzero(kept & (by > 0.01)) < 4 or not kept[ends].all():
        return scored
    moved = _moved(scored, at, np.where(kept, by, 0.0))
    values, mask = moved.inference_logprobs.copy(), moved.loss_mask.copy()
    # The only token that was kept has all the mass.
    values[at[kept & (last == 0)]] = 0.0
    mask[at[~kept]] = False
    return replace(scored, sample=replace(moved, inference_logprobs=values, loss_mask=mask))


def _outside_kept_set(scored: Scored, rng: np.random.Generator) -> Scored:
    # Both sides renormalise over their own sets of so many tokens, and some that were drawn are in one only.
    at = _sampled(scored)
    size = int(rng.integers(5, 51))
    logprobs = _log_softmax(_predicting(scored, at))
    own = logprobs[np.arange(len(at)), scored.sample.token_ids[at]]
    kept = np.sort(logprobs, axis=-1)[:, -size:]
    outside = own < kept[:, 0]
    if not 1 <= np.count_nonzero(outside) <= len(at) // 2:
        return scored
    by = -np.log(np.exp(kept).sum(-1))

    def change(stated: Provenance) -> Provenance:
        sampling = replace(stated.sampling, top_k=size)
        return replace(stated, logprobs_mode="processed", sampling=sampling)

    stated = with_provenances(_moved(scored, at, by), change)
    if not all(item.keeps_set for item in stated.provenances):
        return scored
    return _with_trainer(replace(scored, sample=stated), at, np.where(outside, -np.inf, own + by))


def _penalties_applied(scored: Scored, rng: np.random.Generator) -> Scored:
    at = _sampled(scored)
    if not long_segments(scored.sample, min_length=16):
        return scored
    kind = str(rng.choice(["repetition", "presence", "frequency"]))
    size = float(rng.uniform(1.1, 1.5) if kind == "repetition" else rng.uniform(0.3, 1.5))
    ids = scored.sample.token_ids
    by = np.zeros(len(at))
    for row, token in enumerate(at):
        logits = scored.logits[token - 1].astype(np.float64)
        changed = logits.copy()
        if kind == "repetition":
            seen = np.unique(ids[:token])
            changed[seen] = np.where(logits[seen] > 0, logits[seen] / size, logits[seen] * size)
        else:
            seen, counts = np.unique(ids[at[0] : token], return_counts=True)
            changed[seen] -= size * (counts if kind == "frequency" else 1)
        divisor = scored.sample.temperature[token]
        by[row] = (_log_softmax(changed / divisor) - _log_softmax(logits / divisor))[ids[token]]
    if np.count_nonzero(np.abs(by) > 0.05) < 4:
        return scored
    return replace(scored, sample=_moved(scored, at, by))


def _boundary_leak(scored: Sequence[Scored], rng: np.random.Generator, score: Score) -> list[Scored]:
    # Every sequence of the pack is scored as if those before it were its prompt.
    spoilt = [scored[0]] if scored else []
    for index in range(1, len(scored)):
        own = scored[index].sample
        together = _joined([each.sample for each in scored[max(0, index - 3) : index + 1]])
        at = _sampled(scored[index])
        values = score(together).trainer_logprobs[len(together.token_ids) - len(own.token_ids) + at]
        spoilt.append(_with_trainer(scored[index], at, values))
    return spoilt


def _joined(samples: Sequence[Sample]) -> Sample:
    """One sequence of the tokens of all, with the provenances of the last: it alone is scored."""
    columns: dict[str, Any] = {}
    for spec in TOKEN_FIELDS:
        values = [getattr(sample, spec.name) for sample in samples]
        columns[spec.name] = None if any(each is None for each in values) else np.concatenate(values)
    before = sum(len(sample) for sample in samples[:-1])
    columns["turn"][:before] = -1
    columns["loss_mask"][:before] = False
    return replace(samples[-1], **columns, routed_experts=None)


def _dropout_on(scored: Scored, rng: np.random.Generator) -> Scored:
    # A pass with dropout has other logits than the next one: about 0.05 nats of KLD between the two.
    if not long_segments(scored.sample, min_length=16):
        return scored
    spread = rng.uniform(0.3, 0.7)
    return replace(_with_other_logits(scored, spread, rng), dropout=spread)


def _trainer_logprobs_differ(scored: Scored, rng: np.random.Generator) -> Scored:
    # The list is of other weights than those of the model, which gives the same logits each time.
    if not long_segments(scored.sample, min_length=16):
        return scored
    return _with_other_logits(scored, rng.uniform(0.3, 0.7), rng)


def _with_other_logits(scored: Scored, spread: float, rng: np.random.Generator) -> Scored:
    """The list is of logits that are off by chance, those of the model stay."""
    at = _sampled(scored)
    rows = _predicting(scored, at)
    noisy = rows + rng.normal(0, spread, rows.shape)
    return _with_trainer(scored, at, _log_softmax(noisy)[np.arange(len(at)), scored.sample.token_ids[at]])


MODELLED = (
    ModelFault(
        code="wrong-token-logprob",
        story="The first of the alternatives was taken, which is the most probable token, not the drawn one.",
        corrupt=_each(_wrong_token_logprob),
    ),
    ModelFault(
        code="no-causal-shift",
        story="The trainer scores each token with the logits that follow it.",
        corrupt=_each(_no_causal_shift),
    ),
    ModelFault(
        code="sign-flipped",
        story="The trainer passed its loss, which is minus the logprob.",
        corrupt=_each(_sign_flipped),
    ),
    ModelFault(
        code="logits-not-logprobs",
        story="The trainer's head gives logits, and the softmax was forgotten.",
        corrupt=_each(_logits_not_logprobs),
    ),
    ModelFault(
        code="divided-by-temperature",
        story="Logprobs, not logits, were divided by the temperature.",
        corrupt=_each_alike(_divided_by_temperature),
    ),
    ModelFault(
        code="truncation-renormalized",
        story="The engine drew with top-p or top-k from its defaults, and nobody named them.",
        corrupt=_each_alike(_truncation_renormalized),
    ),
    ModelFault(
        code="outside-kept-set",
        story="The engine kept tokens in its top-k that the trainer's other weights or rounding leave out.",
        corrupt=_each_alike(_outside_kept_set),
        truncated=True,
    ),
    ModelFault(
        code="penalties-applied",
        story="A generation configuration brought a repetition penalty along.",
        corrupt=_each_alike(_penalties_applied),
    ),
    ModelFault(
        code="boundary-leak",
        story="The trainer attends across the sequences of a pack: it was called with a cache or a mask.",
        corrupt=_boundary_leak,
        together=True,
        packed_only=True,
    ),
    ModelFault(
        code="dropout-on",
        story="The trainer's model was left in training mode.",
        corrupt=_each(_dropout_on),
    ),
    ModelFault(
        code="trainer-logprobs-differ",
        story="The trainer's logprobs were computed by a copy of the model that missed an update.",
        corrupt=_each(_trainer_logprobs_differ),
    ),
)
