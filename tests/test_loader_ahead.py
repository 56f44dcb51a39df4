"""The next step's shards are verified on a second thread, and what is wrong with them is told in its step."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from loader_cases import names_in, numbered_samples, write_store
from safetensors import safe_open

from rlbatch.errors import StorageError
from rlbatch.loader import Feed, RolloutLoader, Steps
from rlbatch.loader.ahead import Verifier
from rlbatch.loader.passes import Pass
from rlbatch.packing import Room, plan_batches
from rlbatch.storage.shard import Shard

SAMPLES = numbered_samples(60, seed=3)


def verifiers():
    return [each for each in threading.enumerate() if each.name.startswith("rlbatch-verifier")]


def loader_of(store, **steps):
    chosen = Steps(**{"step_samples": 10} | steps)
    return RolloutLoader(store, layout="packed", max_tokens=64, steps=chosen, feed=Feed(prefetch=0))


def num_batches(samples):
    room = Room(layout="packed", max_tokens=64)
    starts = range(0, len(samples), 10)
    return sum(len(plan_batches([len(each) for each in samples[at : at + 10]], room)) for at in starts)


def alter(path):
    """One bit of a token's logprob: what is not read before its shard is."""
    with safe_open(path, framework="numpy") as file:
        values = file.get_tensor("inference_logprobs").tobytes()
    content = bytearray(path.read_bytes())
    content[content.index(values)] ^= 1
    path.write_bytes(content)


@pytest.fixture
def where_verified(monkeypatch):
    """File name -> the threads on which it was read whole."""
    threads = {}
    verify = Shard.verify

    def noted(shard):
        if not shard.is_verified:
            threads.setdefault(shard.path.name, []).append(threading.current_thread().name)
        verify(shard)

    monkeypatch.setattr(Shard, "verify", noted)
    return threads


@pytest.mark.parametrize("seed", [None, 5])
def test_every_shard_is_verified_once_and_those_of_later_steps_ahead(tmp_path, where_verified, seed):
    loader = loader_of(write_store(tmp_path / "store", SAMPLES), seed=seed)
    for _ in range(2):
        assert sorted(names_in(list(loader))) == sorted(each.trajectory_id for each in SAMPLES)
    main = threading.current_thread().name
    assert [len(threads) for threads in where_verified.values()] == [1] * 6
    ahead = [name for name, (thread,) in where_verified.items() if thread != main]
    if seed is None:
        assert sorted(ahead) == [f"{number:06d}.safetensors" for number in range(1, 6)]
    assert verifiers() == []


def test_an_altered_shard_is_told_in_the_step_that_needs_it(tmp_path):
    store = write_store(tmp_path / "store", SAMPLES)
    alter(store / "000003.safetensors")
    batches = iter(loader_of(store))
    # Six shards of ten samples, a step each: the fourth is bad.
    good = [next(batches) for _ in range(num_batches(SAMPLES[:30]))]
    assert [batch.step.step for batch in good][-1] == 2
    with pytest.raises(StorageError, match=r"shard-altered.*000003"):
        next(batches)
    assert verifiers() == []


def test_a_shard_that_is_gone_is_told_before_it_is_read(tmp_path):
    store = write_store(tmp_path / "store", SAMPLES)
    shard = Shard(store / "000001.safetensors")
    (store / "000001.safetensors").unlink()
    with Verifier() as ahead:
        ahead.begin([shard])
        with pytest.raises(StorageError, match="store-changed"):
            ahead.finish(threading.Event())
        ahead.finish(threading.Event())
    assert not shard.is_verified


def test_what_was_verified_needs_no_thread(tmp_path):
    store = write_store(tmp_path / "store", SAMPLES)
    shard = Shard(store / "000000.safetensors")
    with Verifier() as ahead:
        ahead.begin([shard])
        ahead.finish(threading.Event())
        assert shard.is_verified
    with Verifier() as ahead:
        ahead.begin([shard])
        assert verifiers() == []


def test_a_consumer_that_stops_leaves_no_verifier(tmp_path):
    batches = iter(loader_of(write_store(tmp_path / "store", SAMPLES)))
    next(batches)
    del batches
    assert verifiers() == []


@pytest.fixture
def cancelled(monkeypatch):
    """Set once a pool that is shut down has cancelled what waits, and before it waits for what runs."""
    event = threading.Event()
    shutdown = ThreadPoolExecutor.shutdown

    def noted(pool, **how):
        shutdown(pool, **how | {"wait": False})
        event.set()
        shutdown(pool, **how)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", noted)
    return event


@pytest.mark.parametrize("prefetch", [0, 100])
def test_a_consumer_that_stops_waits_for_the_shard_in_hand_only(tmp_path, monkeypatch, cancelled, prefetch):
    demands, verified, in_hand = [], [], threading.Event()
    batches_of, verify = Pass.batches, Shard.verify

    def noted(one_pass, start, demand):
        demands.append(demand)
        return batches_of(one_pass, start, demand)

    def held_up(shard):
        if threading.current_thread() in verifiers():
            verified.append(shard.path.name)
            in_hand.set()
            # The loader's thread stops once it has this shard; where there is none, the pass is closed.
            (demands[0].stopped if len(verified) == 1 and prefetch else cancelled).wait(2)
        verify(shard)

    monkeypatch.setattr(Pass, "batches", noted)
    monkeypatch.setattr(Shard, "verify", held_up)
    # Two steps of three shards: those of the second are verified ahead.
    store = write_store(tmp_path / "store", SAMPLES)
    loader = RolloutLoader(
        store, layout="packed", max_tokens=64, steps=Steps(step_samples=30), feed=Feed(prefetch=prefetch)
    )
    batches = iter(loader)
    next(batches)
    assert in_hand.wait(5)
    del batches
    assert verified[0] == "000003.safetensors"
    # The next one may have been begun before the rest was cancelled.
    assert len(verified) <= (2 if prefetch else 1)
    assert verifiers() == []
