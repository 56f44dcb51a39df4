"""The gate, on values worked out by hand: lags and their signs, zeros, precedence, limits, ages, modes."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import provenance, sample

from rlbatch.alignment import Judge, Limits, measure, require_aligned
from rlbatch.alignment.drift import Drift, age_of, drift_findings
from rlbatch.alignment.measure import COLUMN
from rlbatch.alignment.pools import Pool
from rlbatch.catalogue import finding
from rlbatch.collate import collate
from rlbatch.errors import AlignmentError, RecordError
from rlbatch.records import SamplingParams, VersionSpan

# What the trainer says of eight tokens; no two neighbours are alike.
TRUTH = [-0.5, -3.0, -0.1, -2.0, -4.0, -0.2, -1.5, -2.5]
IDS = [11, 12, 13, 14, 15, 16, 17, 18]


def batch_of(inference, *, layout="padded", purpose="train", version=None, **changes):
    """One sample [1, 5] -> as many of IDS as there are logprobs."""
    ids = IDS[: len(inference)] if len(inference) <= len(IDS) else list(range(11, 11 + len(inference)))
    if version is not None:
        changes["policy_versions"] = (VersionSpan(label=str(version), start=0, stop=len(ids)),)
    return collate([sample([1, 5], ids, inference, **changes)], layout=layout, purpose=purpose)


def trainer_for(batch, values):
    """[B, T] with `values` at the trained positions of its one sequence, rubbish elsewhere."""
    out = torch.full(batch.shape, 1100.0)
    out[batch.loss_mask] = torch.tensor(values, dtype=torch.float32)
    return out


def verdict_of(batch, values, *, trainer_version=None, limits=None):
    judge = Judge(trainer_version=trainer_version, limits=limits or Limits())
    judge.add(measure(batch, trainer_for(batch, values)))
    return judge.verdict()


def codes(verdict):
    return [(found.code, found.severity) for found in verdict.findings]


# -- lags ------------------------------------------------------------------------------------------------


def test_an_entry_too_many_in_front_is_lag_minus_one():
    # The ids lost their first token, the list of logprobs did not: inference[t] is the trainer's [t - 1].
    batch = batch_of([-0.9, *TRUTH[:-1]])
    with pytest.raises(AlignmentError) as caught:
        require_aligned(batch, trainer_for(batch, TRUTH), trainer_version=None)
    (found,) = caught.value.findings
    assert (found.code, found.severity) == ("shifted", "error")
    assert "at lag -1" in found.found
    assert (found.where.sample, found.where.turn, found.where.start, found.where.stop) == (0, 0, 2, 10)
    assert "an entry in front that the list of ids lost" in found.likely


def test_an_entry_lost_in_front_is_lag_plus_one():
    batch = batch_of([*TRUTH[1:], -0.9])
    (found,) = verdict_of(batch, TRUTH).findings
    assert found.code == "shifted"
    assert "at lag +1" in found.found
    assert "lost an entry in front" in found.likely


@pytest.mark.parametrize("lag", [-2, 2])
def test_two_entries_are_lag_two(lag):
    moved = [-0.9, -0.8, *TRUTH[:-2]] if lag < 0 else [*TRUTH[2:], -0.9, -0.8]
    (found,) = verdict_of(batch_of(moved), TRUTH).findings
    assert f"at lag {lag:+d}" in found.found


def test_the_right_list_has_no_lag():
    assert verdict_of(batch_of(TRUTH), TRUTH).findings == ()


def test_a_shift_is_named_at_any_age_of_the_data():
    batch = batch_of([-0.9, *TRUTH[:-1]], version=3)
    assert codes(verdict_of(batch, TRUTH, trainer_version=90)) == [("shifted", "error")]


def test_one_odd_token_at_an_edge_is_no_shift():
    # All but certain but for the last token, where the engine is far off: lag +1 would leave just that out.
    peaked = [-0.001] * 15
    batch = batch_of([*peaked, -3.0])
    assert codes(verdict_of(batch, [*peaked, -0.001])) == []


@pytest.mark.parametrize("side", ["trainer", "inference"])
@pytest.mark.parametrize("edge", [slice(0, 2), slice(-2, None)])
def test_odd_tokens_at_an_edge_are_no_shift_whoever_has_them(side, edge):
    # At lag +2 or -2 all else fits as well, and the two are left out: only one side of the pairs tells.
    peaked = np.full(16, -0.001)
    odd = peaked.copy()
    odd[edge] = -3.0
    inference, trainer = (peaked, odd) if side == "trainer" else (odd, peaked)
    assert "shifted" not in dict(codes(verdict_of(batch_of(inference.tolist()), trainer.tolist())))


def test_a_lag_that_tokens_speak_against_is_no_shift():
    # Lag +1 moves the two wild values of the trainer onto those of the engine, and leaves 0.06 nats where lag
    # 0 leaves 0.8. Yet two further tokens lie where they belong, and would be off by 0.3 nats on both sides.
    trainer, inference = np.full(20, -0.5), np.full(20, -0.5)
    trainer[[4, 9]], inference[[3, 8]] = -6.5, -6.5
    trainer[[13, 16]] = inference[[13, 16]] = -0.8
    assert "shifted" not in dict(codes(verdict_of(batch_of(inference.tolist()), trainer.tolist())))
    # Without those two nothing speaks against it.
    for values in (trainer, inference):
        values[[13, 16]] = -0.5
    assert "shifted" in dict(codes(verdict_of(batch_of(inference.tolist()), trainer.tolist())))


@pytest.mark.parametrize(("noise", "code"), [(0.1, "shifted"), (0.5, "unexplained")])
def test_a_lag_must_leave_no_more_than_noise(noise, code):
    # At lag -1 a sixth is left of what lag 0 leaves, 3 nats: with 0.5 nats still open that is no explanation.
    trainer = np.random.default_rng(0).uniform(-12, -1, 40)
    inference = np.roll(trainer, 1) + noise * np.array([1, -1] * 20)
    assert codes(verdict_of(batch_of(inference.tolist()), trainer.tolist())) == [(code, "error")]


def test_constant_logprobs_suggest_no_lag():
    assert verdict_of(batch_of([0.0] * 6), [0.0] * 6).findings == ()
    assert verdict_of(batch_of([-1.0] * 6), [-1.0] * 6).findings == ()


# -- zeros -----------------------------------------------------------------------------------------------


def test_zeros_where_the_trainer_is_not_certain_are_filled():
    inference = [-0.5, 0.0, -0.1, 0.0, -4.0, -0.2, -1.5, -2.5]
    (found,) = verdict_of(batch_of(inference), TRUTH).findings
    assert found.code == "zero-filled"
    assert (found.where.start, found.where.stop) == (3, 6)
    assert "0 at 2 of 8 trained tokens" in found.found


def test_zeros_where_the_trainer_is_certain_are_true():
    truth = [0.0, -5e-4, -0.1, -2.0]
    assert verdict_of(batch_of([0.0, 0.0, -0.1, -2.0]), truth).findings == ()


@pytest.mark.parametrize(
    "changes",
    [{"top_p": 0.5}, {"top_k": 1}, {"structured_output": True}, {"allowed_token_ids": True}, {"min_p": 0.3}],
)
def test_zeros_that_the_parameters_allow_are_not_held_against_anyone(changes):
    how = provenance(sampling=SamplingParams(temperature=1.0, **changes))
    batch = batch_of([-0.5, 0.0, -0.1, 0.0], provenance=how, purpose="audit")
    expected = [] if how.keeps_set else [("incomparable", "warning")]
    assert codes(verdict_of(batch, TRUTH[:4])) == expected


def test_raw_zeros_are_filled_whatever_the_sampling_but_for_a_grammar():
    zeros = [-0.5, 0.0, -0.1, 0.0]
    for sampling, expected in (
        ({"temperature": 0.7, "top_p": 0.5}, "zero-filled"),
        ({"temperature": 0.7, "structured_output": True}, "incomparable"),
    ):
        how = provenance(logprobs_mode="raw", sampling=SamplingParams(**sampling))
        batch = batch_of(zeros, provenance=how, purpose="audit")
        assert [code for code, _ in codes(verdict_of(batch, TRUTH[:4]))] == [expected]


# -- values that are no values ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (-9999.0, "logprob-sentinel"),
        (float("nan"), "logprob-missing"),
        (float("inf"), "logprob-not-finite"),
        (5.0, "logprob-positive"),
    ],
)
def test_bad_values_of_the_engine_are_named_and_not_judged_further(value, code):
    batch = batch_of([*TRUTH[:4], value, *TRUTH[5:]])
    verdict = verdict_of(batch, TRUTH)
    assert codes(verdict) == [(code, "error")]
    assert (verdict.findings[0].where.start, verdict.findings[0].where.stop) == (6, 7)
    assert verdict.metrics["rlbatch/num_tokens/sum"] == 0


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_bad_values_of_the_trainer_are_named(value):
    batch = batch_of(TRUTH)
    assert codes(verdict_of(batch, [*TRUTH[:-1], value])) == [("trainer-not-finite", "error")]


def test_a_trained_position_outside_every_segment_is_an_error():
    batch = batch_of(TRUTH)
    mask = batch.loss_mask.clone()
    mask[0, 0] = True
    with pytest.raises(AlignmentError, match="mask-without-logprob"):
        require_aligned(replace(batch, loss_mask=mask), torch.zeros(batch.shape), trainer_version=None)


@pytest.mark.parametrize(
    "trainer",
    [torch.zeros(1, 9), torch.zeros(10), torch.zeros(1, 10, dtype=torch.bfloat16), torch.zeros(10, 1)],
    ids=["short", "flat", "bf16", "transposed"],
)
def test_logprobs_that_cannot_be_of_this_batch_are_refused(trainer):
    with pytest.raises(AlignmentError) as caught:
        require_aligned(batch_of(TRUTH), trainer, trainer_version=None)
    assert caught.value.code == "batch-mismatch"


# -- limits and ages -------------------------------------------------------------------------------------


def offset_batch(offset, num_tokens, **changes):
    """Every other ratio is e^offset, the rest 2 - e^offset: their mean is 1, as of tokens that were drawn."""
    truth = np.random.default_rng(0).uniform(-4, -0.6, num_tokens)
    log_ratio = np.where(np.arange(num_tokens) % 2, offset, np.log(2 - np.exp(offset)))
    return batch_of((truth - log_ratio).tolist(), **changes), truth.tolist()


def test_the_limits_hold_the_capped_kld_of_current_tokens():
    # -(.37 + log .552) / 2 = 0.112 a token, -(.3 + log .65) / 2 = 0.065, -(.2 + log .779) / 2 = 0.025
    for offset, expected in (
        (0.37, [("kld-high", "error")]),
        (0.3, [("kld-high", "warning")]),
        (0.2, []),
    ):
        batch, truth = offset_batch(offset, 1200)
        assert codes(verdict_of(batch, truth)) == expected, offset


def test_below_min_tokens_no_limit_is_applied_and_nothing_is_judged():
    batch, truth = offset_batch(0.37, 900)
    verdict = verdict_of(batch, truth)
    assert codes(verdict) == []
    assert verdict.judged is False
    assert codes(verdict_of(batch, truth, limits=Limits(min_tokens=900))) == [("kld-high", "error")]


def test_few_tokens_are_judged_where_every_segment_is_clean():
    assert verdict_of(batch_of([value + 0.019 for value in TRUTH]), TRUTH).judged is True
    assert verdict_of(batch_of([value + 0.021 for value in TRUTH]), TRUTH).judged is False


def test_one_wild_token_in_ten_thousand_does_not_move_the_gate():
    truth = np.random.default_rng(0).uniform(-4, -0.6, 10_000)
    inference = truth.copy()
    inference[77] -= 7.0
    batch = batch_of(inference.tolist())
    metrics = verdict_of(batch, truth.tolist()).metrics
    # exp(7) - 8 = 1088.6 over 10,000
    assert metrics["rlbatch/inference_kld/mean"] == pytest.approx(0.10886, rel=1e-3)
    assert metrics["rlbatch/inference_kld_capped/mean"] == pytest.approx(1e-4, rel=1e-3)


def test_older_and_unknown_versions_only_warn_broken_down_by_age():
    for version, trainer_version, name in (
        (3, 3, "version_lag_0"),
        (1, 3, "version_lag_2"),
        (None, 3, "unknown"),
    ):
        batch, truth = offset_batch(0.37, 1200, version=version)
        verdict = verdict_of(batch, truth, trainer_version=trainer_version)
        severity = "error" if version == trainer_version else "warning"
        # Without a version the second warning says why the first is no error.
        doubt = [("version-unknown", "warning")] if version is None else []
        assert codes(verdict) == [("kld-high", severity), *doubt]
        assert any(name in key for key in verdict.metrics)


def aged_findings(kld_of, *, num_tokens=2000, spread=0.5, seed=0):
    """Findings of the aggregate of segments of 50 tokens: `kld_of` says the mean capped k3 of each age."""
    rng = np.random.default_rng(seed)
    drift = Drift()
    for age, kld in kld_of.items():
        rows = np.zeros((num_tokens // 50, len(COLUMN)))
        rows[:, COLUMN["num_compared"]] = 50
        rows[:, COLUMN["sum_k3_capped"]] = 50 * kld * rng.uniform(1 - spread, 1 + spread, len(rows))
        drift.add_rows(rows, np.full(len(rows), age))
    return list(drift_findings(drift.by_age, Limits()))


def test_a_kld_that_rises_with_age_is_stale_by_so_much_a_version():
    found = aged_findings({0: 0.002, 1: 0.012, 2: 0.022, 4: 0.042}, spread=0.0)
    assert [(each.code, each.severity) for each in found] == [("stale", "warning")]
    assert "rises by 0.01 nats a version: 0.002 over 2000 current tokens, 0.012 at lag 1" in found[0].found
    assert "over 6000 older tokens" in found[0].found
    assert [each.code for each in aged_findings({0: 0.002, 1: 0.012, 2: 0.022, 4: 0.042})] == ["stale"]


@pytest.mark.parametrize(
    ("kld_of", "how"),
    [
        ({0: 0.02, 1: 0.02, 4: 0.02}, {}),
        ({0: 0.04, 1: 0.02, 4: 0.01}, {}),
        # Sure, and too small to matter: 0.008 nats in four versions.
        ({0: 0.002, 4: 0.010}, {"spread": 0.0}),
        # Large enough, and not sure: 20 segments on each side, whose sums differ by more.
        ({0: 0.02, 1: 0.031}, {"num_tokens": 1000, "spread": 1.0, "seed": 3}),
        ({0: 0.002, 4: 0.042}, {"num_tokens": 950}),
        # Nothing is current; or the age is unknown.
        ({1: 0.002, 4: 0.042}, {}),
        ({0: 0.002, -1: 0.042}, {}),
    ],
)
def test_old_data_without_a_sure_rise_is_not_stale(kld_of, how):
    assert aged_findings(kld_of, **how) == []


def test_where_current_tokens_are_off_as_well_age_is_not_blamed():
    assert "stale" not in {each.code for each in aged_findings({0: 0.06, 4: 0.2}, spread=0.0)}


def test_how_sure_a_mean_is_by_hand():
    # Segments of 10 tokens with sums 1 and 3: mean 0.2, (1 - 2)^2 + (3 - 2)^2 over 20^2.
    rows = np.zeros((2, len(COLUMN)))
    rows[:, COLUMN["num_compared"]] = 10
    rows[:, COLUMN["sum_k3_capped"]] = [1, 3]
    whole, parts = Drift(), [Drift(), Drift()]
    whole.add_rows(rows, np.zeros(2, np.int64))
    for part, row in zip(parts, rows, strict=True):
        part.add_rows(row[None], np.zeros(1, np.int64))
    parts[0].merge(parts[1])
    for drift in (whole, parts[0]):
        assert drift.total().kld_variance() == pytest.approx(2 / 400)


def test_ages_count_versions_and_the_future_is_unknown():
    assert [age_of(version, 5) for version in (5, 3, -1, 6, 9)] == [0, 2, -1, -1, -1]
    assert age_of(-1, None) == 0


def test_data_of_weights_that_the_trainer_does_not_have_yet_is_an_error_whatever_its_values():
    batch = batch_of(TRUTH, version=7)
    (found,) = verdict_of(batch, TRUTH, trainer_version=2).findings
    assert (found.code, found.severity) == ("version-ahead", "error")
    assert (found.where.sample, found.expected) == (0, "versions up to the trainer's 2")
    assert found.found == "version 7 in 1 of 1 turns of the batch"
    for newest in (7, 8, None):
        assert codes(verdict_of(batch, TRUTH, trainer_version=newest)) == []
    untrained = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert codes(verdict_of(untrained, [], trainer_version=2)) == []
    # The cause of what else is wrong with it is told as well.
    moved = batch_of([-0.9, *TRUTH[:-1]], version=7)
    assert codes(verdict_of(moved, TRUTH, trainer_version=2)) == [
        ("version-ahead", "error"),
        ("shifted", "error"),
    ]


def test_versions_that_nobody_says_beside_a_trainers_are_told_once_a_step():
    batch = batch_of(TRUTH)
    trainer = trainer_for(batch, TRUTH)
    (found,) = require_aligned([batch] * 3, [trainer] * 3, trainer_version=3)[0].warnings
    assert (found.code, found.severity) == ("version-unknown", "warning")
    assert found.found == "none in any turn, 24 tokens"
    assert "policy_versions" in found.fix
    assert require_aligned(batch, trainer, trainer_version=None).warnings == ()
    known = batch_of(TRUTH, version=3)
    assert require_aligned([batch, known], [trainer] * 2, trainer_version=3)[0].warnings == ()


def test_a_gross_mismatch_without_a_cause_is_unexplained_and_strangers_are_at_any_age():
    truth, strangers = (np.random.default_rng(seed).uniform(-6, -0.05, 40).tolist() for seed in (0, 1))
    for version in (None, 1, 2):
        batch = batch_of(strangers, version=version)
        assert codes(verdict_of(batch, truth, trainer_version=2)) == [("unexplained", "error")]


def test_a_short_row_that_moved_far_is_not_taken_for_a_stranger():
    # A real row of 10 tokens, two policies old at a high learning rate: lag 0 fits it best.
    truth = [-0.0022, 0.0, -8.29, -0.001, -12.48, -7.48, -11.96, -0.025, -3.56, -0.48]
    inference = [-0.0015, 0.0, -5.59, -0.0013, -7.23, -3.75, -1.82, -0.0007, -0.081, -0.0047]
    batch = batch_of(inference, version=0)
    assert codes(verdict_of(batch, truth, trainer_version=2)) == [("unexplained", "warning")]


def test_old_data_that_moved_far_but_belongs_to_its_tokens_is_a_warning_and_not_judged():
    truth = TRUTH * 5
    moved = [1.5 * value for value in truth]
    verdict = verdict_of(batch_of(moved, version=1), truth, trainer_version=2)
    assert codes(verdict) == [("unexplained", "warning")]
    assert verdict.judged is False
    current = batch_of(moved, version=2)
    assert codes(verdict_of(current, truth, trainer_version=2)) == [("unexplained", "error")]


def test_a_row_too_short_for_a_verdict_may_still_be_doubted():
    strangers = [-4.0, -0.1, -3.5, -0.2, -0.6]
    verdict = verdict_of(batch_of(strangers), [-0.3, -2.8, -0.2, -4.0, -2.0])
    assert codes(verdict) == [("unexplained", "warning")]
    assert verdict.judged is False


def test_one_doubt_leaves_a_step_unjudged_however_much_is_clean():
    clean = batch_of(TRUTH * 150)
    assert verdict_of(clean, TRUTH * 150).judged is True
    judge = Judge(trainer_version=None)
    judge.add(measure(clean, trainer_for(clean, TRUTH * 150)))
    strangers = batch_of([-4.0, -0.1, -3.5, -0.2, -0.6])
    judge.add(measure(strangers, trainer_for(strangers, [-0.3, -2.8, -0.2, -4.0, -2.0])))
    verdict = judge.verdict()
    assert codes(verdict) == [("unexplained", "warning")]
    assert verdict.judged is False


def test_a_pool_that_is_in_doubt_says_nothing_beside_what_is_sure():
    doubt = finding("prefix-differs", severity="warning", expected="one prefix", found="two")
    for inference, expected in (
        (TRUTH, [("prefix-differs", "warning")]),
        ([-0.9, *TRUTH[:-1]], [("shifted", "error")]),
    ):
        judge = Judge(trainer_version=None)
        batch = batch_of(inference)
        judge.add(measure(batch, trainer_for(batch, TRUTH)))
        judge.pools[provenance(engine="sglang")] = Pool(cause=doubt)
        assert codes(judge.verdict()) == expected


def test_two_gross_stretches_are_not_averaged_with_what_lies_between():
    rng = np.random.default_rng(0)
    truth = rng.uniform(-6, -0.05, 640)
    inference = truth.copy()
    inference[:64], inference[-64:] = rng.uniform(-6, -0.05, (2, 64))
    for version in (1, 2):
        batch = batch_of(inference.tolist(), version=version)
        (found,) = verdict_of(batch, truth.tolist(), trainer_version=2).findings
        assert (found.code, found.severity) == ("unexplained", "error")
        assert "over 64 tokens" in found.found
        assert "2 such stretches" in found.found


def test_a_shift_that_heals_inside_a_row_is_placed():
    truth = np.random.default_rng(0).uniform(-4, -0.05, 500)
    inference = truth.copy()
    inference[201:264] = truth[200:263]
    (found,) = verdict_of(batch_of(inference.tolist()), truth.tolist()).findings
    assert found.code == "shifted"
    assert "at lag -1" in found.found
    assert 195 <= found.where.start <= 210
    assert found.where.stop <= 275


def test_a_handful_of_honest_tokens_is_never_shifted():
    rng = np.random.default_rng(0)
    for _ in range(500):
        truth = rng.uniform(-4, -0.05, int(rng.integers(3, 7)))
        noisy = np.minimum(truth + rng.normal(0, 0.3, len(truth)), -1e-3)
        verdict = verdict_of(batch_of(noisy.tolist()), truth.tolist())
        assert {code for code, _ in codes(verdict)} <= {"unexplained"}


def test_one_odd_token_of_a_short_row_is_no_gross_mismatch():
    for num_tokens, value in ((8, -8.0), (8, -30.0), (12, -30.0)):
        truth = ([*TRUTH, *TRUTH])[:num_tokens]
        verdict = verdict_of(batch_of([*truth[:3], value, *truth[4:]]), truth)
        assert {code for code, severity in codes(verdict) if severity == "error"} == set()


def test_a_row_that_repeats_itself_is_shifted_though_which_way_cannot_be_told():
    truth = [-0.05, -0.45] * 50
    (found,) = verdict_of(batch_of(truth[1:] + truth[:1]), truth).findings
    assert found.code == "shifted"
    assert "at lag -1" in found.found
    assert "at lag +1" in found.found
    assert "the row repeats itself" in found.found


@pytest.mark.parametrize("at", [30, 250, 440])
@pytest.mark.parametrize("num_tokens", [500])
def test_an_entry_put_in_inside_a_row_is_a_shift_from_there_on(at, num_tokens):
    truth = np.random.default_rng(0).uniform(-4, -0.05, num_tokens)
    inference = np.concatenate([truth[:at], [-1.0], truth[at:-1]])
    (found,) = verdict_of(batch_of(inference.tolist()), truth.tolist()).findings
    assert (found.code, found.severity) == ("shifted-from", "error")
    assert "at lag -1" in found.found
    # Token 2 is the first sampled one; a value may happen to fit on either side of the change.
    assert abs(found.where.start - (2 + at)) <= 2
    assert found.where.stop == 2 + num_tokens


def test_one_zero_that_matters_to_nobody_is_no_fault():
    truth = [-0.0011] + [-1.0] * 40
    assert codes(verdict_of(batch_of([0.0] + [-1.0] * 40), truth)) == []


def test_zeros_of_old_data_need_more_evidence():
    inference, truth = [0.0, -3.0, -0.1, -2.0], [-0.06, -3.0, -0.1, -2.0]
    for version, expected in ((2, [("zero-filled", "error")]), (1, [])):
        assert codes(verdict_of(batch_of(inference, version=version), truth, trainer_version=2)) == expected
    # Of old data it takes eight, which are at least half of all zeros: weights may have been certain before.
    for num_filled, num_certain, expected in ((7, 0, []), (8, 8, [("zero-filled", "error")]), (8, 9, [])):
        truth = [-2.0] * num_filled + [0.0] * num_certain + [-0.1, -3.0]
        filled = batch_of([0.0] * (num_filled + num_certain) + [-0.1, -3.0], version=1)
        told = [each for each in codes(verdict_of(filled, truth, trainer_version=2)) if each[1] == "error"]
        assert told == expected


def test_each_age_needs_tokens_of_its_own_to_be_judged():
    # 600 tokens of two versions each, 0.37 nats off or more: no limit applies to either, and none is judged.
    judge = Judge(trainer_version=2)
    for version in (1, 2):
        batch, truth = offset_batch(0.37, 600, version=version)
        judge.add(measure(batch, trainer_for(batch, truth)))
    assert judge.verdict().judged is False


@pytest.mark.parametrize(("nats", "expected"), [(19.9, []), (20.1, [("ratio-tail", "warning")])])
def test_the_tail_begins_where_the_limit_says(nats, expected):
    # One token of 200, as a kernel or a router may spoil it: the mean stays far below every other limit.
    truth = TRUTH * 25
    moved = [*truth[:5], truth[5] - nats, *truth[6:]]
    assert codes(verdict_of(batch_of(moved), truth)) == expected


def test_one_token_beyond_the_tail_is_pointed_out():
    truth = [*TRUTH, *TRUTH]
    batch = batch_of([*truth[:5], -91.0, *truth[6:]])
    verdict = verdict_of(batch, truth)
    assert codes(verdict) == [("ratio-tail", "warning")]
    assert (verdict.findings[0].where.start, verdict.findings[0].where.stop) == (7, 8)
    assert all(np.isfinite(value) for value in verdict.metrics.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"kld_error": 0.01},
        {"kld_warning": 0.0},
        {"kld_error": float("nan")},
        {"min_tokens": 0},
        {"ratio_tail": -1.0},
        {"ratio_tail": float("nan")},
    ],
)
def test_limits_that_make_no_sense_are_refused(changes):
    with pytest.raises(RecordError, match="Limits"):
        Limits(**changes)


# -- provenance ------------------------------------------------------------------------------------------


def test_training_refuses_what_cannot_be_compared():
    for sampling, code in (
        ({"temperature": 0.0}, "greedy-sampled"),
        ({"temperature": 1.0, "top_k": 5}, "incomparable"),
    ):
        batch = batch_of(TRUTH, provenance=provenance(sampling=SamplingParams(**sampling)))
        assert codes(verdict_of(batch, TRUTH)) == [(code, "error")]


def test_shifted_outranks_incomparable():
    how = provenance(sampling=SamplingParams(temperature=1.0, top_k=20))
    batch = batch_of([-0.9, *TRUTH[:-1]], provenance=how)
    assert codes(verdict_of(batch, TRUTH)) == [("shifted", "error")]


def test_values_of_unknown_kind_are_not_judged():
    how = provenance(logprobs_mode="unknown", sampling=SamplingParams(temperature=0.7))
    verdict = verdict_of(batch_of(TRUTH, provenance=how, purpose="audit"), TRUTH)
    assert codes(verdict) == [("incomparable", "warning")]
    assert verdict.judged is False


# -- what comes back -------------------------------------------------------------------------------------


def test_the_alignment_has_the_ratios_with_gradient_to_the_trainer():
    batch = batch_of([-1.5, *TRUTH[1:]])
    trainer = trainer_for(batch, [-1.0, *TRUTH[1:]]).requires_grad_()
    alignment = require_aligned(batch, trainer, trainer_version=None)
    at = batch.loss_mask[0].nonzero()[0].item()
    assert alignment.log_ratio[0, at].item() == pytest.approx(0.5)
    assert alignment.ratio[0, at].item() == pytest.approx(1.6487, rel=1e-4)
    assert alignment.inference_kld[0, at].item() == pytest.approx(0.1487, rel=1e-3)
    alignment.ratio.sum().backward()
    # d ratio / d trainer = ratio at compared positions, 0 elsewhere.
    torch.testing.assert_close(trainer.grad, torch.where(batch.loss_mask, alignment.ratio.detach(), 0.0))


def test_nothing_under_the_mask_changes_a_bit():
    batch = batch_of(TRUTH)
    clean = trainer_for(batch, TRUTH)
    results = []
    for rubbish in (0.0, float("nan"), float("inf"), -1e10, 1100.0):
        trainer = torch.where(batch.loss_mask, clean, rubbish).requires_grad_()
        inference = torch.where(batch.loss_mask, batch.inference_logprobs, rubbish)
        alignment = require_aligned(
            replace(batch, inference_logprobs=inference), trainer, trainer_version=None
        )
        (alignment.ratio.sum() + alignment.inference_kld.sum()).backward()
        results.append(
            (alignment.log_ratio, alignment.ratio, alignment.inference_kld, trainer.grad, alignment.metrics)
        )
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other[:4], results[0][:4], strict=True))
        assert other[4] == results[0][4]


def test_both_layouts_and_dtypes_give_one_verdict():
    moved = [-0.9, *TRUTH[:-1]]
    texts = set()
    for layout in ("padded", "packed"):
        for dtype in (torch.float32, torch.float64):
            batch = batch_of(moved, layout=layout)
            with pytest.raises(AlignmentError) as caught:
                require_aligned(batch, trainer_for(batch, TRUTH).to(dtype), trainer_version=None)
            texts.add(str(caught.value))
    assert len(texts) == 1


def test_tool_tokens_between_turns_change_no_figure():
    from builders import trajectory, turn

    from rlbatch.assemble import to_samples

    plain = turn([1, 5], IDS, TRUTH), turn([1, 5, *IDS], [9], [-1.0])
    tools = turn([1, 5], IDS, TRUTH), turn([1, 5, *IDS, 30, 31, 32, 33, 34, 35, 36], [9], [-1.0])
    metrics = []
    for turns in (plain, tools):
        batch = collate(to_samples(trajectory(*turns)), layout="packed")
        metrics.append(verdict_of(batch, [value + 0.01 for value in TRUTH] + [-1.0]).metrics)
    assert metrics[0] == pytest.approx(metrics[1])


def test_what_a_trainer_logs_by_hand():
    # Half of the tokens 0.02 nats more probable under the trainer, half 0.01 less: k1 is inference - trainer.
    moved = [value + step for value, step in zip(TRUTH, [0.02, -0.01] * 4, strict=True)]
    metrics = verdict_of(batch_of(TRUTH), moved).metrics
    ratios = np.exp([0.02, -0.01])
    expected = {
        "num_tokens/sum": 8,
        "num_excluded_segments/sum": 0,
        "k1/mean": -0.005,
        "abs_log_ratio/mean": 0.015,
        "abs_log_ratio/max": 0.02,
        "ratio/mean": ratios.mean(),
        "inference_kld/mean": (ratios - 1 - [0.02, -0.01]).mean(),
    }
    for name, value in expected.items():
        assert metrics[f"rlbatch/{name}"] == pytest.approx(value, rel=1e-3), name
    shifted = verdict_of(batch_of([-0.9, *TRUTH[:-1]]), TRUTH).metrics
    assert shifted["rlbatch/num_excluded_segments/sum"] == 1
    assert shifted["rlbatch/num_tokens/sum"] == 0


def test_a_turn_that_cannot_be_compared_gives_the_loss_no_ratio():
    # The second row was drawn under a grammar; its logprobs are of a set that the trainer does not know.
    grammar = provenance(sampling=SamplingParams(temperature=1.0, structured_output=True))
    rows = [
        sample([1, 5], IDS, TRUTH, provenance=how, trajectory_id=name)
        for name, how in (("a", provenance()), ("b", grammar))
    ]
    batch = collate(rows, layout="padded", purpose="audit")
    trainer = torch.zeros(batch.shape)
    trainer[batch.loss_mask] = torch.tensor(TRUTH + [value - 1 for value in TRUTH])
    alignment = require_aligned(batch, trainer, trainer_version=None)
    assert alignment.compared.sum(dim=1).tolist() == [8, 0]
    assert (alignment.ratio[1] == 1).all()
    assert (alignment.log_ratio[1] == 0).all()


def test_the_largest_of_a_long_turn_is_of_one_of_its_windows_and_no_sum():
    # Four windows of 64 tokens: in the first all are 0.2 nats off, in the third 0.5, elsewhere none.
    truth = np.array((TRUTH * 25)[:200])
    moved = truth.copy()
    moved[:64] += 0.2
    moved[128:192] -= 0.5
    batch = batch_of(moved.tolist())
    (row,) = measure(batch, trainer_for(batch, truth.tolist())).table()
    assert row[COLUMN["max_abs_log_ratio"]] == pytest.approx(0.5, rel=1e-5)
    assert row[COLUMN["max_window_residual"]] == pytest.approx(0.5, rel=1e-5)
    assert row[COLUMN["first_num_compared"]] == 64
    assert row[COLUMN["first_sum_abs_log_ratio"]] == pytest.approx(64 * 0.2, rel=1e-5)
    assert row[COLUMN["sum_abs_log_ratio"]] == pytest.approx(64 * 0.7, rel=1e-5)


# -- where the gate stands -------------------------------------------------------------------------------


def good_and_bad():
    good, bad = batch_of(TRUTH), batch_of([-0.9, *TRUTH[:-1]])
    return [good, bad], [trainer_for(good, TRUTH), trainer_for(bad, TRUTH)]


def test_a_step_gives_a_list_and_one_bad_batch_fails_it():
    batches, trainers = good_and_bad()
    alignments = require_aligned(batches[:1] * 2, trainers[:1] * 2, trainer_version=None)
    assert len(alignments) == 2
    assert alignments[0].metrics == alignments[1].metrics
    assert alignments[0].metrics["rlbatch/num_tokens/sum"] == 16
    with pytest.raises(AlignmentError, match="shifted"):
        require_aligned(batches, trainers, trainer_version=None)


def test_limits_pool_over_the_step():
    batch, truth = offset_batch(0.37, 600)
    trainer = trainer_for(batch, truth)
    require_aligned(batch, trainer, trainer_version=None)
    with pytest.raises(AlignmentError, match="kld-high"):
        require_aligned([batch, batch], [trainer, trainer], trainer_version=None)


def test_a_deferred_gate_says_the_same_before_the_optimizer_step():
    batches, trainers = good_and_bad()
    with pytest.raises(AlignmentError) as at_once:
        require_aligned(batches, trainers, trainer_version=None)
    alignments = require_aligned(batches, trainers, trainer_version=None, defer=True)
    for _ in range(2):
        with pytest.raises(AlignmentError) as later:
            alignments[0].verify()
        assert str(later.value) == str(at_once.value)
    with pytest.raises(AlignmentError):
        alignments[1].metrics  # noqa: B018
    fine = require_aligned(batches[0], trainers[0], trainer_version=None, defer=True)
    fine.verify()
    assert fine.warnings == ()


def test_everything_in_a_deferred_alignment_is_finite():
    batch = batch_of([*TRUTH[:-1], float("nan")])
    trainer = trainer_for(batch, [float("inf"), *TRUTH[1:]]).requires_grad_()
    alignment = require_aligned(batch, trainer, trainer_version=None, defer=True)
    (alignment.ratio.sum() + alignment.inference_kld.sum()).backward()
    for tensor in (alignment.log_ratio, alignment.ratio, alignment.inference_kld, trainer.grad):
        assert torch.isfinite(tensor).all()


def test_nothing_trained_is_an_error_of_a_step_and_a_warning_of_a_batch():
    batch = batch_of(TRUTH)
    empty = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    trainer = torch.zeros(batch.shape)
    alignment = require_aligned(empty, trainer, trainer_version=None)
    assert [(found.code, found.severity) for found in alignment.warnings] == [("nothing-trained", "warning")]
    assert all(np.isfinite(value) for value in alignment.metrics.values())
    with pytest.raises(AlignmentError, match="nothing-trained"):
        require_aligned([empty], [trainer], trainer_version=None)
    assert (
        len(require_aligned([empty, batch], [trainer, trainer_for(batch, TRUTH)], trainer_version=None)) == 2
    )


def test_what_is_no_batch_or_version_is_refused():
    batch = batch_of(TRUTH)
    trainer = trainer_for(batch, TRUTH)
    with pytest.raises(RecordError, match="expected a Batch"):
        require_aligned({"input_ids": 1}, trainer, trainer_version=None)
    with pytest.raises(AlignmentError, match="found:    NoneType"):
        require_aligned(batch, None, trainer_version=None)
    for version in ("1", 1.0, True):
        with pytest.raises(RecordError, match="trainer_version"):
            require_aligned(batch, trainer, trainer_version=version)


def test_arguments_that_only_a_suspect_or_a_collective_would_trip_over_are_refused_at_once():
    batch = batch_of(TRUTH)
    trainer = trainer_for(batch, TRUTH)
    for wrong, said in (
        ({"limits": {}}, r"limits: expected rlbatch.alignment.Limits\(...\), found dict"),
        (
            {"logits_for": torch.nn.Linear(2, 2)},
            r"rlbatch.scoring.logits_for\(model\) makes one, found Linear",
        ),
        ({"logits_for": "model"}, "found str"),
        ({"group": "world"}, "group: expected a process group .* found 'world'"),
    ):
        with pytest.raises(RecordError, match=said):
            require_aligned(batch, trainer, trainer_version=None, **wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logprobs_in_half_precision_are_told_to_be_made_of_float_logits(dtype):
    batch = batch_of(TRUTH)
    trainer = trainer_for(batch, TRUTH).clamp(max=0).to(dtype)
    with pytest.raises(AlignmentError, match="batch-mismatch") as caught:
        require_aligned(batch, trainer, trainer_version=None)
    (found,) = caught.value.findings
    assert "half precision" in found.likely
    assert "logits.float()" in found.fix
    with pytest.raises(AlignmentError, match="logprobs of another micro-batch"):
        require_aligned(batch, trainer.float()[:, 1:], trainer_version=None)


def test_whether_a_step_was_judged_can_be_asked():
    batch, truth = offset_batch(0.2, 900)
    assert require_aligned(batch, trainer_for(batch, truth), trainer_version=None).judged is False
    clean = batch_of(TRUTH)
    assert require_aligned(clean, trainer_for(clean, TRUTH), trainer_version=None).judged is True


def test_too_little_to_judge_is_a_warning_that_says_how_little():
    batch, truth = offset_batch(0.2, 900)
    trainer = trainer_for(batch, truth)
    (found,) = require_aligned(batch, trainer, trainer_version=None).warnings
    assert (found.code, found.severity) == ("too-few-to-judge", "warning")
    assert "at least 1000 compared tokens" in found.expected
    assert found.found.startswith("900 tokens of the trainer's own version")
    assert "without it a forgotten temperature cannot be told" in found.fix
    # Enough tokens, or ones that agree closely, leave nothing to warn of.
    enough, truth = offset_batch(0.2, 1100)
    assert require_aligned(enough, trainer_for(enough, truth), trainer_version=None).warnings == ()
    clean = batch_of(TRUTH)
    assert require_aligned(clean, trainer_for(clean, TRUTH), trainer_version=None).warnings == ()


def test_findings_name_the_micro_batch_where_a_step_has_several():
    batches, trainers = good_and_bad()
    with pytest.raises(AlignmentError) as caught:
        require_aligned(batches, trainers, trainer_version=None)
    assert {found.where.batch for found in caught.value.findings} == {1}
    assert str(caught.value).startswith("[shifted] micro-batch 1, sample 0, trajectory 't0'")
    for alone in (batches[1], [batches[1]]):
        given = trainers[1] if alone is batches[1] else [trainers[1]]
        with pytest.raises(AlignmentError) as caught:
            require_aligned(alone, given, trainer_version=None)
        assert {found.where.batch for found in caught.value.findings} == {None}
    with pytest.raises(AlignmentError, match=r"\[batch-mismatch\] micro-batch 1\n"):
        require_aligned(batches, [trainers[0], trainers[1][:, :-1]], trainer_version=None)


def test_a_step_needs_logprobs_for_each_batch():
    batches, trainers = good_and_bad()
    with pytest.raises(RecordError, match="found 2 batches and 1"):
        require_aligned(batches, trainers[:1], trainer_version=None)
    with pytest.raises(RecordError, match="found 0 batches and 0"):
        require_aligned([], [], trainer_version=None)


def test_the_error_pickles_with_its_findings():
    batches, trainers = good_and_bad()
    with pytest.raises(AlignmentError) as caught:
        require_aligned(batches, trainers, trainer_version=None)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.findings) == (str(caught.value), caught.value.findings)


def test_the_gate_works_on_each_device(device):
    batch = batch_of([-0.9, *TRUTH[:-1]])
    with pytest.raises(AlignmentError, match="lag -1"):
        require_aligned(batch.to(device), trainer_for(batch, TRUTH).to(device), trainer_version=None)
    fine = batch_of(TRUTH)
    alignment = require_aligned(fine.to(device), trainer_for(fine, TRUTH).to(device), trainer_version=None)
    assert alignment.metrics["rlbatch/abs_log_ratio/max"] == 0
