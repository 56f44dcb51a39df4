"""What shows without a trainer: every code by hand and by its corruption; clean data is silent."""

import json
from dataclasses import replace

import numpy as np
import pytest
from builders import provenance, recorded_provenance, recorded_samples, sample

from rlbatch.catalogue import CATALOGUE
from rlbatch.errors import RecordError, SoundnessError
from rlbatch.faults import FAULTS
from rlbatch.records import Origin, SamplingParams
from rlbatch.soundness import check_sound, require_sound
from rlbatch.soundness.values import VALUE_FAULTS, positive_code

SOUND_CODES = [
    "token-out-of-range",
    "logprob-missing",
    "logprob-not-finite",
    "logprob-positive",
    "logprob-sentinel",
    "advantage-not-finite",
    "temperature-contradicted",
    "modes-mixed",
    "mask-without-logprob",
    "nothing-trained",
    "incomparable",
    "greedy-sampled",
    "turn-prefix-broken",
    "version-gap",
    "version-mixed",
    "bos-doubled",
    "bos-missing",
    "mask-drops-eos",
    "stop-overrun",
    "finish-mismatch",
    "low-precision-logprobs",
]
TOLD_ALREADY = {"sign-flipped": {"sign-flipped"}}
"""What shows without a trainer too: losses by their signs."""

FOR_A_TRAINER = sorted(code for code in FAULTS if CATALOGUE[code].level != "sound")


@pytest.fixture(scope="module")
def clean(data_dir):
    samples = []
    for name in ("t1", "long400"):
        path = data_dir / "rollouts" / f"fp32_raw__{name}.json"
        made = recorded_samples(path, recorded_provenance(path))
        rows = json.loads(path.read_text())["rows"]
        samples += [told(each, f"{name}/{at}", rows[at]["finish_reason"]) for at, each in enumerate(made)]
    return samples


def told(made, name, finish_reason):
    """A sample with what the tokenizer and the engine say besides."""
    how = replace(made.provenances[0], bos_token_id=1, eos_token_ids=(2, 4))
    return replace(
        made, sample_id=name, trajectory_id=name, provenances=(how,), finish_reasons=(finish_reason,)
    )


def codes(findings):
    return [found.code for found in findings]


def one(**changes):
    return replace(sample([1, 5], [7, 2], [-0.25, -0.5]), **changes)


def test_real_rollouts_are_sound(clean):
    assert check_sound(clean, purpose="train", vocab_size=1536) == ()
    assert require_sound(clean) is clean


@pytest.mark.parametrize("code", SOUND_CODES)
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_planted_fault_is_named_and_nothing_else_is_said(clean, code, share):
    if code == "nothing-trained":
        share = 1.0
    planted = FAULTS[code].plant(clean, np.random.default_rng(0), share=share)
    findings = check_sound(planted, purpose="train", vocab_size=1536)
    assert set(codes(findings)) == {code}
    expected = {index for index, (new, old) in enumerate(zip(planted, clean, strict=True)) if new is not old}
    if code != "nothing-trained":
        assert {found.where.sample for found in findings} == expected


@pytest.mark.parametrize("code", FOR_A_TRAINER)
def test_what_needs_a_trainer_is_not_guessed_at(clean, code):
    findings = check_sound(FAULTS[code].plant(clean, np.random.default_rng(0)), purpose="train")
    assert set(codes(findings)) == TOLD_ALREADY.get(code, set())


def test_a_prompt_that_differs_keeps_a_bos_that_is_known(clean):
    for seed in range(40):
        planted = FAULTS["prefix-differs"].plant(clean, np.random.default_rng(seed))
        assert codes(check_sound(planted, purpose="train")) == []


def test_every_fault_is_either_seen_here_or_needs_a_trainer():
    assert set(FAULTS) == set(SOUND_CODES) | set(FOR_A_TRAINER)


def test_places_are_tokens_of_the_sample():
    bad = one(inference_logprobs=np.float32([np.nan, np.nan, np.inf, np.nan]))
    findings = {
        found.code: found
        for found in check_sound([bad], purpose="train", origins=[Origin(path="a.safetensors", index=4)])
    }
    assert set(findings) == {"logprob-missing", "logprob-not-finite"}
    missing = findings["logprob-missing"].where
    assert (missing.path, missing.sample, missing.trajectory) == ("a.safetensors", 4, "t0")
    assert (missing.turn, missing.start, missing.stop) == (0, 3, 4)
    assert findings["logprob-not-finite"].where.start == 2


def test_a_sample_without_an_advantage_is_not_trained_and_the_error_says_how_to_set_it():
    forgotten = sample([1, 5], [7, 2], [-0.25, -0.5], trajectory_id="t1", advantage=None)
    with pytest.raises(SoundnessError) as caught:
        require_sound([one(), forgotten])
    (found,) = caught.value.findings
    assert (found.code, found.where.sample, found.where.trajectory) == ("advantage-not-finite", 1, "t1")
    assert (found.where.start, found.where.stop) == (2, 4)
    assert "set Trajectory.advantage" in found.fix
    assert codes(check_sound([forgotten], purpose="train-truncated")) == ["advantage-not-finite"]


def test_an_audit_takes_rollouts_without_advantages_and_refuses_infinite_ones():
    forgotten = sample([1, 5], [7, 2], [-0.25, -0.5], advantage=None)
    assert check_sound([forgotten], purpose="audit") == ()
    infinite = sample([1, 5], [7, 2], [-0.25, -0.5], advantage=float("inf"))
    assert codes(check_sound([forgotten, infinite], purpose="audit")) == ["advantage-not-finite"]


OTHERS = ["teacher_logprobs", "ref_logprobs", "proximal_logprobs"]


@pytest.mark.parametrize("name", [*OTHERS, "raw_inference_logprobs"])
@pytest.mark.parametrize(
    ("value", "code"),
    [(np.inf, "logprob-not-finite"), (-np.inf, "logprob-not-finite"), (3.0, "logprob-positive")],
)
def test_logprobs_of_other_models_are_looked_at_too(name, value, code):
    good = one(trajectory_id="t1", sample_id="t1", **{name: np.float32([np.nan, np.nan, -0.5, -1])})
    bad = one(**{name: np.float32([np.nan, np.nan, -0.5, value])})
    (found,) = check_sound([good, bad], purpose="train")
    assert (found.code, found.where.sample, found.where.start, found.where.stop) == (code, 1, 3, 4)
    assert name in found.expected
    assert "at token 3, 1 of 4 tokens" in found.found


@pytest.mark.parametrize("name", OTHERS)
def test_a_trained_token_that_another_model_has_no_logprob_of_is_told(name):
    bad = one(**{name: np.float32([np.nan, np.nan, -0.5, np.nan])})
    assert codes(check_sound([bad], purpose="train")) == ["logprob-not-finite"]
    # A sample that has none at all is told by the set, in training only.
    assert codes(check_sound([one(), bad], purpose="audit")) == ["logprob-not-finite"]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("value", [np.nan, np.inf, 3.0])
def test_logprobs_of_other_models_mean_nothing_at_tokens_that_are_not_trained(name, value):
    mask = np.array([False, False, True, False])
    made = one(loss_mask=mask, **{name: np.float32([value, value, -0.5, value])})
    assert check_sound([made], purpose="train") == ()
    for least in (0.0, 5e-4):
        made = one(**{name: np.float32([np.nan, np.nan, least, -1e30])})
        assert check_sound([made], purpose="train") == ()


def test_raw_values_may_be_missing_and_are_told_once_where_they_stand_in():
    made = one(raw_inference_logprobs=np.float32([np.nan, np.nan, -0.5, np.nan]))
    assert check_sound([made], purpose="train") == ()
    raw = provenance(logprobs_mode="raw", sampling=SamplingParams(temperature=0.5))
    for value, code in ((np.nan, "logprob-missing"), (np.inf, "logprob-not-finite"), (3, "logprob-positive")):
        assert codes(check_sound([sample([1], [7, 8], [-1, value], provenance=raw)], purpose="audit")) == [
            code
        ]


def test_ids_are_held_against_the_smallest_vocabulary_known():
    made = one(provenances=(provenance(vocab_size=7),))
    (found,) = check_sound([made], purpose="train", vocab_size=1536)
    assert (found.code, found.where.start, found.where.stop) == ("token-out-of-range", 2, 3)
    assert "id 7 at token 2" in found.found
    assert check_sound([made], purpose="train", vocab_size=8) != ()
    assert check_sound([one()], purpose="train", vocab_size=8) == ()
    assert codes(check_sound([one()], purpose="train", vocab_size=5)) == ["token-out-of-range"]


def test_rounding_above_zero_is_not_positive():
    for value, expected in ((5e-4, []), (2e-3, ["logprob-positive"]), (0.0, [])):
        made = one(inference_logprobs=np.float32([np.nan, np.nan, value, -0.5]))
        assert codes(check_sound([made], purpose="train")) == expected


def test_losses_are_told_from_logits_by_their_size(clean, data_dir):
    path = data_dir / "rollouts" / "fp32_rawlogits__t1.json"
    logits = [row["lp"] for row in json.loads(path.read_text())["rows"]]
    samples = [sample([1, 5], [7] * len(row), row, trajectory_id=f"{at}") for at, row in enumerate(logits)]
    assert set(codes(check_sound(samples, purpose="train"))) == {"logprob-positive"}
    flipped = [replace(made, inference_logprobs=-made.inference_logprobs) for made in clean]
    findings = check_sound(flipped, purpose="train")
    # A row of which fewer than four values are not 0 shows no more than that it is positive.
    few = {at for at, made in enumerate(clean) if np.count_nonzero(made.inference_logprobs < -1e-3) < 4}
    assert len(few) < 5
    named = {found.where.sample for found in findings if found.code == "sign-flipped"}
    assert named >= set(range(len(clean))) - few


def test_raw_values_are_checked_where_they_stand_in():
    raw = provenance(logprobs_mode="raw", sampling=SamplingParams(temperature=0.5))
    logits = sample([1], [7, 8], [14.0, 17.0], provenance=raw)
    assert codes(check_sound([logits], purpose="audit")) == ["logprob-positive"]
    fine = sample([1], [7, 8], [-1.0, -2.0], provenance=raw)
    assert check_sound([fine], purpose="audit") == ()
    assert codes(check_sound([fine], purpose="train")) == ["incomparable"]


def test_an_audit_takes_greedy_turns_and_only_warns_of_incomparable_ones():
    greedy = sample([1], [7], [-0.1], provenance=provenance(sampling=SamplingParams(temperature=0.0)))
    assert codes(check_sound([greedy], purpose="train")) == ["greedy-sampled"]
    assert check_sound([greedy], purpose="audit") == ()
    how = provenance(sampling=SamplingParams(temperature=1.0, top_p=0.8, presence_penalty=0.5))
    cut = sample([1], [7], [-0.1], provenance=how)
    (found,) = check_sound([cut], purpose="audit")
    assert (found.code, found.severity) == ("incomparable", "warning")
    assert "temperature 1, top_p 0.8, presence_penalty 0.5" in found.found
    for purpose in ("train", "train-truncated"):
        (found,) = check_sound([cut], purpose=purpose)
        assert (found.code, found.severity) == ("incomparable", "error")


def test_truncated_turns_are_trained_only_where_that_is_asked_for():
    how = provenance(sampling=SamplingParams(temperature=1.0, top_p=0.8))
    cut = sample([1], [7], [-0.1], provenance=how)
    assert codes(check_sound([cut], purpose="train")) == ["incomparable"]
    assert check_sound([cut], purpose="train-truncated") == ()
    assert check_sound([cut], purpose="audit") == ()
    greedy = sample([1], [7], [-0.1], provenance=provenance(sampling=SamplingParams(temperature=0.0)))
    assert codes(check_sound([greedy], purpose="train-truncated")) == ["greedy-sampled"]


def test_untrained_turns_may_be_anything():
    how = provenance(sampling=SamplingParams(temperature=0.0, top_p=0.5))
    untrained = replace(sample([1], [7], [-0.1], provenance=how), loss_mask=np.zeros(2, bool))
    assert check_sound([untrained, one(sample_id="another")], purpose="train") == ()


def test_require_sound_raises_errors_and_lets_warnings_pass():
    branch = one(sibling=1, num_siblings=2)
    assert require_sound([branch]) == [branch]
    bad = FAULTS["logprob-positive"].plant([one()], np.random.default_rng(0))
    with pytest.raises(
        SoundnessError, match=r"\[logprob-positive\] sample 1, trajectory 't0', turn 0"
    ) as caught:
        require_sound([one(sample_id="another"), *bad])
    assert caught.value.code == "logprob-positive"


def test_what_is_no_sequence_of_samples_is_refused():
    for given in (iter(()), [1], one()):
        with pytest.raises(RecordError, match="samples"):
            check_sound(given, purpose="train")
    with pytest.raises(RecordError, match="purpose"):
        check_sound([], purpose="training")


def test_no_samples_is_nothing_to_say():
    assert check_sound([], purpose="train") == ()


@pytest.mark.parametrize(
    ("value", "codes"),
    [
        (0.0, []),
        # What rounding explains, and the least that it does not.
        (0.001, []),
        (0.0011, ["logprob-positive"]),
        # The lowest logprob that is taken for one, and the highest that is a marker, as vLLM's -9999 is.
        (-8999.0, []),
        (-9000.0, ["logprob-sentinel"]),
        (-9999.0, ["logprob-sentinel"]),
        (float("-inf"), ["logprob-not-finite"]),
        (float("inf"), ["logprob-not-finite"]),
        (float("nan"), ["logprob-missing"]),
    ],
)
def test_an_impossible_value_is_of_one_kind(value, codes):
    values = np.array([value], np.float32)
    assert [fault.code for fault in VALUE_FAULTS if fault.test(values)[0]] == codes


@pytest.mark.parametrize(
    ("values", "code"),
    [
        # Losses: none below 0, half of them below 4 nats.
        ([0.1, 2.3, 0.0, 0.9, 0.4], "sign-flipped"),
        # At a high temperature half are above 4, and yet some token was likely.
        ([6.2, 5.1, 0.3, 7.0, 4.8], "sign-flipped"),
        # Logits: no token is likely, or most are larger than any loss of tokens that were drawn.
        ([6.2, 5.1, 4.4, 7.0, 4.8], "logprob-positive"),
        ([14.2, 9.8, 17.1, 12.0], "logprob-positive"),
        ([12.0, 10.0, 0.3, 11.0, 9.5], "logprob-positive"),
        # A loss is never below 0, and three values are too few to tell.
        ([0.1, 2.3, 0.9, 0.4, -0.5], "logprob-positive"),
        ([0.1, 2.3, 0.9], "logprob-positive"),
    ],
)
def test_losses_are_told_from_logits(values, code):
    assert positive_code(np.array(values, np.float32)) == code
