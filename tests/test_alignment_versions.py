"""Where the size of the differences changes in a turn, and which divisors are bases in disguise."""

import numpy as np
import pytest

from rlbatch.alignment.hypotheses.distributions import _is_near_another
from rlbatch.alignment.hypotheses.versions import Change

LOG_HALF = float(np.log(0.5))


def values(*sizes):
    """Tokens of probability 1/2, each off by its size, up and down in turn."""
    signs = np.where(np.arange(len(sizes)) % 2, -1.0, 1.0)
    return LOG_HALF + np.array(sizes) * signs, np.full(len(sizes), LOG_HALF)


def test_a_change_is_found_at_its_token_with_its_size():
    change = Change.of(*values(*[0.1] * 20, *[0.4] * 20))
    assert (change.at, change.is_louder_after, change.is_throughout) == (20, True, True)
    assert change.factor == pytest.approx(4, rel=1e-2)
    assert (change.quiet, change.loud) == (pytest.approx(0.1), pytest.approx(0.4))
    # 40 log 0.25 - 20 log 0.1 - 20 log 0.4 = 40 log 1.25 = 8.93 nats.
    assert change.gain == pytest.approx(8.93, rel=1e-2)


def test_one_wild_token_is_no_change():
    change = Change.of(*values(*[0.1] * 30, 3.0, *[0.1] * 9))
    # Six times the median at most: 40 log 1.125 - 30 log 1 - 10 log 1.5 = 0.66 nats.
    assert change.gain == pytest.approx(0.66, rel=2e-2)
    assert not change.is_throughout


def test_a_louder_beginning_is_one_before():
    assert not Change.of(*values(*[0.4] * 20, *[0.1] * 20)).is_louder_after


def test_a_few_tokens_show_no_change():
    assert Change.of(*values(*[0.1] * 15)) is None


@pytest.mark.parametrize(
    ("divisor", "stated", "expected"),
    [
        (0.70, 1.0, True),  # ln 2 = 0.693
        (2.36, 1.0, True),  # ln 10 = 2.303
        (0.70, 0.7, False),  # whoever divides by the temperature states it
        (1.05, 1.0, True),
        (1.40, 1.0, False),
        (0.85, 1.0, False),
    ],
)
def test_a_divisor_that_nobody_states_may_be_a_base(divisor, stated, expected):
    assert _is_near_another(divisor, stated) is expected
