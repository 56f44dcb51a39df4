"""What shows only in several samples together, or against what the caller says besides."""

import zlib
from dataclasses import replace

import numpy as np
import pytest
from builders import sample

from rlbatch.catalogue import CATALOGUE
from rlbatch.errors import RecordError, SoundnessError
from rlbatch.faults import SET_FAULTS, TRAINER_VERSION
from rlbatch.records import Origin
from rlbatch.soundness import check_sound, require_sound

TOLD = {"trainer_version": TRAINER_VERSION, "max_version_lag": 4, "group_size": 4}

WITHOUT_TRAINER = [code for code in SET_FAULTS if CATALOGUE[code].level == "sound"]


def values(seed, count=20):
    return np.random.default_rng(seed).uniform(-6, -0.1, count).tolist()


def made(name, **changes):
    """Twenty tokens that cost about 60 nats: no second draw gives them again."""
    seed = zlib.crc32(name.encode())
    ids = np.random.default_rng(seed).integers(10, 90, 20).tolist()
    return sample([1, 5], ids, values(seed), trajectory_id=name, **changes)


@pytest.fixture
def clean():
    samples = [made(f"{group}{index}", group_id=group) for group in "abc" for index in range(4)]
    versions = np.full(22, TRAINER_VERSION - 4, np.int32)
    versions[:2] = -1
    return [replace(each, policy_version=versions) for each in samples]


def told(samples, **changes):
    found = check_sound(samples, purpose="train", **TOLD | changes)
    return [(each.code, each.where.sample) for each in found]


def test_clean_groups_within_the_bounds_are_sound(clean):
    assert told(clean) == []


@pytest.mark.parametrize("code", WITHOUT_TRAINER)
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_planted_fault_is_named_and_nothing_else_is_said(clean, code, share):
    for seed in range(5):
        planted = SET_FAULTS[code].plant(clean, np.random.default_rng(seed), share=share)
        assert {each for each, _ in told(planted)} == {code}


def test_an_audit_reads_piece_by_piece_and_does_not_ask_what_belongs_together(clean):
    for code in ("duplicate-sample", "group-incomplete", "field-missing-in-some"):
        planted = SET_FAULTS[code].plant(clean, np.random.default_rng(0))
        assert check_sound(planted, purpose="audit", **TOLD) == ()


def test_training_on_kept_sets_is_training(clean):
    for code in WITHOUT_TRAINER:
        planted = SET_FAULTS[code].plant(clean, np.random.default_rng(0))
        train, truncated = (
            check_sound(planted, purpose=purpose, **TOLD) for purpose in ("train", "train-truncated")
        )
        assert truncated == train != ()


def test_an_id_that_comes_again_is_an_error(clean):
    with pytest.raises(SoundnessError, match="sample_id 'a0:0' again, as in sample 0") as caught:
        require_sound([*clean[:3], clean[0]])
    assert (caught.value.code, caught.value.findings[0].where.sample) == ("duplicate-sample", 3)


def test_one_draw_under_two_ids_is_a_warning(clean):
    twin = replace(clean[1], sample_id="other", trajectory_id="other")
    (found,) = check_sound([*clean, twin], purpose="train")
    assert (found.code, found.severity, found.where.sample) == ("duplicate-sample", "warning", 12)
    assert "sample 1" in found.found
    require_sound([*clean, twin])


def test_short_answers_that_chance_draws_twice_are_no_duplicates():
    # Five tokens at 0.1 nats each: drawn again with probability 0.6.
    samples = [sample([1, 5], [7, 8, 9, 9, 2], [-0.1] * 5, trajectory_id=f"t{i}") for i in range(8)]
    assert check_sound(samples, purpose="train") == ()


def test_the_same_ids_at_other_logprobs_are_no_duplicates(clean):
    other = replace(clean[0], sample_id="other", inference_logprobs=clean[0].inference_logprobs - 1)
    assert told([clean[0], other], group_size=None) == []


def test_versions_are_held_against_the_bound_where_both_numbers_are_known(clean):
    assert told(clean, max_version_lag=3) == [("version-too-old", index) for index in range(12)]
    assert told(clean, max_version_lag=None) == []
    # All are of version 96, which a trainer at 95 does not have yet.
    assert told(clean, trainer_version=TRAINER_VERSION - 4) == []
    assert told(clean, trainer_version=TRAINER_VERSION - 5) == [("version-ahead", at) for at in range(12)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainer_version": None}, "max_version_lag: expected a trainer_version with it"),
        ({"max_version_lag": -1}, "max_version_lag: expected at least 0, found -1"),
        ({"group_size": 0}, "group_size: expected at least 1, found 0"),
        ({"trainer_version": "7"}, "trainer_version: expected int, found '7'"),
        ({"vocab_size": 1.5}, "vocab_size: expected int, found 1.5"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(clean, changes, said):
    with pytest.raises(RecordError, match=said):
        told(clean, **changes)


def test_the_span_and_the_lag_are_named(clean):
    versions = clean[2].policy_version.copy()
    versions[4:9] = [90, 91, 90, 92, 93]
    bad = replace(clean[2], policy_version=versions)
    found = [
        each
        for each in check_sound([bad], purpose="train", trainer_version=100, max_version_lag=8)
        if each.code == "version-too-old"
    ]
    assert [(each.where.turn, each.where.start, each.where.stop) for each in found] == [(0, 4, 7)]
    assert found[0].expected == "at most 8 versions behind the trainer's 100"
    assert found[0].found == "version 90, 10 behind, 3 of 20 tokens"
    audit = check_sound([bad], purpose="audit", trainer_version=100, max_version_lag=8)
    assert {each.severity for each in audit} == {"warning"}


def test_old_tokens_that_nobody_trains_and_unknown_versions_are_not_too_old(clean):
    untrained = replace(clean[0], loss_mask=np.zeros(len(clean[0]), bool))
    unknown = replace(clean[1], policy_version=np.full(len(clean[1]), -1, np.int32))
    assert told([untrained, unknown, clean[2]], max_version_lag=3, group_size=3) == [("version-too-old", 2)]


def test_weights_that_the_trainer_does_not_have_yet_are_named_with_the_tokens(clean):
    versions = clean[2].policy_version.copy()
    versions[4:9] = [101, 103, 102, 102, 101]
    bad = replace(clean[2], policy_version=versions)
    found = [
        each
        for each in check_sound([bad], purpose="train", trainer_version=100)
        if each.code == "version-ahead"
    ]
    assert [(each.severity, each.where.start, each.where.stop) for each in found] == [("error", 4, 9)]
    assert found[0].found == "version 103, 3 ahead, 5 of 20 tokens"
    with pytest.raises(SoundnessError, match="version-ahead"):
        require_sound([bad], trainer_version=100)
    audit = check_sound([bad], purpose="audit", trainer_version=100)
    assert {each.severity for each in audit} == {"warning"}
    assert "version-ahead" not in {each.code for each in check_sound([bad], purpose="train")}


def test_samples_of_which_none_says_a_version_are_told_once_where_the_trainer_has_one(clean):
    lost = [replace(each, policy_version=np.full(len(each), -1, np.int32)) for each in clean]
    (found,) = check_sound(lost, purpose="train", trainer_version=3)
    assert (found.code, found.severity) == ("version-unknown", "warning")
    assert found.found == "none at any of 240 trained tokens in 12 samples"
    require_sound(lost, trainer_version=3)
    assert check_sound(lost, purpose="train") == ()
    # One that has a version shows that it can be said, and the gate tells the others apart.
    assert check_sound([*lost[1:], clean[0]], purpose="train", trainer_version=100) == ()


def test_a_gap_is_told_with_its_place(clean):
    versions = clean[0].policy_version.copy()
    versions[10:13] = -1
    (found,) = check_sound([clean[1], replace(clean[0], policy_version=versions)], purpose="train")
    assert (found.code, found.severity, found.where.sample) == ("version-gap", "warning", 1)
    assert (found.where.turn, found.where.start, found.where.stop) == (0, 10, 13)
    assert found.found == "no version at token 10, 3 of 20 tokens"


def test_an_update_in_the_middle_of_a_turn_is_told_and_one_between_samples_is_not(clean):
    versions = clean[0].policy_version.copy()
    versions[12:] = 97
    mixed = replace(clean[0], policy_version=versions)
    other = replace(clean[1], policy_version=np.where(clean[1].turn >= 0, 97, -1).astype(np.int32))
    (found,) = check_sound([other, mixed, clean[2]], purpose="train")
    assert (found.code, found.where.sample, found.where.turn) == ("version-mixed", 1, 0)
    assert found.found == "versions 96, 97; the first change is at token 12"


def test_versions_that_go_back_are_labels_of_other_tokens(clean):
    versions = clean[0].policy_version.copy()
    versions[12:] = 90
    (found,) = check_sound([replace(clean[0], policy_version=versions)], purpose="train")
    assert "do not go back" in found.likely


def test_an_incomplete_group_is_named_with_its_count(clean):
    (found,) = check_sound(clean[1:], purpose="train", group_size=4)
    assert (found.code, found.where.sample) == ("group-incomplete", 0)
    assert found.found == "3 in group 'a'"
    assert told(clean[4:]) == []


def test_branches_of_one_trajectory_are_one_member(clean):
    branch = replace(made("branch", group_id="a"), trajectory_id="a0", sibling=1, num_siblings=2)
    assert told([replace(clean[0], num_siblings=2), branch, *clean[1:]]) == [("turn-prefix-broken", 1)]


def test_the_finding_says_which_samples_lack_the_field(clean):
    some = [
        replace(each, ref_logprobs=each.inference_logprobs) if i % 3 else each for i, each in enumerate(clean)
    ]
    origins = [Origin(path="a", index=100 + index) for index in range(12)]
    (found,) = check_sound(some, purpose="train", origins=origins)
    assert (found.code, found.severity, found.where.sample) == ("field-missing-in-some", "warning", 100)
    assert found.expected == "ref_logprobs in every sample or in none"
    assert found.found == "none in 4 of 12 samples: sample a 100, a 103, a 106, a 109"
