"""The mean importance ratio is 1 whatever the trainer's weights; what is told, without logits, where not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from aligned_cases import batch_of, drawn, judged, log_softmax, told
from builders import provenance, sample

from rlbatch.alignment import Judge, measure
from rlbatch.alignment.drift import UNKNOWN_AGE, Drift
from rlbatch.alignment.measure import COLUMN
from rlbatch.alignment.ratio_means import mean_error, ratio_findings
from rlbatch.collate import collate
from rlbatch.records import SamplingParams, VersionSpan

NOISE = pytest.mark.parametrize("noise", [0.0, 0.01, 0.35])
"""Of float32, of bf16, and of a KLD of 0.03."""


def rows_of(num_rows=32, **how):
    return [drawn(48, seed, **how) for seed in range(num_rows)]


def off_in(verdict):
    """The one `ratio-mean-off`, and the mean and error that it says."""
    (found,) = [each for each in verdict.findings if each.code == "ratio-mean-off"]
    mean, _, error = found.found.partition(" over ")[0].partition(" +- ")
    return found, float(mean), float(error)


@NOISE
@pytest.mark.parametrize("kept", [8, 20])
def test_sampling_that_was_truncated_without_a_word_is_told_without_logits(kept, noise):
    rows = rows_of(kept=kept, noise=noise)
    verdict = judged(rows, logits=False)
    found, mean, error = off_in(verdict)
    assert (found.severity, verdict.judged) == ("warning", False)
    assert f"over {48 * 32} tokens of the trainer's own version" in found.found
    assert "top-k" in found.likely
    assert "logits_for" in found.fix
    # The mass that the trainer gives the sets which the engine drew from.
    masses = []
    for seed, row in enumerate(rows):
        engine = log_softmax(drawn(48, seed, kept=kept).logits)
        floor = np.sort(engine, axis=1)[:, -kept][:, None]
        masses.append(np.where(engine >= floor, np.exp(log_softmax(row.logits)), 0).sum(1))
    assert abs(mean - np.mean(masses)) < 4 * error


@NOISE
def test_tokens_of_the_whole_softmax_are_silent_near_and_far(noise):
    for seed in range(3):
        rows = [drawn(48, 1000 * seed + at, noise=noise) for at in range(32)]
        assert told(judged(rows, logits=False)) == []


@pytest.mark.parametrize("age", [1, 3])
def test_old_data_has_the_same_mean_and_is_told_alike(age):
    def aged(rows):
        span = VersionSpan(label=str(9 - age), start=0, stop=48)
        return judged(rows, logits=False, trainer_version=9, policy_versions=(span,))

    found, _, _ = off_in(aged(rows_of(kept=8, noise=0.2)))
    assert f"tokens of version lag {age}" in found.found
    assert told(aged(rows_of(noise=0.2))) == []


@pytest.mark.parametrize(("age", "said"), [(0, ["ratio-mean-off"]), (1, []), (UNKNOWN_AGE, [])])
def test_tokens_that_the_trainer_was_trained_on_may_have_become_likelier(age, said):
    # A second pass over samples that earned a reward: each of 400 tokens is 2 % likelier by now.
    drift = drift_of([[1.02] * 20] * 20, drawn=True)
    assert [found.code for found in ratio_findings({age: drift.total()})] == said


def test_raw_values_taken_for_scaled_ones_lie_above():
    rows = rows_of(temperature=0.8)
    at = np.arange(48)
    raw = [replace(row, inference=log_softmax(row.logits)[at, row.ids]) for row in rows]
    found, mean, _ = off_in(judged(raw, logits=False, temperature=0.8))
    assert mean > 1
    assert "raw logprobs" in found.likely
    assert "ratio-mean-off" not in told(judged(rows, logits=False, temperature=0.8))


def test_a_cause_that_is_named_says_it_all():
    assert told(judged(rows_of(16, kept=8))) == ["truncation-renormalized"]


def test_few_tokens_say_nothing_of_a_mean():
    rows = rows_of(kept=8)
    # 4 * 48 tokens are fewer than 200, and 5 * 48 are more.
    assert "ratio-mean-off" not in told(judged(rows[:4], logits=False))
    assert "ratio-mean-off" in told(judged(rows[:5], logits=False))


def test_stated_kept_sets_and_values_that_nobody_drew_from_are_left_out():
    rows = rows_of(kept=8)
    at_one = log_softmax(np.stack([row.logits for row in rows]))
    for purpose, mode, temperature in (("train-truncated", "processed", 1.0), ("audit", "raw", 0.8)):
        params = SamplingParams(temperature=temperature, top_k=8 if mode == "processed" else 0)
        how = provenance(sampling=params, logprobs_mode=mode)
        judge = Judge(trainer_version=None)
        samples = [
            sample([1, 5, 9], row.ids.tolist(), row.inference, provenance=how, trajectory_id=f"row{at}")
            for at, row in enumerate(rows)
        ]
        batch = collate(samples, layout="padded", purpose=purpose)
        trainer = torch.zeros(batch.shape, dtype=torch.float64)
        for at, (part, row) in enumerate(zip(batch.host_segments, rows, strict=True)):
            values = at_one[at][np.arange(48), row.ids]
            trainer[part.row, part.start : part.stop] = torch.from_numpy(values)
        judge.add(measure(batch, trainer))
        assert "ratio-mean-off" not in told(judge.verdict())


def drift_of(ratios, **how):
    """Segments [G, n] of ratios, as the table sums them."""
    rows = np.zeros((len(ratios), len(COLUMN)))
    rows[:, COLUMN["num_compared"]] = np.shape(ratios)[1]
    rows[:, COLUMN["sum_ratio"]] = np.sum(ratios, 1)
    rows[:, COLUMN["sum_sq_ratio"]] = np.sum(np.square(ratios), 1)
    drift = Drift()
    for row in rows:
        part = Drift()
        part.add_rows(row[None], np.zeros(1, np.int64), **how)
        drift.merge(part)
    return drift


def test_how_sure_a_mean_ratio_is_by_hand():
    sums = drift_of([[0.5, 1.0], [1.5, 1.0]], drawn=True).total()
    assert (sums.num_drawn, sums.sum_drawn_below) == (4, 0)
    assert mean_error(sums) == pytest.approx(0.5**0.5 / 4)
    assert drift_of([[0.5, 1.0]]).total().num_drawn == 0


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        # 400 tokens at 0.98: 20 errors, and 0.02 off.
        (0.98, 0.98, ["ratio-mean-off"]),
        (1.02, 1.02, ["ratio-mean-off"]),
        # Sure, and too small to matter.
        (0.995, 0.995, []),
        # 0.02 off on average, and each token by 0.3: four and a half errors are 0.0675.
        (0.68, 1.28, []),
        # Beyond any float, as log ratios of 80 nats are.
        (np.inf, 1.0, []),
    ],
)
def test_a_mean_must_be_off_by_its_errors_and_by_enough(low, high, said):
    drift = drift_of(np.tile([low, high], (20, 10)), drawn=True)
    assert [found.code for found in ratio_findings(drift.by_age)] == said


def test_both_layouts_say_the_same():
    texts = set()
    for layout in ("padded", "packed"):
        judge = Judge(trainer_version=None)
        judge.add(measure(*batch_of(rows_of(kept=8), layout=layout)))
        texts.add(off_in(judge.verdict())[0].found)
    assert len(texts) == 1
