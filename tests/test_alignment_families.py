"""What families of distributions predict, against the same by the definitions, token by token in numpy."""

import numpy as np
import pytest
import torch
from aligned_cases import log_softmax

from rlbatch.alignment.evidence import Evidence
from rlbatch.alignment.families import FAMILIES
from rlbatch.alignment.seen import MOST_KEPT, Seen
from rlbatch.alignment.tournament import fit

NUM_TOKENS, VOCAB_SIZE, NUM_PROMPT, NUM_SAMPLED = 24, 40, 9, 7
DIVISOR = 0.7


def seen_of(vocab_size=VOCAB_SIZE, scale=2.5):
    """A stretch of a turn: ids that repeat, behind a prompt and what the turn sampled before."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, scale, (NUM_TOKENS, vocab_size)).astype(np.float32)
    ids = rng.integers(0, 12, NUM_TOKENS)
    stated = log_softmax(logits.astype(np.float64) / DIVISOR)[np.arange(NUM_TOKENS), ids]
    return Seen(
        stated=stated,
        divisor=DIVISOR,
        ids=ids,
        logits=torch.from_numpy(logits),
        before=rng.integers(0, 12, NUM_PROMPT + NUM_SAMPLED),
        num_sampled_before=NUM_SAMPLED,
    )


def by_hand(seen, kind, value, at):
    """The logprob of token `at` under one family at one parameter."""
    logits = seen.logits[at].double().numpy()
    token = int(seen.ids[at])
    chances = np.sort(np.exp(log_softmax(logits / DIVISOR)))[::-1]
    own = log_softmax(logits / DIVISOR)[token]
    sequence = [*seen.before.tolist(), *seen.ids[:at].tolist()]
    completion = sequence[NUM_PROMPT:]
    if kind == "temperature":
        return log_softmax(logits / (value * DIVISOR))[token]
    if kind == "divisor":
        return log_softmax(logits)[token] / value
    if kind == "base":
        return own / np.log(value)
    if kind == "sign":
        return -own
    if kind == "rank":
        return np.log(chances[0])
    if kind == "logits":
        return logits[token] / DIVISOR
    if kind == "top_k":
        return own - np.log(chances[: int(value)].sum())
    if kind == "top_p":
        size = next(n for n in range(1, len(chances) + 1) if n == len(chances) or chances[:n].sum() >= value)
        return own - np.log(chances[:size].sum())
    if kind == "min_p":
        return own - np.log(chances[chances >= value * chances[0]].sum())
    held = logits.copy()
    for known in set(sequence if kind == "repetition_penalty" else completion):
        if kind == "repetition_penalty":
            held[known] = held[known] / value if held[known] > 0 else held[known] * value
        else:
            held[known] -= value * (1 if kind == "presence_penalty" else completion.count(known))
    return log_softmax(held / DIVISOR)[token]


@pytest.mark.parametrize(
    "family", FAMILIES, ids=lambda family: f"{family.kind} from {family.parameters[0]:.2g}"
)
def test_a_family_predicts_what_its_definition_says(family):
    seen = seen_of()
    predicted = family.predict(seen, family.parameters)
    assert predicted.shape == (NUM_TOKENS, len(family.parameters))
    columns = range(0, len(family.parameters), 7)
    expected = [
        [by_hand(seen, family.kind, family.parameters[column], at) for column in columns]
        for at in range(NUM_TOKENS)
    ]
    # Logits are float32, and temperatures come from a polynomial through fourteen of them.
    np.testing.assert_allclose(predicted[:, columns], expected, atol=2e-4)


def test_of_a_large_vocabulary_the_largest_probabilities_are_kept():
    vocab_size = 5 * MOST_KEPT
    seen = seen_of(vocab_size)
    chances, mass = seen.kept
    expected = np.sort(torch.softmax(seen.logits.double() / DIVISOR, dim=1).numpy())[:, ::-1][:, :MOST_KEPT]
    np.testing.assert_allclose(chances, expected, rtol=1e-5)
    np.testing.assert_allclose(mass, np.cumsum(expected, axis=1), rtol=1e-5)


def test_logits_of_any_size_are_predicted_from_without_an_overflow():
    seen = seen_of(scale=1e4)
    for family in FAMILIES:
        assert np.isfinite(family.predict(seen, family.parameters)).all()


@pytest.mark.parametrize("lost", [(), (2, 3, 11)])
@pytest.mark.parametrize("length", [1, 3, 16])
def test_residuals_are_the_means_of_the_pairs_at_each_lag(length, lost):
    rng = np.random.default_rng(0)
    trained = np.array([at not in lost for at in range(length)])
    # Nothing else of the evidence is read.
    evidence = object.__new__(Evidence)
    for name, values in (
        ("trainer", -rng.exponential(1, length)),
        ("inference", -rng.exponential(9, length)),
        ("trained", trained),
        ("known_residuals", {}),
    ):
        object.__setattr__(evidence, name, values)
    lags = range(-length - 1, length + 2)
    expected = {lag: errors.mean() for lag in lags if len(errors := evidence.at_lag(lag)[1])}
    assert evidence.residuals(lags) == pytest.approx(expected)


def test_tokens_vote_for_an_explanation_and_against_it_by_a_quarter_of_a_nat():
    # Stated -1 for ten tokens. Six are explained, three moved away by 0.3 nats, one by too little to speak.
    inference = np.array([-2.0] * 6 + [-1.0] * 4)
    predicted = np.array([-2.0] * 6 + [-1.3] * 3 + [-1.005])
    found = fit(inference, np.full(10, -1.0), predicted[:, None], np.array([0.5]))
    assert (found.num_for, found.num_against, found.num_informative) == (6, 3, 9)
    assert found.parameter == 0.5
    assert found.width == pytest.approx(0.0905)
