"""The fire drill: noise of the size asked for, cases counted as they are, and a document that tells all."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import provenance, sample
from typer.testing import CliRunner

from rlbatch.catalogue import CATALOGUE, finding
from rlbatch.cli import app
from rlbatch.collate import collate
from rlbatch.drill import Drilled, DrillOptions, Noise, Pool, Scores, Tally, cases, load_pool, run, run_drill
from rlbatch.drill.judging import SetUp, findings_of, trainer_logprobs_of
from rlbatch.drill.pool import num_informative, pool_of
from rlbatch.drill.tally import told
from rlbatch.errors import RecordError, StorageError, Where
from rlbatch.faults import FAULTS, LAYOUT_FAULTS, MODEL_FAULTS, SET_FAULTS, Scored, shift
from rlbatch.records import SamplingParams, identical
from rlbatch.scoring import load_model, model_identity, model_vocab_size, trainer_logprobs
from rlbatch.storage import open_reader, write_shard
from rlbatch.storage.statements import Statement


@pytest.fixture(scope="module")
def model(tinylm_dir):
    return load_model(tinylm_dir, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def rollouts(tinylm_dir) -> Path:
    return tinylm_dir.parent / "rollouts"


@pytest.fixture(scope="module")
def pool(rollouts) -> Pool:
    return load_pool([rollouts], Statement(), max_samples=1000, rng=np.random.default_rng(0))


def scores_of(model, pool, noise=Noise()) -> Scores:  # noqa: B008  frozen
    return Scores(model, vocab_size=model_vocab_size(model), noise=noise, calibrate_on=pool.able)


# -- the pool ----------------------------------------------------------------------------------------------


def test_all_rows_are_drawn_where_there_is_room_and_each_once(pool):
    assert len(pool.samples) == 102
    assert len({each.sample_id for each in pool.samples}) == 102
    assert all(num_informative(each) >= 16 for each in pool.able)
    assert {each.provenances for each in pool.alike} == {pool.alike[0].provenances}


def test_fewer_rows_are_drawn_from_all_files(rollouts):
    drawn = [
        load_pool([rollouts], Statement(), max_samples=60, rng=np.random.default_rng(seed)).samples
        for seed in (0, 0, 1)
    ]
    names = [[each.sample_id for each in samples] for samples in drawn]
    assert names[0] == names[1] != names[2]
    assert len(set(names[0])) == 60
    # Four files of 32, 32, 32 and 6 rows.
    assert len({name.split("#")[0] for name in names[0]}) >= 3


def test_rows_that_cannot_be_trained_on_are_refused(tmp_path):
    raw = provenance(logprobs_mode="raw", sampling=SamplingParams(temperature=0.7))
    rows = [sample([1, 5], [7] * 20, [-1.0] * 20, provenance=raw, trajectory_id=f"t{i}") for i in range(3)]
    write_shard(tmp_path / "raw.safetensors", rows)
    says = "0 of 3; 3 with raw logprobs of tokens sampled with temperature 0.7\n"
    with pytest.raises(StorageError, match=says) as caught:
        load_pool([tmp_path], Statement(), max_samples=9, rng=np.random.default_rng(0))
    assert caught.value.code == "nothing-trained"


def test_one_row_that_can_be_trained_on_is_too_few(tmp_path):
    kept = sample([1, 5], [7] * 20, [-1.0] * 20)
    write_shard(
        tmp_path / "one.safetensors", [kept, replace(kept, sample_id="u", loss_mask=np.zeros(22, bool))]
    )
    with pytest.raises(StorageError, match="1 of 2; 1 without a trained token\n"):
        load_pool([tmp_path], Statement(), max_samples=9, rng=np.random.default_rng(0))


@pytest.mark.parametrize("num_long", [0, 1])
def test_rows_that_are_short_or_certain_take_the_faults_that_show_in_them(num_long):
    certain = [sample([1, 5], [7] * 20, [-0.01] * 20, trajectory_id=f"t{i}") for i in range(3)]
    long = [sample([1, 5], [7] * 20, [-1.0] * 20, trajectory_id=f"l{i}") for i in range(num_long)]
    pool = pool_of([*certain, *long], where=Where())
    assert (pool.able, pool.alike) == ((), ())
    assert len(pool.any_length) == 3 + num_long


def test_short_rollouts_are_drilled_as_far_as_they_go_and_the_rest_is_explained(
    tmp_path, tinylm_dir, data_dir
):
    # Rows of eight tokens at most: sixteen that are no near-certainties are in none.
    recorded = json.loads((data_dir / "rollouts" / "fp32_raw__t1.json").read_text())
    rows = [
        {**row, "ids": row["ids"][:8], "lp": row["lp"][:8], "finish_reason": "length", "text": None}
        for row in recorded["rows"]
        if len(row["ids"]) > 8
    ]
    path = tmp_path / "short.json"
    path.write_text(json.dumps({"sampling": recorded["sampling"], "rows": rows}))
    flags = ("--engine", "vllm", "--logprobs-mode", "raw", "--quick")
    result = rlbatch("drill", path, "--model", tinylm_dir, *flags)
    assert "not tried, for no rollout of these could carry it: " in result.stdout
    assert f"of {len(rows)} rollouts fewer than two have 16 tokens below -0.1 nats" in result.stdout
    named = {line.split()[0] for line in result.stdout.splitlines() if line}
    assert {"logprob-missing", "duplicate-sample", "positions-count-padding"} <= named
    assert result.stdout.splitlines()[-1].endswith("faults were not tried")
    assert result.exit_code == 0


def test_rows_are_drilled_with_what_the_model_says_of_bos_and_eos(rollouts, model, tinylm_dir):
    # The shipped shards are older than the field: none says a BOS.
    assert {how.bos_token_id for how in open_reader(rollouts).provenances} == {None}
    identity = model_identity(tinylm_dir, model)
    drawn = load_pool([rollouts], Statement(), max_samples=9, rng=np.random.default_rng(0), identity=identity)
    assert {how.bos_token_id for each in drawn.samples for how in each.provenances} == {1}


def test_rows_without_advantages_are_drilled_with_none_in_them_and_the_originals_stay():
    rows = [sample([1, 5], [7] * 20, [-1.0] * 20, trajectory_id=f"t{i}", advantage=None) for i in range(2)]
    pool = pool_of(rows, where=Where())
    assert all(not each.advantages.any() for each in pool.able)
    assert all(np.isnan(each.advantages[2:]).all() for each in rows)


# -- scores and noise --------------------------------------------------------------------------------------


def test_without_noise_scores_are_those_of_the_trainer(model, pool):
    scores = scores_of(model, pool)
    for each in pool.samples[:8]:
        batch = collate([each], layout="padded")
        with torch.no_grad():
            expected = trainer_logprobs(model, batch)[0, :-1]
        mask = torch.tensor(each.loss_mask[1:])
        got = torch.from_numpy(scores(each).trainer_logprobs[1:]).float()
        torch.testing.assert_close(got[mask], expected[mask], atol=1e-5, rtol=0)
        assert torch.equal(torch.isnan(got), torch.from_numpy(each.turn[1:] < 0))


@pytest.mark.parametrize("tails", ["light", "heavy"])
@pytest.mark.parametrize("kld", [0.003, 0.028])
def test_noise_has_the_kld_asked_for(model, pool, kld, tails):
    plain, noisy = scores_of(model, pool), scores_of(model, pool, Noise(kld=kld, tails=tails))
    total, count = 0.0, 0
    for each in pool.able:
        at = np.flatnonzero(each.turn >= 0)
        divisor = torch.from_numpy(each.temperature[at])[:, None].double()
        rows = [torch.from_numpy(score(each).logits[at - 1]).double() / divisor for score in (plain, noisy)]
        ours, theirs = (torch.log_softmax(row, -1) for row in rows)
        total += float((ours.exp() * (ours - theirs)).sum())
        count += len(at)
    # Found on every other position, measured on all.
    assert total / count == pytest.approx(kld, rel=0.1 if tails == "light" else 0.25)


def test_heavy_tails_have_more_of_the_noise_in_few_tokens(model, pool):
    shares = {}
    for tails in ("light", "heavy"):
        plain, noisy = scores_of(model, pool), scores_of(model, pool, Noise(kld=0.028, tails=tails))
        moved = np.concatenate(
            [noisy(each).trainer_logprobs - plain(each).trainer_logprobs for each in pool.samples]
        )
        sizes = np.sort(moved[np.isfinite(moved)] ** 2)
        shares[tails] = sizes[-len(sizes) // 100 :].sum() / sizes.sum()
    assert shares["heavy"] > 1.2 * shares["light"]


def test_the_same_sample_gets_the_same_noise(model, pool):
    noise = Noise(kld=0.003)
    a, b = (scores_of(model, pool, noise)(pool.able[0]) for _ in range(2))
    np.testing.assert_array_equal(a.trainer_logprobs, b.trainer_logprobs)
    np.testing.assert_array_equal(a.logits, b.logits)


def test_a_sample_with_other_logprobs_is_not_mistaken_for_the_one_that_was_scored(model, pool):
    scores = scores_of(model, pool)
    scores(pool.able[0])
    other = shift(pool.able[0], 1)
    assert scores(other).sample is other
    hotter = replace(other, temperature=other.temperature * np.float32(2))
    both = np.isfinite(scores(other).trainer_logprobs)
    assert not np.allclose(scores(hotter).trainer_logprobs[both], scores(other).trainer_logprobs[both])


@pytest.mark.parametrize("changes", [{"kld": -0.1}, {"kld": float("nan")}, {"kld": 2.0}, {"tails": "fat"}])
def test_noise_that_cannot_be_is_refused(changes):
    with pytest.raises(RecordError, match=r"Noise\."):
        Noise(**changes)


# -- counting ----------------------------------------------------------------------------------------------


def say(code, at=None, severity="error"):
    return finding(code, expected="e", found="f", where=Where(sample=at), severity=severity)


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([], "(nothing)"),
        ([say("shifted", 3)], "shifted"),
        ([say("shifted", 2)], "(nothing)"),
        ([say("shifted")], "shifted"),
        ([say("unexplained", 3)], "unexplained"),
        ([say("kld-high")], "unexplained"),
        ([say("unexplained", 3), say("shifted", 3)], "shifted"),
        ([say("shifted", 3), say("zero-filled", 3)], "zero-filled"),
        ([say("shifted", 3), say("zero-filled", 2)], "shifted"),
    ],
)
def test_what_was_told_of_the_spoilt_row(findings, expected):
    assert told("shifted", findings, {3}) == expected


def test_a_doubt_that_was_planted_is_named_by_its_own_code():
    assert told("unexplained", [say("unexplained", 0)], {0}) == "unexplained"
    assert told("ratio-tail", [say("ratio-tail", 0, "warning")], {0}) == "ratio-tail"
    assert told("ratio-tail", [say("unexplained", 0)], {0}) == "unexplained"


def test_cases_are_counted_by_hand():
    tally = Tally(num_clean=5, false_alarms=0)
    for code, word, times in (
        ("shifted", "shifted", 3),
        ("shifted", "zero-filled", 2),
        ("shifted", "unexplained", 4),
        ("shifted", "(nothing)", 5),
        ("unexplained", "unexplained", 7),
    ):
        for _ in range(times):
            tally.add(Drilled(code=code, told=word))
    document = tally.as_json()
    counts = {name: document[name] for name in ("planted", "named", "wrong", "unexplained", "missed")}
    assert counts == {"planted": 21, "named": 10, "wrong": 2, "unexplained": 4, "missed": 5}
    assert not tally.passed
    assert document["matrix"]["shifted"] == {
        "shifted": 3, "zero-filled": 2, "unexplained": 4, "(nothing)": 5,
    }  # fmt: skip


# -- judging and planting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_each_rows_own_logprobs_lie_where_its_tokens_are_predicted(layout):
    rows = [
        Scored(
            sample=sample([1, 5], ids, [-1.0] * len(ids)),
            trainer_logprobs=np.array([np.nan, np.nan, *values]),
            logits=np.empty((0, 0)),
        )
        for ids, values in (([7, 8], [-0.1, -0.2]), ([9], [-0.3]))
    ]
    batch = collate([row.sample for row in rows], layout=layout)
    expected = {
        "padded": [[0, -0.1, -0.2, 0], [0, -0.3, 0, 0]],
        "packed": [[0, -0.1, -0.2, 0, 0, -0.3, 0]],
    }[layout]
    assert trainer_logprobs_of(batch, rows).tolist() == expected


def test_a_shifted_row_of_many_is_named_at_its_place(model, pool):
    rows = list(pool.able[:6])
    rows[4] = shift(rows[4], 1)
    found = findings_of(rows, scores_of(model, pool), layout="padded")
    assert {(each.code, each.where.sample) for each in found} == {("shifted", 4)}


def few_faults(*codes):
    return lambda: tuple(FAULTS[code] for code in codes)


def test_a_gate_that_says_nothing_misses_everything(model, pool, monkeypatch):
    monkeypatch.setattr(run, "the_faults", few_faults("shifted", "logprob-missing"))
    for where in (run, cases):
        monkeypatch.setattr(where, "findings_of", lambda *rest, **options: ())
    tally = run_drill(pool, scores_of(model, pool), DrillOptions(cases=3))
    assert (tally.planted, tally.missed, tally.passed) == (6, 6, False)


def test_a_gate_that_cries_at_everything_is_wrong_and_alarms(model, pool, monkeypatch):
    monkeypatch.setattr(run, "the_faults", few_faults("logprob-missing"))
    for where in (run, cases):
        monkeypatch.setattr(where, "findings_of", lambda *rest, **options: (say("shifted"),))
    tally = run_drill(pool, scores_of(model, pool), DrillOptions(cases=2))
    assert (tally.wrong, tally.named) == (2, 0)
    assert tally.false_alarms == 2
    assert tally.num_clean == 102


def test_spoilt_rows_among_the_clean_ones_are_alarms(model, pool, monkeypatch):
    monkeypatch.setattr(run, "the_faults", few_faults("logprob-missing"))
    bad = pool.able[0]
    spoilt = replace(pool, samples=tuple(shift(each, 1) if each is bad else each for each in pool.samples))
    assert run_drill(spoilt, scores_of(model, pool), DrillOptions(cases=1)).false_alarms == 1


def test_the_seed_decides_alone_and_the_originals_stay(model, pool, monkeypatch):
    before = [replace(each) for each in pool.samples]
    monkeypatch.setattr(run, "the_faults", few_faults("shifted-from", "zero-filled"))
    documents = [
        run_drill(pool, scores_of(model, pool), DrillOptions(cases=4, seed=seed)).as_json() for seed in (3, 3)
    ]
    assert documents[0] == documents[1]
    assert all(identical(a, b) for a, b in zip(before, pool.samples, strict=True))


def test_a_fault_without_a_place_is_said_to_have_none(model, monkeypatch):
    # One token of any use to a shift: no row is long enough.
    rows = [sample([1, 5], [7] * 4, [-1.0] * 4, trajectory_id=f"t{i}") for i in range(2)]
    pool = Pool(samples=tuple(rows), able=tuple(rows), alike=tuple(rows))
    monkeypatch.setattr(run, "the_faults", few_faults("shifted", "logprob-missing"))
    tally = run_drill(pool, scores_of(model, pool), DrillOptions(cases=2))
    assert (tally.no_place, tally.planted) == (["shifted"], 2)
    assert tally.as_json()["matrix"] == {"logprob-missing": {"logprob-missing": 2}, "shifted": {}}


def test_rows_that_cannot_carry_a_fault_are_drawn_again(model, pool, monkeypatch):
    # One row in twelve is long enough for a shift, and a case draws eight.
    short = [sample([1, 5], [7, 8, 9, 7], [-1.0] * 4, trajectory_id=f"t{i}") for i in range(11)]
    few = Pool(samples=(*short, pool.able[0]), able=(*short, pool.able[0]), alike=tuple(short))
    scores = scores_of(model, pool)
    told_of = [
        cases.one_case(FAULTS["shifted"], case, few, scores, DrillOptions(cases=10)).told
        for case in range(1, 10, 2)
    ]
    assert told_of == ["shifted"] * 5


def test_a_fault_of_the_layout_is_planted_in_rows_of_any_length(model, pool):
    # The rows that are long enough for the rest are all of one length, and have no padding between them.
    drilled = cases.one_case(
        LAYOUT_FAULTS["positions-count-padding"], 0, pool, scores_of(model, pool), DrillOptions(cases=1)
    )
    assert drilled.told == "positions-count-padding"
    assert len({len(row) for row in drilled.before}) > 1
    assert len({len(row) for row in pool.able}) == 1


def test_stale_rows_are_told_by_their_age_and_the_same_ages_without_drift_are_silent(model, pool):
    scores = scores_of(model, pool)
    for case in range(2):
        drilled = cases.one_case(SET_FAULTS["stale"], case, pool, scores, DrillOptions(cases=2))
        assert {each.code for each in drilled.findings} == {"stale"}
        clean = [
            replace(new, inference_logprobs=old.inference_logprobs)
            for new, old in zip(drilled.after, drilled.before, strict=True)
        ]
        assert findings_of(clean, scores, layout="packed", set_up=cases.RUN) == ()


def test_truncation_that_nobody_stated_is_told_without_logits_too(model, pool):
    def told_blindly(rows):
        blind = [replace(row, logits=row.logits[:, :0]) for row in rows]
        return {each.code for each in findings_of(blind, scores, layout="packed")}

    scores = scores_of(model, pool)
    fault = MODEL_FAULTS["truncation-renormalized"]
    planted = fault.plant(pool.alike, np.random.default_rng(0), score=scores)
    assert "ratio-mean-off" in told_blindly(planted)
    assert told_blindly([scores(row) for row in pool.alike]) == set()


def test_tokens_outside_the_trainers_kept_set_are_pointed_out_and_those_inside_are_not(model, pool):
    scores = scores_of(model, pool)
    fault = MODEL_FAULTS["outside-kept-set"]
    set_up = SetUp(purpose="train-truncated")
    for case in range(2):
        drilled = cases.one_case(fault, case, pool, scores, DrillOptions(cases=2))
        assert drilled.told == "outside-kept-set"
        assert {(each.code, each.severity) for each in drilled.findings} == {("outside-kept-set", "warning")}
        # The same rows with those tokens left out of training.
        inside = []
        for each in drilled.after:
            mask = each.sample.loss_mask & ~np.isneginf(each.trainer_logprobs)
            inside.append(replace(each, sample=replace(each.sample, loss_mask=mask)))
        assert findings_of(inside, scores, layout="padded", set_up=set_up) == ()


def test_a_drill_in_which_nothing_was_planted_has_not_passed(model, monkeypatch):
    assert not Tally().passed
    rows = [sample([1, 5], [7] * 4, [-1.0] * 4, trajectory_id=f"t{i}") for i in range(2)]
    pool = Pool(samples=tuple(rows), able=tuple(rows), alike=tuple(rows))
    monkeypatch.setattr(run, "the_faults", few_faults("shifted"))
    tally = run_drill(pool, scores_of(model, pool), DrillOptions(cases=2))
    assert (tally.planted, tally.false_alarms, tally.no_place) == (0, 0, ["shifted"])
    assert not tally.passed


def test_a_refusal_that_is_not_of_planting_is_no_missing_place(model, pool, monkeypatch):
    def refuses(*rest, **options):
        raise RecordError("collate: this list it will not take")

    monkeypatch.setattr(run, "the_faults", few_faults("logprob-missing"))
    monkeypatch.setattr(cases, "findings_of", refuses)
    with pytest.raises(RecordError, match="this list it will not take"):
        run_drill(pool, scores_of(model, pool), DrillOptions(cases=1))


# -- the command -------------------------------------------------------------------------------------------


def rlbatch(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


def test_the_command_plants_every_fault_and_clean_rows_are_silent(rollouts, tinylm_dir):
    result = rlbatch("drill", rollouts, "--model", tinylm_dir, "--quick", "--format", "json")
    document = json.loads(result.stdout)
    assert result.stderr == ""
    assert list(document) == ["planted", "named", "wrong", "unexplained", "missed", "false_alarms", "matrix"]
    told_of = Counter({code: sum(said.values()) for code, said in document["matrix"].items()})
    every = {*FAULTS, *MODEL_FAULTS, *SET_FAULTS, *LAYOUT_FAULTS}
    # The example's rows are short: where a prompt differs, few of them show that it fades.
    assert told_of.pop("prefix-differs") in (1, 2)
    assert dict(told_of) == dict.fromkeys(every - {"prefix-differs"}, 2)
    assert document["planted"] == sum(sum(said.values()) for said in document["matrix"].values())
    assert document["false_alarms"] == 0
    passed = document["wrong"] == document["missed"] == document["false_alarms"] == 0
    assert result.exit_code == (0 if passed else 1)
    for code, said in document["matrix"].items():
        if CATALOGUE[code].level == "sound":
            assert said == {code: told_of[code]}


def test_the_table_has_a_row_a_fault_and_a_verdict(rollouts, tinylm_dir, monkeypatch):
    monkeypatch.setattr(run, "the_faults", few_faults("nothing-trained", "logprob-missing"))
    result = rlbatch("drill", rollouts, "--model", tinylm_dir, "--quick")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["nothing-trained", "logprob-missing"]
    assert lines[-1].startswith("passed: ")
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{rollouts}", "--model", "nowhere"), "a directory with a model"),
        (("nothing.safetensors", "--model", "{model}"), "nothing.safetensors"),
        (("{rollouts}", "--model", "{model}", "--noise-kld", "7"), "--noise-kld"),
        (("{rollouts}", "--model", "{model}", "--tails", "fat"), "light"),
        (("{rollouts}",), "--model"),
    ],
)
def test_what_cannot_be_used_ends_with_two_and_says_so(rollouts, tinylm_dir, arguments, words):
    filled = [each.format(rollouts=rollouts, model=tinylm_dir) for each in arguments]
    result = rlbatch("drill", *filled)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""
