"""What tells a named distribution from other weights: the mean ratio in each context, and many turns."""

import numpy as np
import pytest

from rlbatch.alignment.exhibits import Exhibit
from rlbatch.alignment.families import FAMILIES
from rlbatch.alignment.rivals import halves_agree, has_ratio, ratio_slope, turn_of
from rlbatch.errors import Where

NUM_TURNS, NUM_TOKENS, MASS = 40, 50, 0.8


def exhibit_of(inference, stated, offset):
    return Exhibit(
        place=Where(),
        divisor=1.0,
        offset=offset,
        index=-1,
        inference=inference,
        trainer=stated,
        again=None,
        third=None,
        own_position=None,
        next_id=None,
        target_logits=None,
        collision=np.full(len(stated), 0.3),
        predictions=(None,) * len(FAMILIES),
    )


def rows(kind):
    """Tokens drawn from three ids in every context, and the trainer's and the engine's logprob of each.

    `kept`: the engine drew from the first two, and divided by their mass of 0.8; `weights`: it drew from all
    three with other weights, 0.7, 0.25 and 0.05.
    """
    rng = np.random.default_rng(7)
    trainer = np.array([0.5, 0.3, 0.2])
    engine = np.array([0.7, 0.25, 0.05]) if kind == "weights" else np.array([0.625, 0.375, 0.0])
    ids = rng.choice(3, NUM_TURNS * NUM_TOKENS, p=engine)
    offset = np.tile(np.arange(NUM_TOKENS), NUM_TURNS)
    stated = np.log(trainer[ids])
    return exhibit_of(np.log(engine[ids]), stated, offset), stated - np.log(MASS)


def test_a_kept_set_has_the_ratio_of_its_mass_in_every_token():
    exhibit, column = rows("kept")
    slope, error = ratio_slope(exhibit, exhibit.collision, column)
    assert slope == pytest.approx(1.0)
    assert error == pytest.approx(0.0, abs=1e-9)
    assert has_ratio(exhibit, exhibit.collision, column)


def test_other_weights_have_a_mean_ratio_of_one():
    # 0.7 * 5/7 + 0.25 * 6/5 + 0.05 * 4 = 1: nothing of what a kept set leaves out. One ratio spreads by
    # sqrt(0.7 * (2/7)^2 + 0.25 * 0.2^2 + 0.05 * 3^2) = 0.72, 2,000 of them by 0.016, which is 0.08 of 0.2.
    exhibit, column = rows("weights")
    slope, error = ratio_slope(exhibit, exhibit.collision, column)
    assert abs(slope) < 4 * 0.08
    assert error == pytest.approx(0.08, rel=0.4)
    assert not has_ratio(exhibit, exhibit.collision, column)


def test_turns_are_told_by_where_they_begin_anew():
    assert turn_of(np.array([0, 1, 2, 0, 1, 5, 3])).tolist() == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(("gains", "expected"), [([4, 4, 4, 4], True), ([12, 1, 12, 1], False)])
def test_what_one_half_of_the_turns_says_alone_is_not_believed(gains, expected):
    assert halves_agree(np.array(gains, float), np.arange(4)) is expected
