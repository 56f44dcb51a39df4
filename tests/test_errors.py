"""Findings have one rendering, and errors survive every way out of a process."""

import multiprocessing
import pickle
from dataclasses import replace

import pytest

from rlbatch import errors
from rlbatch.errors import Finding, RlbatchError, Where, render

FINDING = Finding(
    code="shifted",
    severity="error",
    where=Where(
        path="rollouts/000120.safetensors", sample=17, trajectory="gsm8k/42#3", turn=1, start=812, stop=1040
    ),
    expected="trainer and inference logprobs agree best at lag 0",
    found="mean |log_ratio| 1.04 nats at lag 0, 0.002 at lag -1, over 228 tokens",
    likely="the list of logprobs has an entry in front that the list of ids lost",
    fix="ask the engine for exact ids",
)
KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RlbatchError) and kind.__module__ == errors.__name__
]


def test_a_finding_is_told_as_the_design_shows_it():
    assert str(FINDING) == (
        "[shifted] rollouts/000120.safetensors sample 17, trajectory 'gsm8k/42#3', turn 1, tokens 812:1040\n"
        "  expected: trainer and inference logprobs agree best at lag 0\n"
        "  found:    mean |log_ratio| 1.04 nats at lag 0, 0.002 at lag -1, over 228 tokens\n"
        "  likely:   the list of logprobs has an entry in front that the list of ids lost\n"
        "  fix:      ask the engine for exact ids"
    )


def test_a_place_says_only_what_is_known():
    assert str(Where()) == ""
    assert str(Where(sample=3)) == "sample 3"
    assert str(Where(rank=2, path="a", turn=0)) == "rank 2, a, turn 0"


def test_the_text_shows_eight_findings_and_counts_the_rest():
    error = errors.SoundnessError.of(*[FINDING] * 11)
    assert str(error).count("[shifted]") == 8
    assert str(error).endswith("... and 3 more of 11 findings (all in .findings)")
    assert len(error.findings) == 11


def test_the_tree_has_the_standard_bases():
    bases = {
        errors.RecordError: (ValueError,),
        errors.ReplyError: (ValueError, RuntimeError),
        errors.SoundnessError: (ValueError,),
        errors.StorageError: (OSError,),
        errors.ScoringError: (RuntimeError,),
        errors.PackingLeakError: (RuntimeError,),
        errors.AlignmentError: (ValueError,),
    }
    assert set(bases) == set(KINDS) - {RlbatchError}
    for kind, expected in bases.items():
        assert all(issubclass(kind, base) for base in expected)


def test_findings_of_one_cause_tell_it_once():
    second = replace(FINDING, where=Where(sample=2), found="another lag")
    other = replace(FINDING, where=Where(sample=3), fix="another fix")
    text = render([FINDING, second, other, other])
    assert text.count(f"likely:   {FINDING.likely}") == 2
    assert text.count(f"fix:      {FINDING.fix}") == 1
    assert text.startswith(f"{FINDING}\n[shifted] sample 2\n")
    assert "  found:    another lag\n  likely and fix as for shifted above\n[shifted] sample 3\n" in text
    assert text.count("likely and fix as for shifted above") == 2


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_pickles_with_type_text_and_fields(kind):
    for error in (kind.of(FINDING, FINDING), kind("only a text")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == str(error)
        assert again.findings == error.findings
        assert again.code == error.code


def test_the_code_is_that_of_the_first_finding():
    assert errors.AlignmentError.of(FINDING).code == "shifted"
    assert errors.RecordError("no findings").code is None


def _raise(index: int) -> None:
    raise KINDS[index].of(FINDING)


@pytest.mark.parametrize("index", range(len(KINDS)), ids=[kind.__name__ for kind in KINDS])
def test_every_error_comes_back_from_a_spawned_process(index, spawned):
    with pytest.raises(KINDS[index]) as caught:
        spawned.apply(_raise, (index,))
    assert type(caught.value) is KINDS[index]
    assert str(caught.value) == str(FINDING)
    assert caught.value.findings == (FINDING,)


@pytest.fixture(scope="module")
def spawned():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool
