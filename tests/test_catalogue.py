"""The catalogue knows every code, and nothing else does."""

import re
from pathlib import Path

import pytest

import rlbatch
from rlbatch.catalogue import CATALOGUE, finding
from rlbatch.errors import Where

SOURCE = Path(rlbatch.__file__).parent


def test_codes_are_kebab_case_and_filed_under_themselves():
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in CATALOGUE)
    assert all(entry.code == code for code, entry in CATALOGUE.items())


def test_every_entry_says_everything():
    for entry in CATALOGUE.values():
        for text in (entry.symptom, entry.check, entry.likely, entry.fix):
            assert len(text) > 10, entry.code


def test_the_codes_of_the_design_are_there():
    codes = (
        "length-mismatch token-out-of-range logprob-missing logprob-not-finite logprob-positive "
        "mask-without-logprob nothing-trained incomparable greedy-sampled shifted zero-filled kld-high "
        "ratio-tail unexplained"
    )
    assert set(codes.split()) <= set(CATALOGUE)


def test_every_code_is_used_somewhere_in_the_library():
    text = "".join(
        path.read_text() for path in SOURCE.rglob("*.py") if not {"catalogue", "faults"} & set(path.parts)
    )
    unused = [code for code in CATALOGUE if f'"{code}"' not in text]
    assert unused == []


def test_a_finding_takes_cause_and_fix_from_the_catalogue_unless_told_better():
    plain = finding("kld-high", expected="e", found="f")
    assert (plain.likely, plain.fix, plain.severity) == (
        CATALOGUE["kld-high"].likely,
        CATALOGUE["kld-high"].fix,
        "error",
    )
    better = finding(
        "kld-high", expected="e", found="f", likely="l", fix="x", severity="warning", where=Where(turn=1)
    )
    assert (better.likely, better.fix, better.severity, better.where.turn) == ("l", "x", "warning", 1)


def test_an_unknown_code_is_a_mistake_in_the_library():
    with pytest.raises(KeyError):
        finding("no-such-code", expected="e", found="f")
