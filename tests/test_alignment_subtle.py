"""Faults that show in the shape of the differences: beginnings, stretches, single tokens and their wake."""

from dataclasses import replace

import numpy as np
import pytest
from aligned_cases import drawn, judged, log_softmax, told

NUM_TOKENS = 96


def rows_of(num_rows=12, **how):
    return [drawn(NUM_TOKENS, seed, **how) for seed in range(num_rows)]


def scored(row, logits):
    """The row, of which the trainer has these logits."""
    return replace(row, logits=logits, trainer=log_softmax(logits)[np.arange(len(row.ids)), row.ids])


def with_faded_prefix(row, seed, *, size=0.8):
    """The trainer read another prompt: its logits move by `size` nats, e times less every 6 tokens."""
    fading = size * np.exp(-np.arange(NUM_TOKENS) / 6)[:, None]
    return scored(row, row.logits + fading * np.random.default_rng(seed).normal(size=row.logits.shape))


def with_wrong_id(row, slot, *, wake=1.0):
    """Another id is stored at `slot`: an unlikely one, and the trainer reads on from it."""
    ids, logits = row.ids.copy(), row.logits.copy()
    ids[slot] = int(logits[slot].argmin())
    logits[slot + 1 : slot + 5] += wake * np.random.default_rng(slot).normal(size=(4, logits.shape[1]))
    return scored(replace(row, ids=ids), logits)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_prompt_that_differs_is_told_by_differences_that_fade(noise):
    rows = rows_of(noise=noise)
    verdict = judged([with_faded_prefix(row, at) for at, row in enumerate(rows)])
    assert told(verdict) == ["prefix-differs"]
    assert "in the first 8 tokens of 12 turns" in verdict.findings[0].found
    assert verdict.errors
    assert told(judged(rows)) == []


@pytest.mark.parametrize(
    ("noise", "size", "expected"),
    [
        (0.02, 0.02, [("prefix-differs", "warning")]),
        (0.35, 0.4, []),
        (0.35, 2.0, [("prefix-differs", "error")]),
    ],
)
def test_a_loud_beginning_is_told_where_other_weights_would_not_leave_it(noise, size, expected):
    # In much noise one that is louder by less than 3.2 times is what other weights leave as well.
    rows = [drawn(NUM_TOKENS, seed, noise=noise) for seed in range(24)]
    verdict = judged([with_faded_prefix(row, at, size=size) for at, row in enumerate(rows)], logits=False)
    assert [(found.code, found.severity) for found in verdict.findings] == expected
    # What may be something else is not called sound either.
    assert verdict.judged is not bool(expected)
    clean = judged(rows, logits=False)
    assert (told(clean), clean.judged) == ([], True)


def test_a_doubt_about_the_beginning_is_not_told_beside_a_cause():
    rows = [drawn(NUM_TOKENS, seed, noise=0.02) for seed in range(25)]
    rows = [with_faded_prefix(row, at, size=0.02) for at, row in enumerate(rows)]
    rows[24] = replace(rows[24], inference=np.roll(rows[24].inference, 1))
    assert told(judged(rows, logits=False)) == ["shifted"]


def test_a_few_tokens_that_are_off_at_the_beginning_are_no_other_prompt():
    rows = rows_of()
    for at in (2, 5, 8):
        values = rows[at].inference.copy()
        values[1 + at % 4] -= 2.0
        rows[at] = replace(rows[at], inference=values)
    assert "prefix-differs" not in told(judged(rows))


def test_a_loud_beginning_asks_for_no_logits_where_the_rest_is_quiet():
    asked = []

    def logits_for(batch, index, start, stop):
        asked.append(index)
        raise AssertionError

    rows = [with_faded_prefix(row, at, size=0.12) for at, row in enumerate(rows_of(noise=0.002))]
    assert told(judged(rows, logits=logits_for)) in ([], ["prefix-differs"])
    assert asked == []


def test_other_weights_that_move_few_tokens_far_and_all_a_little_are_named():
    rows = rows_of()
    values = rows[3].inference.copy()
    # As in text of near-certain tokens: one in six moves far, the others by a few hundredths of a nat.
    scale = np.where(np.arange(48) % 6 == 2, 1.8, 0.06)
    moves = np.random.default_rng(0).normal(0, scale) * -np.expm1(values[48:])
    values[48:] = np.minimum(values[48:] + moves, -1e-6)
    rows[3] = replace(rows[3], inference=values)
    (found,) = judged(rows).findings
    assert (found.code, found.where.sample) == ("mixed-versions", 3)


def test_a_few_wild_tokens_make_no_other_weights():
    rows = rows_of()
    values = rows[3].inference.copy()
    values[[50, 62, 77, 90]] -= 2.2
    rows[3] = replace(rows[3], inference=values)
    (found,) = judged(rows).findings
    assert (found.code, found.severity, found.where.sample) == ("unexplained", "warning", 3)
    assert "without the largest" in found.found


def test_one_wild_token_of_a_quiet_run_is_left_to_its_tail():
    rows = rows_of()
    values = rows[3].inference.copy()
    values[50] -= 3.0
    rows[3] = replace(rows[3], inference=values)
    assert told(judged(rows)) == []


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_wrong_id_is_told_by_its_slot_and_not_by_what_it_spoils(noise):
    rows = rows_of(noise=noise)
    slot = next(at for at in range(40, 80) if rows[3].inference[at] > -0.5)
    rows[3] = with_wrong_id(rows[3], slot)
    (found,) = judged(rows).findings
    assert (found.code, found.where.sample) == ("wrong-ids", 3)
    # Three tokens of prompt come before entry 0.
    assert f"at tokens {slot + 3} the trainer" in found.found


def test_tokens_the_engine_was_sure_of_are_a_disagreement_only_where_the_next_ones_are_spared():
    rows = rows_of()
    unlikely = np.flatnonzero(rows[3].inference < -3)[:4]
    values = rows[3].inference.copy()
    values[unlikely] = -0.3
    spared = replace(rows[3], inference=values)
    assert told(judged([*rows[:3], spared, *rows[4:]])) == ["confident-disagreement"]
    logits = rows[3].logits.copy()
    for at in unlikely:
        logits[at + 1 : at + 4] += np.random.default_rng(int(at)).normal(size=logits[at + 1 : at + 4].shape)
    in_a_wake = replace(scored(rows[3], logits), inference=values)
    (found,) = judged([*rows[:3], in_a_wake, *rows[4:]], logits=False).findings
    assert (found.code, found.severity) == ("unexplained", "error")
    assert "as after wrong ids" in found.found


def test_a_small_kept_set_is_looked_for_where_all_differences_are_on_one_side():
    # 56 of 96 ids were kept: that lifts tokens by 0.004 nats on average, no more than bf16 leaves.
    rows = [drawn(NUM_TOKENS, seed, kept=56) for seed in range(12)]
    lifted = np.concatenate([row.inference - row.trainer for row in rows])
    assert 0.003 < lifted.mean() < 0.005
    (found,) = judged(rows).findings
    assert found.code == "truncation-renormalized"
    assert abs(int(found.found.split()[1]) - 56) <= 2


def test_a_divisor_near_one_is_no_fault_of_its_own():
    # Noise takes certainty from the trainer: a divisor of 1.05 fits a little better than none.
    rows = [drawn(NUM_TOKENS, seed, noise=0.35) for seed in range(40)]
    softer = [replace(row, inference=row.inference / 1.04) for row in rows]
    assert "divided-by-temperature" not in told(judged(softer, logits=True))


def test_rubbish_ends_with_its_block_though_the_next_token_is_wild_too():
    end = 64
    rows = rows_of(noise=0.1)
    # The completion begins at token 3: a block of 16 tokens of the sequence ends at 64.
    values = rows[4].inference.copy()
    values[: end - 3] -= np.random.default_rng(0).uniform(3, 8, end - 3)
    values[end - 3] -= 0.5
    (found,) = judged([*rows[:4], moved(rows[4], values), *rows[5:]]).findings
    assert (found.code, found.where.sample) == ("prefix-cache-rubbish", 4)
    assert (found.where.start, found.where.stop) == (3, end)


def test_rubbish_at_the_beginning_of_every_turn_is_no_other_prompt():
    rng = np.random.default_rng(0)
    rows = []
    for row in rows_of(24, noise=0.35):
        values = row.inference.copy()
        values[:29] -= rng.uniform(3, 8, 29)
        rows.append(moved(row, values))
    assert "prefix-differs" not in told(judged(rows))


def moved(row, inference):
    return replace(row, inference=inference)
