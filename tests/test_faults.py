"""Corruptions do what they say to the sample they are given, and leave the original alone."""

import ast
from pathlib import Path

import numpy as np
import pytest
from builders import sample

from rlbatch import faults
from rlbatch.catalogue import CATALOGUE
from rlbatch.errors import RecordError
from rlbatch.faults import (
    FAULTS,
    LAYOUT_FAULTS,
    MODEL_FAULTS,
    ROUTING_FAULTS,
    SET_FAULTS,
    TURN_FAULTS,
    NoPlaceError,
    shift,
)
from rlbatch.records import Sample, identical

NAN = np.float32(np.nan)
SOURCES = sorted(Path(faults.__file__).parent.glob("*.py"))


def made() -> Sample:
    ids = list(range(10, 90))
    return sample([1, 5, 6], ids, [-0.1 * (i % 16 + 1) for i in range(80)])


def other() -> Sample:
    return sample([1, 5, 6, 7], list(range(10, 80)), [-0.4 * (i % 11 + 1) for i in range(70)])


PLANTED = (FAULTS, MODEL_FAULTS, SET_FAULTS, ROUTING_FAULTS, TURN_FAULTS, LAYOUT_FAULTS)
IN_REPLIES_AND_PLANS = {"routed-experts-mismatch", "routing-unreadable", "sample-too-long"}
"""What a parser refuses before there is a record, and what only a plan of batches knows."""


def test_every_fault_has_a_code_of_the_catalogue():
    assert all(set(mapping) <= set(CATALOGUE) for mapping in PLANTED)


def test_every_code_of_samples_turns_and_layouts_has_a_fault():
    sound = {code for code, entry in CATALOGUE.items() if entry.level == "sound"}
    assert sound - set().union(*PLANTED) == IN_REPLIES_AND_PLANS


@pytest.mark.parametrize("code", FAULTS)
def test_planting_changes_copies_only(code):
    originals, untouched = ([made(), other(), other()] for _ in range(2))
    planted = FAULTS[code].plant(originals, np.random.default_rng(0))
    assert not all(identical(new, old) for new, old in zip(planted, untouched, strict=True))
    assert all(identical(new, old) for new, old in zip(originals, untouched, strict=True))


@pytest.mark.parametrize("code", FAULTS)
def test_the_generator_decides_alone(code):
    a, b = (FAULTS[code].plant([made(), other(), other()], np.random.default_rng(7)) for _ in range(2))
    assert all(identical(x, y) for x, y in zip(a, b, strict=True))


def test_a_share_spoils_that_many_and_at_least_one():
    for share, expected in ((0.01, 1), (0.5, 2), (1.0, 4)):
        samples = [made() for _ in range(4)]
        planted = FAULTS["logprob-missing"].plant(samples, np.random.default_rng(0), share=share)
        assert sum(new is not old for new, old in zip(planted, samples, strict=True)) == expected


def test_lag_one_by_hand():
    shifted = shift(sample([1], [7, 8, 9], [-1.0, -2.0, -3.0]), 1)
    np.testing.assert_array_equal(shifted.inference_logprobs, np.float32([NAN, -2, -3, NAN]))
    np.testing.assert_array_equal(shifted.turn, [-1, 0, 0, -1])
    np.testing.assert_array_equal(shifted.loss_mask, [False, True, True, False])
    np.testing.assert_array_equal(shifted.token_ids, [1, 7, 8, 9])


def test_lag_minus_one_by_hand():
    shifted = shift(sample([1], [7, 8, 9], [-1.0, -2.0, -3.0]), -1)
    np.testing.assert_array_equal(shifted.inference_logprobs, np.float32([NAN, NAN, -1, -2]))
    np.testing.assert_array_equal(shifted.turn, [-1, -1, 0, 0])
    np.testing.assert_array_equal(shifted.loss_mask, [False, False, True, True])


def test_where_there_is_no_place_for_it_planting_says_so():
    with pytest.raises(RecordError, match="found none in 1 samples"):
        FAULTS["shifted"].plant([sample([1], [7], [-1.0])], np.random.default_rng(0))
    with pytest.raises(RecordError, match="at least one sample"):
        FAULTS["shifted"].plant([], np.random.default_rng(0))


def test_faults_know_no_checks():
    imported = {
        node.module
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    ours = {name for name in imported if name.startswith("rlbatch") and "faults" not in name}
    assert ours == {"rlbatch.errors", "rlbatch.records"}


def test_a_rule_among_lags_leaves_prompt_and_mask_and_moves_two_rows_at_least():
    rows = [made(), other(), other()]
    planted = FAULTS["shifted-by-rule"].plant(rows, np.random.default_rng(0))
    lags = []
    for old, new in zip(rows, planted, strict=True):
        assert np.array_equal(old.loss_mask, new.loss_mask)
        assert np.array_equal(old.turn, new.turn)
        first, values = int(np.flatnonzero(old.turn >= 0)[0]), old.inference_logprobs
        fits = [
            lag
            for lag in range(-3, 4)
            if np.array_equal(
                new.inference_logprobs[first + max(0, -lag) : len(new) - max(0, lag)],
                values[first + max(0, lag) : len(new) - max(0, -lag)],
            )
        ]
        lags += fits
    # The prompts are 3, 4 and 4 tokens long: with this seed that is what the lags follow.
    assert [abs(lag) for lag in lags] == [0, 1, 1]


def test_a_fault_is_planted_by_plant_alone_which_raises_where_there_is_no_place():
    fault = FAULTS["shifted-from"]
    assert not hasattr(fault, "corrupt")
    with pytest.raises(NoPlaceError, match="expected a place for 'shifted-from', found none in 1 samples"):
        fault.plant([sample([1, 5], [7, 8, 2], [-0.1, -0.2, -0.3])], np.random.default_rng(0))
