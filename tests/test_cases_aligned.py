"""Faults that only the trainer's logprobs or logits show, each with its clean twin, in both layouts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from aligned_cases import (
    Row,
    batch_of,
    drawn,
    judged,
    judged_in_turn,
    log_softmax,
    logits_of,
    samples_of,
    told,
)
from builders import trajectory, turn

from rlbatch.alignment import Judge, measure, require_aligned
from rlbatch.assemble import to_samples
from rlbatch.collate import collate
from rlbatch.errors import AlignmentError

LAYOUTS = pytest.mark.parametrize("layout", ["padded", "packed"])
NOISE = pytest.mark.parametrize("noise", [0.0, 0.01])
"""Of float32 and of bf16 size."""


def rows_of(num_rows=12, num_tokens=48, **how):
    return [drawn(num_tokens, seed, **how) for seed in range(num_rows)]


def moved(row, inference):
    return replace(row, inference=np.asarray(inference))


# -- clean -----------------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.35])
def test_clean_rows_are_silent_at_every_noise(noise, layout):
    assert told(judged(rows_of(16, noise=noise), layout=layout)) == []


# -- places ----------------------------------------------------------------------------------------------


@LAYOUTS
@NOISE
@pytest.mark.parametrize("lag", [-3, -2, -1, 1, 2, 3])
def test_a_lag_is_named_with_its_sign_and_size_in_one_row_of_many(lag, noise, layout):
    rows = rows_of(noise=noise)
    rows[4] = moved(rows[4], np.roll(rows[4].inference, -lag))
    verdict = judged(rows, layout=layout)
    assert [(found.code, found.where.sample) for found in verdict.findings] == [("shifted", 4)]
    assert f"at lag {lag:+d}" in verdict.findings[0].found


@NOISE
def test_several_insertions_in_one_row_are_named_with_their_places(noise):
    rows = rows_of(num_rows=9, num_tokens=240, noise=noise)
    values = rows[2].inference
    # Two entries too many: from 80 on lag -1, from 160 on lag -2.
    rows[2] = moved(rows[2], np.concatenate([values[:80], [-1.0], values[80:159], [-2.0], values[159:238]]))
    (found,) = judged(rows).findings
    assert (found.code, found.where.sample) == ("shifted-from", 2)
    # The completion begins at token 3 of its sequence.
    assert abs(found.where.start - 83) <= 3
    assert "at lag -1" in found.found
    place = found.found.partition("lag -2 from token ")[2].partition(" ")[0]
    assert abs(int(place) - 163) <= 3


@pytest.mark.parametrize("seed", range(4))
def test_zeros_that_no_kept_set_explains_are_named_in_a_noisy_run(seed):
    rows = rows_of(num_tokens=96, noise=0.35)
    filled = np.random.default_rng(seed).random(96) < 0.3
    rows[5] = moved(rows[5], np.where(filled, 0.0, rows[5].inference))
    (found,) = judged(rows).findings
    assert (found.code, found.where.sample) == ("zero-filled", 5)


def test_a_row_with_the_values_of_one_that_kept_its_own_is_not_called_permuted():
    """Siblings may be of one text: wrong ids in one of them look like the other's values."""
    rows = rows_of(noise=0.0)
    rows[3] = moved(rows[3], rows[7].inference)
    (found,) = judged(rows).findings
    assert (found.code, found.where.sample) == ("unexplained", 3)


def test_rows_that_changed_places_name_their_owners():
    rows = rows_of()
    order = [0, 2, 1, *range(3, 12)]
    swapped = [moved(row, rows[owner].inference) for row, owner in zip(rows, order, strict=True)]
    verdict = judged(swapped)
    assert [(found.code, found.where.sample) for found in verdict.findings] == [
        ("rows-permuted", 1),
        ("rows-permuted", 2),
    ]
    assert "those of sample 2, trajectory 'row2'" in verdict.findings[0].found
    assert "those of sample 1, trajectory 'row1'" in verdict.findings[1].found


def test_lags_that_follow_the_number_of_the_row_are_a_rule():
    rows = rows_of(num_rows=6)
    shifted = [moved(row, np.roll(row.inference, number)) for number, row in enumerate(rows)]
    verdict = judged(shifted)
    assert [(found.code, found.where.sample) for found in verdict.findings] == [
        ("shifted-by-rule", number) for number in range(1, 6)
    ]
    assert "minus its number in the batch +0" in verdict.findings[0].found


def test_lags_that_follow_the_prompt_of_a_sequence_hold_for_all_its_turns():
    # Prompts of 3, 5 and 6 tokens, lags of minus what each is longer than the shortest. The second turns
    # begin after 45, 57 and 52 tokens, which no lag follows.
    rng = np.random.default_rng(0)
    made, truths = [], []
    for number, (num_prompt, num_first) in enumerate([(3, 40), (5, 50), (6, 44)]):
        prompt, turns = list(range(1, num_prompt + 1)), []
        for length in (num_first, 40):
            truth = rng.uniform(-5, -0.05, length)
            truths.append(truth)
            ids = rng.integers(10, 90, length).tolist()
            turns.append(turn(prompt, ids, np.roll(truth, num_prompt - 3)))
            prompt = [*prompt, *ids, 7, 8]
        made += to_samples(trajectory(*turns, trajectory_id=f"row{number}"))
    batch = collate(made, layout="packed")
    trainer = torch.zeros(batch.shape, dtype=torch.float64)
    trainer[batch.loss_mask] = torch.from_numpy(np.concatenate(truths))
    judge = Judge(trainer_version=None)
    judge.add(measure(batch, trainer))
    findings = judge.verdict().findings
    assert [(found.code, found.where.sample, found.where.turn) for found in findings] == [
        ("shifted-by-rule", sample, number) for sample in (1, 2) for number in (0, 1)
    ]
    assert "minus its prompt's length +3" in findings[0].found


def test_lags_of_two_kinds_that_leave_no_row_in_place_are_no_rule():
    # Packed: of prompts of 3, 3 and 5 tokens, lags of -1, -1 and -3 are each one minus what is beyond 2.
    rng = np.random.default_rng(0)
    made, truths = [], []
    for number, (num_prompt, lag) in enumerate([(3, -1), (3, -1), (5, -3)]):
        truth = rng.uniform(-5, -0.05, 40)
        ids = rng.integers(10, 90, 40).tolist()
        only = turn(list(range(1, num_prompt + 1)), ids, np.roll(truth, -lag))
        made += to_samples(trajectory(only, trajectory_id=f"row{number}"))
        truths.append(truth)
    batch = collate(made, layout="packed")
    trainer = torch.zeros(batch.shape, dtype=torch.float64)
    trainer[batch.loss_mask] = torch.from_numpy(np.concatenate(truths))
    judge = Judge(trainer_version=None)
    judge.add(measure(batch, trainer))
    assert told(judge.verdict()) == ["shifted"] * 3


def test_one_lag_of_all_padded_rows_is_a_rule_where_the_others_are_in_place():
    rng = np.random.default_rng(0)
    short = rows_of(num_rows=2, num_tokens=40)
    # Both are eight tokens shorter than the longest, and both are off by eight.
    off = [moved(row, [*rng.choice(row.inference, 8), *row.inference[:-8]]) for row in short]
    verdict = judged([*off, *rows_of(num_rows=3)])
    assert [(found.code, found.where.sample) for found in verdict.findings] == [
        ("shifted-by-rule", 0),
        ("shifted-by-rule", 1),
    ]
    assert "minus its padding +0, in 5 turns" in verdict.findings[0].found
    # One row that is off would follow any rule.
    assert told(judged([off[0], *rows_of(num_rows=3)])) == ["shifted"]


# -- another distribution --------------------------------------------------------------------------------


@LAYOUTS
@NOISE
@pytest.mark.parametrize(("real", "stated"), [(0.7, 1.0), (1.3, 1.0), (1.0, 0.6)])
def test_a_temperature_that_was_not_stated_is_named_with_both_values(real, stated, noise, layout):
    rows = rows_of(temperature=real, noise=noise)
    # The trainer divides by what is stated.
    at = np.arange(48)
    rows = [replace(row, trainer=log_softmax(row.logits / stated)[at, row.ids]) for row in rows]
    (found,) = judged(rows, temperature=stated, layout=layout).findings
    assert found.code == "temperature-mismatch"
    named = float(found.found.removeprefix("temperature ").partition(",")[0])
    assert named == pytest.approx(real, rel=0.05)
    assert f"where {stated:g} is stated" in found.found


@NOISE
def test_logprobs_divided_after_the_softmax_are_told_from_a_temperature(noise):
    rows = rows_of(temperature=0.7, noise=noise)
    at = np.arange(48)
    rows = [moved(row, log_softmax(row.logits)[at, row.ids] / 0.7) for row in rows]
    (found,) = judged(rows, temperature=0.7).findings
    assert found.code == "divided-by-temperature"
    assert float(found.found.rpartition("divided by ")[2].partition(",")[0]) == pytest.approx(0.7, rel=0.05)


@NOISE
@pytest.mark.parametrize("kept", [3, 8, 20])
def test_a_kept_set_that_nobody_stated_is_named_with_its_size(kept, noise):
    (found,) = judged(rows_of(16, kept=kept, noise=noise)).findings
    assert found.code == "truncation-renormalized"
    assert found.found.startswith("top_k ")
    assert float(found.found.split()[1]) == pytest.approx(kept, rel=0.2)


def test_a_repetition_penalty_is_named():
    rows = rows_of(16)
    spoilt = []
    for row in rows:
        values = []
        for at, token in enumerate(row.ids):
            logits = row.logits[at].copy()
            seen = np.unique([1, 5, 9, *row.ids[:at]])
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.3, logits[seen] * 1.3)
            values.append(log_softmax(logits)[token])
        spoilt.append(moved(row, values))
    (found,) = judged(spoilt).findings
    assert found.code == "penalties-applied"
    assert float(found.found.removeprefix("repetition_penalty ").split()[0]) == pytest.approx(1.3, rel=0.05)


@NOISE
@pytest.mark.parametrize("num_tokens", [48, 400])
@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize(("base", "name"), [(2.0, "base 2"), (10.0, "base 10")])
def test_another_base_is_named(base, name, noise, logits, num_tokens):
    rows = rows_of(num_tokens=num_tokens, noise=noise)
    (found,) = judged([moved(row, row.inference / np.log(base)) for row in rows], logits=logits).findings
    assert found.code == "wrong-base"
    assert name in found.found


def test_the_most_probable_tokens_value_in_place_of_the_drawn_ones_is_named():
    rows = [moved(row, log_softmax(row.logits).max(-1)) for row in rows_of()]
    assert told(judged(rows)) == ["wrong-token-logprob"]


# -- the trainer's side ----------------------------------------------------------------------------------


def test_a_trainer_that_passes_its_loss_is_told_that_the_sign_is_wrong():
    rows = [replace(row, trainer=-row.trainer) for row in rows_of(num_rows=2)]
    verdict = judged(rows, logits=False)
    assert told(verdict) == ["sign-flipped"] * 2
    assert "the trainer's are above 0" in verdict.findings[0].found


def test_logits_in_place_of_trainer_logprobs_are_named():
    at = np.arange(48)
    rows = [replace(row, trainer=row.logits[at, row.ids]) for row in rows_of()]
    assert set(told(judged(rows))) == {"logits-not-logprobs"}


def test_a_trainer_that_scores_with_the_next_logits_is_named():
    def late(row):
        logprobs = log_softmax(np.concatenate([row.logits[1:], row.logits[:1]]))
        return replace(row, trainer=logprobs[np.arange(48), row.ids])

    assert set(told(judged([late(row) for row in rows_of()]))) == {"no-causal-shift"}


@LAYOUTS
def test_one_row_that_is_scored_otherwise_is_no_fault_of_the_whole_pass(layout):
    rows = rows_of()
    next_logits = np.roll(rows[5].logits, -1, axis=0)
    scored = log_softmax(next_logits)[np.arange(48), rows[5].ids]
    spoilt = [*rows[:5], replace(rows[5], trainer=scored), *rows[6:]]
    verdict = judged(spoilt, layout=layout)
    assert [(found.code, found.where.sample) for found in verdict.findings] == [("no-causal-shift", 5)]


def passed_otherwise(rows, rng):
    """Rows whose trainer logprobs are of logits that are off by chance."""
    at = np.arange(48)
    noisy = [row.logits + rng.normal(0, 0.6, row.logits.shape) for row in rows]
    return [
        replace(row, trainer=log_softmax(logits)[at, row.ids])
        for row, logits in zip(rows, noisy, strict=True)
    ]


@LAYOUTS
def test_two_passes_that_disagree_are_dropout(layout):
    rng = np.random.default_rng(0)
    rows = passed_otherwise(rows_of(), rng)

    def another(batch, index, start, stop):
        logits = logits_of(rows)(batch, index, start, stop)
        return logits + 0.6 * torch.from_numpy(rng.normal(size=tuple(logits.shape)))

    (found,) = judged(rows, logits=another, layout=layout).findings
    assert found.code == "dropout-on"
    assert "two passes that gave those logits are" in found.found


def test_a_list_of_other_weights_is_no_dropout_where_two_passes_agree():
    (found,) = judged(passed_otherwise(rows_of(), np.random.default_rng(0))).findings
    assert (found.code, found.severity) == ("trainer-logprobs-differ", "error")


@pytest.mark.parametrize("temperature", [1.0, 0.63])
@LAYOUTS
def test_a_trainer_that_divides_by_another_temperature_is_told_which(temperature, layout):
    at = np.arange(48)
    rows = [
        replace(row, trainer=log_softmax(row.logits / temperature)[at, row.ids])
        for row in rows_of(temperature=0.7)
    ]
    (found,) = judged(rows, layout=layout, temperature=0.7).findings
    assert (found.code, found.severity) == ("temperature-mismatch", "error")
    value = float(found.found.partition("temperature ")[2].partition(",")[0])
    assert abs(value - temperature) < 0.01
    assert found.likely.startswith("the trainer's list")


@pytest.mark.parametrize("noise", [0.0, 0.35])
@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda own: own / np.log(2), "wrong-base", "base 2 in place of e"),
        (lambda own: own / np.log(10), "wrong-base", "base 10 in place of e"),
        (lambda own: own / 1.3, "divided-by-temperature", "divided by 1.3"),
        (np.exp, "trainer-logprobs-differ", "the probability of each token"),
        (np.zeros_like, "trainer-logprobs-differ", "nats from the logprobs of its logits"),
        (lambda own: np.full_like(own, -3.0), "trainer-logprobs-differ", "nats from the logprobs"),
    ],
)
def test_what_is_wrong_with_the_trainers_list_is_told_whatever_the_engines_noise(make, code, words, noise):
    rows = rows_of(noise=noise)
    found = judged([replace(row, trainer=make(row.trainer)) for row in rows]).findings
    assert {(each.code, each.severity) for each in found} == {(code, "error")}
    assert all(words in each.found for each in found)


@pytest.mark.parametrize(
    ("step", "code", "words"),
    [(-1, "no-causal-shift", "the token before"), (1, "trainer-logprobs-differ", "the token after")],
)
def test_a_trainer_that_gathers_the_ids_of_other_positions_is_told_which(step, code, words):
    """input_ids in place of target_ids, or target_ids shifted once more."""
    at = np.arange(48)
    rows = [replace(row, trainer=log_softmax(row.logits)[at, np.roll(row.ids, -step)]) for row in rows_of()]
    found = judged(rows).findings
    assert {each.code for each in found} == {code}
    assert all(words in each.found for each in found)


@LAYOUTS
@pytest.mark.parametrize("lag", [-2, -1, 1, 2])
def test_a_rolled_list_is_told_of_the_side_that_the_logits_convict(lag, layout):
    rows = rows_of()
    engine = judged([moved(row, np.roll(row.inference, lag)) for row in rows], layout=layout).findings
    trainer = judged(
        [replace(row, trainer=np.roll(row.trainer, lag)) for row in rows], layout=layout
    ).findings
    assert {found.code for found in (*engine, *trainer)} == {"shifted"}
    assert len(engine) == len(trainer) == len(rows)
    assert all("exact ids" in found.fix and "trainer" not in found.likely for found in engine)
    assert all(found.likely.startswith("the trainer's list is out of place") for found in trainer)
    assert all("batch.target_ids" in found.fix for found in trainer)


def test_without_logits_a_lag_of_every_row_is_said_to_be_of_either_list():
    rows = rows_of()
    every = judged([replace(row, trainer=np.roll(row.trainer, 1)) for row in rows], logits=False).findings
    assert {found.code for found in every} == {"shifted"}
    assert all("the trainer's list is out of place" in found.likely for found in every)
    assert all("logits_for" in found.fix for found in every)
    # One row of many is the engine's: nobody rolls one row of a tensor.
    one = judged([moved(rows[0], np.roll(rows[0].inference, 1)), *rows[1:]], logits=False).findings
    assert ["logits_for" in found.fix for found in one] == [False]


def test_rows_of_the_trainers_list_that_changed_places_are_told_as_the_trainers():
    rows = rows_of()
    swapped = [*rows]
    swapped[3], swapped[7] = (
        replace(rows[3], trainer=rows[7].trainer),
        replace(rows[7], trainer=rows[3].trainer),
    )
    found = judged(swapped).findings
    assert [(each.code, each.where.sample) for each in found] == [("rows-permuted", 3), ("rows-permuted", 7)]
    assert all("rows of the trainer's list changed places" in each.likely for each in found)
    swapped[3], swapped[7] = moved(rows[3], rows[7].inference), moved(rows[7], rows[3].inference)
    found = judged(swapped).findings
    assert [(each.code, each.where.sample) for each in found] == [("rows-permuted", 3), ("rows-permuted", 7)]
    assert all("replies were matched" in each.likely for each in found)


@pytest.mark.parametrize("logits", [True, False])
def test_engine_rows_that_changed_places_between_micro_batches_are_told_with_their_owners(logits):
    rows = rows_of()
    swapped = [*rows]
    swapped[2], swapped[9] = moved(rows[2], rows[9].inference), moved(rows[9], rows[2].inference)
    found = judged_in_turn(swapped[:6], swapped[6:], logits=logits).findings
    assert [(each.code, each.where.batch, each.where.sample) for each in found] == [
        ("rows-permuted", 0, 2),
        ("rows-permuted", 1, 3),
    ]
    assert "trajectory 'row3', turn 0, tokens 3:51 of micro-batch 1" in found[0].found
    assert "trajectory 'row2', turn 0, tokens 3:51 of micro-batch 0" in found[1].found
    assert judged_in_turn(rows[:6], rows[6:], logits=logits).findings == ()


def test_values_of_rows_that_are_in_no_other_batch_stay_unexplained():
    rows, foreign = rows_of(), drawn(48, 99)
    spoilt = [*rows]
    spoilt[2], spoilt[9] = moved(rows[2], foreign.inference), moved(rows[9], drawn(48, 98).inference)
    assert {each.code for each in judged_in_turn(spoilt[:6], spoilt[6:]).findings} == {"unexplained"}


def test_trainer_rows_that_changed_places_between_micro_batches_are_told_as_the_trainers():
    rows = rows_of()
    swapped = [*rows]
    swapped[2], swapped[9] = (
        replace(rows[2], trainer=rows[9].trainer),
        replace(rows[9], trainer=rows[2].trainer),
    )
    found = judged_in_turn(swapped[:6], swapped[6:]).findings
    assert {each.code for each in found} == {"rows-permuted"}
    assert all("rows of the trainer's list changed places" in each.likely for each in found)


def test_passes_that_agree_on_some_rows_are_no_dropout():
    """As under RoPE that follows the longest row: that one is scored as it is alone, all others are not."""
    rng = np.random.default_rng(0)
    rows = rows_of()
    off = [
        replace(
            row,
            trainer=log_softmax(row.logits + rng.normal(0, 0.6, row.logits.shape))[np.arange(48), row.ids],
        )
        for row in rows[:-1]
    ]
    (found,) = judged([*off, rows[-1]]).findings
    assert (found.code, found.severity) == ("trainer-logprobs-differ", "error")
    assert found.where.sample < len(rows) - 1
    assert f"; 1 of {len(rows)} turns are alike in both" in found.found


def test_logprobs_that_disagree_with_logits_which_the_engine_agrees_with_are_no_fault_of_the_engine():
    rng = np.random.default_rng(0)
    rows = rows_of()
    off = rows[5].trainer.copy()
    off[[7, 20, 34, 41]] -= 9 + rng.uniform(size=4)
    (found,) = judged([*rows[:5], replace(rows[5], trainer=off), *rows[6:]]).findings
    assert (found.code, found.severity, found.where.sample) == ("trainer-logprobs-differ", "error", 5)
    assert "from the logprobs of its logits over 48 tokens" in found.found


def test_a_leak_is_told_where_the_first_sequence_was_sampled_otherwise():
    rng = np.random.default_rng(0)
    rows = rows_of(num_rows=6)
    leaking = [
        replace(row, trainer=row.trainer - (index > 0) * 0.3 * np.abs(rng.normal(size=48)))
        for index, row in enumerate(rows)
    ]
    samples = [
        replace(each, provenances=(replace(each.provenances[0], engine_version=str(at)),))
        for at, each in enumerate(samples_of(leaking))
    ]
    batch = collate(samples, layout="packed")
    trainer = torch.zeros(batch.shape, dtype=torch.float64)
    for segment, row in zip(batch.host_segments, leaking, strict=True):
        trainer[0, segment.start : segment.stop] = torch.from_numpy(row.trainer)
    judge = Judge(trainer_version=None, logits_for=logits_of(leaking))
    judge.add(measure(batch, trainer))
    assert told(judge.verdict()) == ["boundary-leak"]


def test_pack_1_an_error_in_all_sequences_of_a_pack_but_the_first_is_a_leak():
    rng = np.random.default_rng(0)
    rows = rows_of(num_rows=6)
    leaking = [
        replace(row, trainer=row.trainer - index * 0.08 * np.abs(rng.normal(size=48)))
        for index, row in enumerate(rows)
    ]
    for logits in (True, False):
        assert told(judged(leaking, layout="packed", logits=logits)) == ["boundary-leak"]
    assert told(judged(rows, layout="packed")) == []


# -- one end of a turn -----------------------------------------------------------------------------------


def test_a_beginning_of_rubbish_that_ends_on_a_block_is_of_the_prefix_cache():
    rows = rows_of(num_tokens=96)
    values = rows[3].inference.copy()
    # Token 3 is the first sampled one: entry 29 is token 32, where the third block begins.
    values[:29] -= np.random.default_rng(0).uniform(3, 6, 29)
    rows[3] = moved(rows[3], values)
    (found,) = judged(rows).findings
    assert (found.code, found.where.sample) == ("prefix-cache-rubbish", 3)
    assert (found.where.start, found.where.stop) == (3, 32)


def test_last_tokens_of_something_else_are_named():
    rows = rows_of(num_tokens=96)
    values = rows[3].inference.copy()
    values[-3:] -= [3.5, 5.0, 4.0]
    rows[3] = moved(rows[3], values)
    (found,) = judged(rows).findings
    assert (found.code, found.where.sample) == ("last-tokens-wrong", 3)
    assert (found.where.start, found.where.stop) == (96, 99)


def test_other_weights_from_some_token_on_are_named():
    rows = rows_of(num_tokens=160)
    rng = np.random.default_rng(0)
    values = rows[3].inference.copy()
    values[80:] -= np.abs(rng.normal(0, 0.9, 80)) * -np.expm1(values[80:])
    rows[3] = moved(rows[3], values)
    (found,) = judged(rows).findings
    assert (found.code, found.where.sample) == ("mixed-versions", 3)
    assert abs(found.where.start - 83) <= 4
    assert "the labels say no version" in found.found


# -- the callback ----------------------------------------------------------------------------------------


def rows_at_another_temperature():
    at = np.arange(48)
    return [replace(row, trainer=log_softmax(row.logits / 2)[at, row.ids]) for row in rows_of()]


def fails(batch, index, start, stop):
    raise RuntimeError("out of memory")


def too_few(batch, index, start, stop):
    return torch.zeros(stop - start - 1, 96)


def too_small(batch, index, start, stop):
    return torch.zeros(stop - start, 3)


def not_finite(batch, index, start, stop):
    return torch.full((stop - start, 96), float("nan"))


def no_tensor(batch, index, start, stop):
    return [[0.0]]


def integers(batch, index, start, stop):
    return torch.zeros(stop - start, 96, dtype=torch.int64)


@pytest.mark.parametrize(
    ("callback", "found"),
    [
        (fails, "RuntimeError: out of memory"),
        (too_few, r"shape \[47, 96\]"),
        (too_small, "a vocabulary of 3"),
        (not_finite, "NaN or infinity"),
        (no_tensor, "list"),
        (integers, "int64"),
    ],
)
def test_a_callback_that_fails_or_answers_something_else_is_a_named_error(callback, found):
    batch, trainer = batch_of(rows_at_another_temperature(), temperature=2.0)
    with pytest.raises(AlignmentError, match=found) as caught:
        require_aligned(batch, trainer, trainer_version=None, logits_for=callback)
    assert caught.value.code == "batch-mismatch"


def test_a_callback_that_answers_for_other_rows_is_a_named_error():
    rows = rows_of(noise=0.1)
    others = [drawn(48, seed + 100) for seed in range(12)]
    batch, trainer = batch_of(rows)
    with pytest.raises(AlignmentError, match="logits of the rows asked for") as caught:
        require_aligned(batch, trainer, trainer_version=None, logits_for=logits_of(others))
    assert caught.value.code == "batch-mismatch"


def test_clean_data_of_an_engines_own_noise_asks_for_no_logits():
    batch, trainer = batch_of(rows_of(noise=0.003))
    require_aligned(batch, trainer, trainer_version=None, logits_for=fails)


def test_without_logits_the_verdict_says_what_could_not_be_told():
    rng = np.random.default_rng(0)
    rows = rows_of(num_rows=1)
    rows[0] = moved(rows[0], -rng.uniform(0.5, 8.0, 48))
    (found,) = judged(rows, logits=False).findings
    assert found.code == "unexplained"
    assert "without logits_for" in found.found


# -- values that make no sense ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
@pytest.mark.parametrize("spoil", [1e4, -1e4, np.nan, np.inf, -np.inf, 0.0])
@pytest.mark.parametrize("side", ["trainer", "inference"])
def test_wild_values_give_findings_and_finite_metrics(num_tokens, spoil, side):
    rows = [drawn(num_tokens, seed) for seed in range(3)]
    values = getattr(rows[1], side).copy()
    values[0] = spoil
    rows[1] = replace(rows[1], **{side: values})
    verdict = judged(rows)
    assert all(np.isfinite(value) for value in verdict.metrics.values())
    if spoil != 0:
        assert told(verdict) != []


def test_constant_logprobs_are_silent():
    row = drawn(32, 0)
    flat = Row(row.ids, np.zeros_like(row.logits), np.full(32, -np.log(96)), np.full(32, -np.log(96)))
    assert told(judged([flat] * 12)) == []
