"""A cause that one turn has alone, where many share another, loses its name."""

from rlbatch.alignment.company import without_odd_names
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
    few = ["shifted", "shifted", "zero-filled"]
    often = ["shifted"] * 7 + ["zero-filled"] * 2
    certain = ["shifted"] * 4 + ["logprob-not-finite"]
    for each in (few, often, certain, []):
        assert codes(*each) == each


def test_a_positive_value_among_flipped_signs_is_of_the_same_cause():
    assert codes(*["sign-flipped"] * 4, "logprob-positive") == ["sign-flipped"] * 4 + ["unexplained"]
