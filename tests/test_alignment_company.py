"""A cause that one turn has alone, where many share another, loses its name; one of few turns stays."""

import numpy as np
import pytest
from aligned_cases import drawn, judged_in_turn, log_softmax, told

from rlbatch.alignment.company import without_names_of_few, without_odd_names
from rlbatch.catalogue import finding
from rlbatch.errors import Where


def found(code):
    return finding(code, where=Where(sample=7), expected="agreement", found="2 nats")


def codes(*each):
    return [
        told.code for told in without_odd_names({at: found(code) for at, code in enumerate(each)}).values()
    ]


def test_an_odd_name_among_many_is_told_without_its_name():
    told = without_odd_names({at: found("shifted-from") for at in range(4)} | {9: found("mixed-versions")})
    assert [told[at].code for at in range(4)] == ["shifted-from"] * 4
    assert (told[9].code, told[9].severity, told[9].where.sample) == ("unexplained", "error", 7)
    assert told[9].found == "2 nats; by itself that is mixed-versions, but 4 other turns are shifted-from"


def test_names_that_are_no_rarer_or_cannot_be_mistaken_are_kept():
    few = ["wrong-base", "wrong-base", "zero-filled"]
    often = ["wrong-base"] * 7 + ["zero-filled"] * 2
    certain = ["zero-filled"] * 4 + ["logprob-not-finite"]
    for each in (few, often, certain, []):
        assert codes(*each) == each


def test_a_positive_value_among_flipped_signs_is_of_the_same_cause():
    assert codes(*["sign-flipped"] * 4, "logprob-positive") == ["sign-flipped"] * 4 + ["unexplained"]


@pytest.mark.parametrize("is_first", [True, False])
def test_what_explains_one_batch_is_told_whatever_others_follow_or_came_before(is_first):
    colder = [drawn(200, seed, temperature=0.7) for seed in range(4)]
    for row in colder:
        # The trainer is told temperature 1, and computes its own logprobs so.
        row.trainer = log_softmax(row.logits)[np.arange(200), row.ids]
    clean = [drawn(200, seed) for seed in range(10, 50)]
    parts = (colder, clean) if is_first else (clean, colder)
    assert set(told(judged_in_turn(*parts))) == {"temperature-mismatch"}
    assert told(judged_in_turn(clean, clean)) == []


def test_a_name_that_fewer_turns_have_than_are_unexplained_is_not_believed():
    few = {at: found("unexplained") for at in range(3)} | {7: found("rows-permuted")}
    told = without_names_of_few(few)
    assert [each.code for each in told.values()] == ["unexplained"] * 4
    assert told[7].found == "2 nats; by itself that is rows-permuted, but 3 other turns are unexplained"
    # As many turns with a name, or two without one, leave it alone.
    as_many = {at: found("unexplained") for at in range(3)} | {at: found("shifted") for at in range(3, 6)}
    two = {0: found("unexplained"), 1: found("unexplained"), 2: found("shifted")}
    assert (without_names_of_few(as_many), without_names_of_few(two)) == (as_many, two)
