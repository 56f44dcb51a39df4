"""Which planted faults are counted: those that move enough tokens by more than the noise."""

import numpy as np
import pytest
from builders import sample

from rlbatch.drill.shows import informative_tokens, moved_by, noise_of, require_shows, said_nats
from rlbatch.faults import NoPlaceError, Scored

LOG_HALF = float(np.log(0.5))


def scored(inference, trainer, ids=None, prompt=(1, 5)):
    ids = [7] * len(inference) if ids is None else ids
    context = [np.nan] * len(prompt)
    return Scored(
        sample=sample(list(prompt), ids, inference),
        trainer_logprobs=np.array([*context, *trainer]),
        logits=np.empty((0, 0)),
    )


def noisy(num, by=0.052):
    """Tokens of probability 1/2, off by a tenth of their width of 0.52 nats."""
    return scored([LOG_HALF] * num, [LOG_HALF + by * (-1) ** at for at in range(num)])


def test_noise_is_in_widths_of_the_tokens():
    # |0.052| over 1 - exp(-0.693 -+ 0.052) + 0.02, alternating: 0.494 and 0.545.
    assert noise_of([noisy(20)]) == pytest.approx(0.1, rel=0.01)


def test_a_token_speaks_where_it_is_moved_by_twice_its_noise():
    before = noisy(4)
    by = np.array([0.09, -0.09, 0.13, -0.13], np.float32)
    after = scored((np.full(4, LOG_HALF) + by).tolist(), before.trainer_logprobs[2:].tolist())
    told = informative_tokens(before, after, 0.1)
    assert told[-4:].tolist() == [False, False, True, True]
    assert not told[:-4].any()


def test_nats_said_are_those_of_a_moved_laplace_distribution():
    before = noisy(2, by=0.0)
    # Width 0.52, noise 0.1: 0.052 nats is one width, and says exp(-1) = 0.368 nats; twelve at most.
    after = scored([LOG_HALF + 0.052, LOG_HALF + 9.0], [LOG_HALF] * 2)
    assert said_nats(before, after, 0.1) == pytest.approx(0.368 + 11, rel=1e-3)


def test_rows_are_compared_from_their_ends():
    values = [-1.0, -2.0, -3.0]
    before, after = scored(values, values), scored(values, values, prompt=(5,))
    assert moved_by(before, after, 0.1).tolist() == [0.0] * 4


def test_a_value_that_was_lost_says_everything():
    before = noisy(3)
    after = scored([LOG_HALF] * 3, [LOG_HALF, -np.inf, LOG_HALF])
    assert informative_tokens(before, after, 0.1)[-2]


def test_a_row_with_sixteen_such_tokens_shows_its_fault():
    before = noisy(20)
    for num, is_enough in ((16, True), (15, False)):
        # All twenty are touched, some of them by next to nothing.
        by = np.where(np.arange(20) < num, 1.0, 0.001)
        after = scored((LOG_HALF - by).tolist(), before.trainer_logprobs[2:].tolist())
        if is_enough:
            require_shows([before, before], [before, after], in_pool=False)
        else:
            with pytest.raises(NoPlaceError, match="hides"):
                require_shows([before, before], [before, after], in_pool=False)


@pytest.mark.parametrize(("moved", "is_enough"), [((5.0, 5.0), True), ((5.0, 0.05), False)])
def test_of_a_few_values_every_one_must_show(moved, is_enough):
    before = noisy(20)
    inference = [LOG_HALF] * 18 + [LOG_HALF - each for each in moved]
    after = scored(inference, before.trainer_logprobs[2:].tolist())
    if is_enough:
        require_shows([before], [after], in_pool=False)
    else:
        with pytest.raises(NoPlaceError):
            require_shows([before], [after], in_pool=False)


@pytest.mark.parametrize(("num_spoilt", "is_enough"), [(14, True), (13, False)])
def test_two_wrong_ids_show_by_what_they_spoil(num_spoilt, is_enough):
    before = noisy(20)
    trainer = before.trainer_logprobs[2:].copy()
    trainer[:2] -= 9.0
    trainer[2 : 2 + num_spoilt] -= 1.0
    after = scored([LOG_HALF] * 20, trainer.tolist(), [8, 8] + [7] * 18)
    if is_enough:
        require_shows([before], [after], in_pool=False)
    else:
        with pytest.raises(NoPlaceError):
            require_shows([before], [after], in_pool=False)


@pytest.mark.parametrize(("num", "is_enough"), [(100, True), (80, False)])
def test_what_rows_of_a_run_say_adds_up(num, is_enough):
    # Each token is moved by a width and a half, none by two: 1.5 + exp(-1.5) - 1 = 0.723 nats a token.
    before = noisy(num)
    after = scored([LOG_HALF + 0.078] * num, before.trainer_logprobs[2:].tolist())
    assert not informative_tokens(before, after, noise_of([before])).any()
    if is_enough:
        require_shows([before], [after], in_pool=True)
    else:
        with pytest.raises(NoPlaceError):
            require_shows([before], [after], in_pool=True)
