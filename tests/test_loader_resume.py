"""A saved state goes on with the batch that would have come: anywhere, after a kill, on other ranks."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_cases import each_once, names_in, numbered, numbered_samples, same_bits, through_json, write_store

from rlbatch.collate import Padding
from rlbatch.errors import RecordError, StorageError
from rlbatch.loader import Checks, Feed, RolloutLoader, Steps
from rlbatch.loader.position import plan_left

SAMPLES = numbered_samples(57, seed=1)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("resume") / "store", SAMPLES)


def loader_of(store, *, prefetch=0, **steps):
    return RolloutLoader(
        store,
        layout="packed",
        max_tokens=64,
        steps=Steps(**{"step_samples": 20, "seed": 5} | steps),
        feed=Feed(prefetch=prefetch),
    )


@pytest.mark.parametrize("prefetch", [0, 3])
def test_the_next_batch_is_the_one_that_would_have_come(store, prefetch):
    whole = list(loader_of(store))
    for stop in range(len(whole) + 1):
        first = loader_of(store, prefetch=prefetch)
        passed = list(islice(iter(first), stop))
        second = loader_of(store, prefetch=prefetch)
        second.load_state_dict(through_json(first.state_dict()))
        resumed = [*passed, *second]
        assert len(resumed) == len(whole)
        assert all(same_bits(a, b) for a, b in zip(resumed, whole, strict=True))


def test_the_epochs_after_a_resumed_one_are_the_same_too(store):
    straight = loader_of(store)
    names = [names_in(list(straight)) for _ in range(3)]
    first = loader_of(store)
    list(first)
    passed = list(islice(iter(first), 4))
    second = loader_of(store)
    second.load_state_dict(first.state_dict())
    assert second.epoch == 1
    assert names_in([*passed, *second]) == names[1]
    assert names_in(list(second)) == names[2]


def test_an_abandoned_pass_begins_anew(store):
    loader = loader_of(store, prefetch=2)
    list(islice(iter(loader), 3))
    assert each_once(list(loader), SAMPLES)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_abandoned_iterator_does_not_move_the_state(store, prefetch):
    loader = loader_of(store, prefetch=prefetch)
    old = iter(loader)
    next(old)
    next(iter(loader))
    state = loader.state_dict()
    list(old)
    assert loader.state_dict() == state
    assert loader.epoch == 0


@settings(max_examples=20)
@given(
    ranks=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    stops=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    step_samples=st.sampled_from([20, 1000]),
)
def test_other_ranks_go_on_with_what_was_left(store, ranks, stops, step_samples):
    batches, state = [], None
    for turn, num_ranks in enumerate(ranks):
        states = []
        for rank in range(num_ranks):
            loader = loader_of(store, rank=rank, num_ranks=num_ranks, step_samples=step_samples)
            if state is not None:
                loader.load_state_dict(state)
            is_last = turn == len(ranks) - 1
            if loader.epoch == 0:
                batches += loader if is_last else islice(iter(loader), stops[turn])
            states.append(through_json(loader.state_dict()))
        # Every rank stands at the same place, so any of their states will do.
        assert all(each == states[0] for each in states)
        state = states[0]
    assert each_once(batches, SAMPLES)


def test_the_step_keeps_its_normaliser_on_other_ranks(store):
    first = loader_of(store, step_samples=57)
    (before,) = islice(iter(first), 1)
    second = loader_of(store, step_samples=57, rank=1, num_ranks=2)
    second.load_state_dict(first.state_dict())
    after = next(iter(second))
    assert after.step.num_loss_tokens == before.step.num_loss_tokens
    assert after.step.num_samples == 57


def test_after_a_kill_the_saved_state_goes_on(store, tmp_path):
    whole = list(loader_of(store))
    state = tmp_path / "state.json"
    script = Path(__file__).with_name("loader_kill.py")
    with subprocess.Popen(
        [sys.executable, str(script), str(store), str(state), "6"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout.readline() == b"ready\n"
        process.kill()
    assert process.returncode == -9
    loader = loader_of(store, prefetch=2)
    loader.load_state_dict(json.loads(state.read_text()))
    assert all(same_bits(a, b) for a, b in zip(loader, whole[7:], strict=True))


@pytest.mark.parametrize(
    ("change", "name"),
    [({"step_samples": 21}, "step_samples = 20"), ({"seed": 6}, "seed = 5"), ({"seed": None}, "seed = 5")],
)
def test_a_state_of_other_options_is_refused(store, change, name):
    state = loader_of(store).state_dict()
    with pytest.raises(RecordError, match=f"expected {name}, as it was saved"):
        loader_of(store, **change).load_state_dict(state)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.clear(),
        lambda state: state.pop("store"),
        lambda state: state.update(version=99),
        lambda state: state["position"].update(parts=3),
        lambda state: state["position"].update(more=3),
        lambda state: state["position"].update(epoch="0"),
        lambda state: state["position"].update(epoch=True),
        lambda state: state["position"].update(step=-1),
        lambda state: state["position"].update(step=4),
        lambda state: state["position"].update(num_batches=None),
        lambda state: state["position"].update(trainer_version="1"),
        lambda state: state["position"].update(parts=[[0, 1]]),
        lambda state: state["position"].update(parts=[[1, -1]]),
        lambda state: state["position"].update(parts=[[1, 1.5]]),
        lambda state: state.update(store=[6, None]),
    ],
)
def test_what_is_no_state_is_refused(store, spoil):
    loader = loader_of(store)
    state = through_json(loader.state_dict())
    spoil(state)
    with pytest.raises(RecordError, match="load_state_dict: expected"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("parts", [[[1, 99]], [[2, 99], [1, 0]]])
def test_a_state_of_more_than_the_step_has_skips_nothing(store, parts, prefetch):
    loader = loader_of(store, prefetch=prefetch)
    state = through_json(loader.state_dict())
    state["position"]["parts"] = parts
    loader.load_state_dict(state)
    with pytest.raises(RecordError, match=r"load_state_dict: expected at most \d batches done .* found 99"):
        list(loader)


def test_what_is_left_of_a_step_is_planned_in_the_order_of_the_step():
    asked = []

    def plan(left, num_ranks):
        asked.append(list(left))
        # The last samples first, as a plan by cost may have it.
        return [[[index] for index in reversed(left[rank::num_ranks])] for rank in range(num_ranks)]

    # Two ranks did 5 and 4; what is left comes rank by rank: 3, 1, then 2, 0.
    assert plan_left(6, [(2, 1), (1, 0)], plan) == [[[3], [2], [1], [0]]]
    assert asked == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]


@pytest.mark.parametrize("padding", [Padding(side="left"), Padding(token_id=7)])
def test_a_state_of_another_padding_is_refused(store, padding):
    options = {"layout": "padded", "max_tokens": 64}
    state = through_json(RolloutLoader(store, **options).state_dict())
    RolloutLoader(store, **options).load_state_dict(state)
    with pytest.raises(RecordError, match="load_state_dict: expected padding = "):
        RolloutLoader(store, **options, padding=padding).load_state_dict(state)


def test_a_state_of_another_store_is_refused(store, tmp_path):
    state = loader_of(store).state_dict()
    fewer = write_store(tmp_path / "fewer", SAMPLES[:50])
    with pytest.raises(StorageError, match=r"\[store-changed\][\s\S]*found:    5 shards"):
        loader_of(fewer).load_state_dict(state)
    # Of a store that nobody writes to any more, a longer one is another one too, though it begins alike.
    state_of_fewer = loader_of(fewer).state_dict()
    with pytest.raises(StorageError, match=r"\[store-changed\][\s\S]*found:    6 shards"):
        loader_of(store).load_state_dict(state_of_fewer)
    other = write_store(tmp_path / "other", [*SAMPLES[:-1], numbered(99)])
    with pytest.raises(StorageError, match=r"\[store-changed\][\s\S]*found:    other contents"):
        loader_of(other).load_state_dict(state)


def test_what_was_set_aside_stays_aside(tmp_path):
    samples = numbered_samples(20)
    bad = numbered(50, trajectory_id="bad", advantage=float("nan"))
    store = write_store(tmp_path / "store", [*samples[:5], bad, *samples[5:]])

    def loader(directory):
        checks = Checks(on_fault="quarantine", quarantine=tmp_path / directory)
        return RolloutLoader(store, layout="packed", max_tokens=64, checks=checks)

    first = loader("aside")
    passed = list(islice(iter(first), 2))
    second = loader("aside")
    second.load_state_dict(first.state_dict())
    assert each_once([*passed, *second], samples)
    assert len(list((tmp_path / "aside").iterdir())) == 2
