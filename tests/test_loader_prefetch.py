"""Nobody waits forever: errors, consumers that stop, threads that end."""

import gc
import subprocess
import sys
import threading
import time

import pytest
from loader_cases import names_in, numbered, numbered_samples, write_store

from rlbatch.errors import SoundnessError, StorageError
from rlbatch.loader import Feed, RolloutLoader, Steps
from rlbatch.loader.prefetch import Prefetcher
from rlbatch.storage import open_reader

SAMPLES = numbered_samples(60, seed=3)


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name == "rlbatch-loader"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loader_threads() == []


def loader_of(store, **options):
    shared = {"layout": "packed", "max_tokens": 64, "steps": Steps(step_samples=10)}
    return RolloutLoader(store, **shared | options)


def test_batches_are_made_ahead_and_no_further_than_told():
    made = []

    def make(demand):
        for number in range(10):
            made.append(number)
            yield number

    ahead = Prefetcher(make, depth=3)
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    # Three wait in the queue, and one in the hands of the thread.
    assert made == [0, 1, 2, 3]
    assert list(ahead) == list(range(10))


def test_a_consumer_that_stops_lets_the_thread_end(tmp_path):
    batches = iter(loader_of(write_store(tmp_path / "store", SAMPLES)))
    next(batches)
    assert len(loader_threads()) == 1
    batches.close()
    assert loader_threads() == []
    with pytest.raises(StopIteration):
        next(batches)


def test_a_consumer_that_forgets_the_iterator_does_too(tmp_path):
    loader = loader_of(write_store(tmp_path / "store", SAMPLES))
    for _ in loader:
        break


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_reaches_the_consumer_every_time(tmp_path, prefetch):
    samples = [*SAMPLES[:25], numbered(70, advantage=float("inf")), *SAMPLES[25:]]
    batches = iter(loader_of(write_store(tmp_path / "store", samples), feed=Feed(prefetch=prefetch)))
    steps = []
    with pytest.raises(SoundnessError, match="advantage-not-finite"):
        steps += [batch.step.step for batch in batches]
    assert set(steps) <= {0, 1}
    with pytest.raises(SoundnessError, match="advantage-not-finite"):
        next(batches)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_came_before_a_fault_comes_first(tmp_path, prefetch):
    samples = [*SAMPLES[:25], numbered(70, advantage=float("inf"))]
    batches = iter(loader_of(write_store(tmp_path / "store", samples), feed=Feed(prefetch=prefetch)))
    steps = []
    with pytest.raises(SoundnessError):
        steps.extend(batch.step.step for batch in batches)
    assert set(steps) == {0, 1}


def test_an_interrupt_on_the_thread_is_no_silence():
    def make(demand):
        yield 1
        raise KeyboardInterrupt

    ahead = Prefetcher(make, depth=1)
    assert next(ahead) == 1
    with pytest.raises(KeyboardInterrupt):
        next(ahead)


def test_the_thread_can_wait_until_it_is_asked():
    asked = []

    def make(demand):
        for number in range(3):
            assert demand.wait_until_wanted()
            asked.append(number)
            yield number

    ahead = Prefetcher(make, depth=3)
    time.sleep(0.05)
    assert asked == []
    assert next(ahead) == 0
    time.sleep(0.05)
    assert asked == [0]
    ahead.close()


AT_EXIT = """
import time
from rlbatch.loader.prefetch import Prefetcher
from rlbatch.storage import open_reader

def make(demand):
    try:
        while True:
            yield 1
            time.sleep(0.3)
    finally:
        print("the thread ended")

ahead = Prefetcher(make, depth=2)
next(ahead)
{end}
"""


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise RuntimeError", 1)])
def test_a_process_that_ends_in_a_pass_waits_for_the_thread(end, code):
    ended = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(end=end)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (code, "the thread ended\n")


def test_the_thread_may_free_the_last_reference_itself():
    freed = threading.Event()

    def make(demand):
        yield 1
        assert freed.wait(5)
        held.clear()
        yield 2

    held = [Prefetcher(make, depth=1)]
    thread = held[0]._thread
    assert next(held[0]) == 1
    freed.set()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize("change", ["removed", "cut", "rewritten", "replaced"])
def test_a_shard_that_changes_under_the_reader_is_an_error(tmp_path, change):
    store = write_store(tmp_path / "store", SAMPLES)
    batches = iter(loader_of(store, feed=Feed(prefetch=0)))
    assert next(batches).step.step == 0
    shard = store / "000003.safetensors"
    content = shard.read_bytes()
    if change == "removed":
        shard.unlink()
    elif change == "cut":
        shard.write_bytes(content[: len(content) // 2])
    elif change == "rewritten":
        shard.write_bytes(content)
    else:
        shard.unlink()
        shard.write_bytes(content)
    steps = []
    with pytest.raises(StorageError, match=r"\[store-changed\].*000003.safetensors"):
        steps.extend(batch.step.step for batch in batches)
    assert max(steps) == 2


def test_bytes_that_change_inside_a_step_are_not_handed_over(tmp_path):
    store = write_store(tmp_path / "store", SAMPLES)
    batches = iter(loader_of(store, feed=Feed(prefetch=0)))
    assert not next(batches).step.is_last
    shard = store / "000000.safetensors"
    content = bytearray(shard.read_bytes())
    ids = open_reader(shard)[9].token_ids.tobytes()
    at = content.find(ids)
    with shard.open("r+b") as file:
        file.seek(at)
        file.write(bytes(len(ids)))
    with pytest.raises(StorageError, match=r"\[store-changed\].*000000.safetensors"):
        next(batches)


def test_copies_of_a_shuffled_step_outlive_the_bytes(tmp_path):
    store = write_store(tmp_path / "store", SAMPLES)
    loader = loader_of(store, steps=Steps(step_samples=60, seed=1), feed=Feed(prefetch=0))
    whole = names_in(list(loader_of(store, steps=Steps(step_samples=60, seed=1))))
    batches = iter(loader)
    first = next(batches)
    shard = store / "000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    assert names_in([first, *batches]) == whole


def test_a_store_without_shards_is_refused(tmp_path):
    (tmp_path / "store").mkdir()
    with pytest.raises(StorageError, match="an empty directory"):
        loader_of(tmp_path / "store")


def test_a_shard_cannot_be_empty(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "a.safetensors").write_bytes(b"")
    with pytest.raises(StorageError, match="an empty file"):
        loader_of(tmp_path / "store")
