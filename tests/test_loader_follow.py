"""A store is followed while it is written: in order, whole shards, bounded in age, and to an end."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from loader_cases import each_once, names_in, numbered, numbered_samples, same_bits, through_json, write_store

from rlbatch.errors import RecordError, SoundnessError, StorageError
from rlbatch.loader import Checks, Feed, RolloutLoader, Steps
from rlbatch.storage import open_reader, open_writer, write_shard
from rlbatch.storage.files import END_NAME, list_directory
from rlbatch.storage.follow import ShardFollower

SAMPLES = numbered_samples(23)


def follower(directory, *, timeout_s=5.0, prefetch=2, step_samples=6, **options):
    steps = Steps(step_samples=step_samples, follow_timeout_s=timeout_s)
    return RolloutLoader(
        directory, layout="packed", max_tokens=64, steps=steps, feed=Feed(prefetch=prefetch), **options
    )


def test_a_sampler_in_another_process_is_followed_to_its_end(tmp_path):
    script = Path(__file__).with_name("loader_sampler.py")
    directory = tmp_path / "store"
    with subprocess.Popen(
        [sys.executable, str(script), str(directory), "23", "12"],
        stdin=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        batches = iter(follower(directory, timeout_s=60))
        # The first step comes while the sampler waits for our word.
        first = next(batches)
        process.communicate(b"go on")
        rest = list(batches)
    assert process.returncode == 0
    assert each_once([first, *rest], SAMPLES)
    steps = [batch.step.step for batch in [first, *rest]]
    assert steps == sorted(steps)
    assert set(steps) == {0, 1, 2, 3}


def test_a_finished_store_gives_what_it_would_without_following(tmp_path):
    store = write_store(tmp_path / "store", SAMPLES)
    whole = list(RolloutLoader(store, layout="packed", max_tokens=64, steps=Steps(step_samples=6)))
    assert all(same_bits(a, b) for a, b in zip(follower(store), whole, strict=True))
    assert follower(store).num_steps is None


def test_a_state_goes_on_without_following_where_both_cut_steps_alike(tmp_path):
    def resumed_alone(samples):
        directory = write_store(tmp_path / f"store{len(samples)}", samples)
        loader = follower(directory)
        passed = list(islice(iter(loader), 2))
        alone = RolloutLoader(directory, layout="packed", max_tokens=64, steps=Steps(step_samples=6))
        alone.load_state_dict(through_json(loader.state_dict()))
        return [*passed, *alone]

    assert each_once(resumed_alone(SAMPLES), SAMPLES)
    # What one trajectory became stays together where all is known; a step that was followed may have cut it.
    pair = [
        replace(made, sample_id=f"pair:{at}", trajectory_id="pair", sibling=at, num_siblings=2)
        for at, made in enumerate([numbered(50), numbered(51)])
    ]
    with pytest.raises(RecordError, match="expected keeps_trajectories = False, as it was saved, found True"):
        resumed_alone([*SAMPLES[:5], *pair, *SAMPLES[5:]])


def test_steps_do_not_depend_on_when_shards_come(tmp_path):
    slow = tmp_path / "slow"
    expected = names_in(list(follower(write_store(tmp_path / "fast", SAMPLES))))

    def write():
        with open_writer(slow, max_samples=4) as writer:
            for made in SAMPLES:
                writer.append(made)
                time.sleep(0.005)

    thread = threading.Thread(target=write)
    thread.start()
    got = names_in(list(follower(slow)))
    thread.join()
    assert got == expected


def test_a_sampler_that_stops_is_an_error_in_time_and_nothing_is_lost(tmp_path):
    directory = tmp_path / "store"
    directory.mkdir()
    write_shard(directory / "000000.safetensors", SAMPLES[:8])
    loader = follower(directory, timeout_s=0.2)
    passed, began = [], time.monotonic()
    with pytest.raises(StorageError, match=r"\[store-overdue\][\s\S]*none after the first 1"):
        passed.extend(loader)
    assert 0.2 <= time.monotonic() - began < 3
    assert {batch.step.step for batch in passed} == {0}
    # The rest comes; the state goes on where it stood.
    write_shard(directory / "000001.safetensors", SAMPLES[8:])
    (directory / END_NAME).write_text('{"num_shards": 2, "num_samples": 23}')
    resumed = follower(directory)
    resumed.load_state_dict(through_json(loader.state_dict()))
    assert each_once([*passed, *resumed], SAMPLES)


def test_nothing_at_all_is_overdue_too(tmp_path):
    with pytest.raises(StorageError, match="none after the first 0"):
        list(follower(tmp_path / "never", timeout_s=0.1))


def test_a_consumer_that_stops_ends_the_waiting(tmp_path):
    batches = iter(follower(tmp_path / "never", timeout_s=600))
    time.sleep(0.05)
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < 2


def test_waiting_does_not_spin(tmp_path, monkeypatch):
    looks = []
    look = ShardFollower._look
    monkeypatch.setattr(ShardFollower, "_look", lambda self: looks.append(1) or look(self))
    with pytest.raises(StorageError):
        ShardFollower(tmp_path / "never", timeout_s=1.0).advance(threading.Event())
    # Pauses of 0.05, 0.1, 0.2, 0.4 and what is left of the second.
    assert 5 <= len(looks) <= 7


def test_an_empty_run_ends_at_once(tmp_path):
    with open_writer(tmp_path / "store"):
        pass
    assert list(follower(tmp_path / "store")) == []


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda d: (d / "000000.safetensors").unlink(), "000000.safetensors gone"),
        (lambda d: write_shard(d / "00.safetensors", [numbered(90)]), "another shard"),
        (
            lambda d: (d / END_NAME).write_text('{"num_shards": 9, "num_samples": 12}'),
            "9 shards, as shards.end says",
        ),
        (lambda d: (d / END_NAME).write_text('{"num_shards": 2, "num_samples": 13}'), "found:    12 in 2"),
        (lambda d: (d / END_NAME).write_text("[]"), "JSON with num_shards"),
        (lambda d: (d / "000002.safetensors").write_bytes(b"rubbish"), "file-unusable"),
    ],
)
def test_a_directory_that_is_no_longer_what_it_was_is_an_error(tmp_path, spoil, code):
    directory = tmp_path / "store"
    directory.mkdir()
    write_shard(directory / "000000.safetensors", SAMPLES[:6])
    write_shard(directory / "000001.safetensors", SAMPLES[6:12])
    batches = iter(follower(directory, prefetch=0))
    next(batches)
    spoil(directory)
    with pytest.raises(StorageError, match=code.replace(".", r"\.")):
        list(batches)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("lacking", [(0,), (1,), (2,), (0, 1)])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_listing_that_lacks_names_is_waited_out(tmp_path, monkeypatch, call, lacking, ended):
    store = write_store(tmp_path / "store", SAMPLES)
    calls = []

    def listed(directory):
        calls.append(directory)
        listing = list_directory(directory)
        # A listing that began after the end was there lacks nothing.
        if len(calls) != call or (ended and call == 2):
            return listing
        shards = tuple(path for at, path in enumerate(listing.shards) if at not in lacking)
        return replace(listing, shards=shards, ended=ended)

    monkeypatch.setattr("rlbatch.storage.follow.list_directory", listed)
    assert each_once(list(follower(store)), SAMPLES)


def test_a_gap_that_is_not_filled_is_overdue(tmp_path):
    directory = tmp_path / "store"
    directory.mkdir()
    for number in (0, 2):
        write_shard(directory / f"00000{number}.safetensors", SAMPLES[6 * number : 6 * number + 6])
    with pytest.raises(StorageError, match=r"\[store-overdue\][\s\S]*none after the first 1"):
        list(follower(directory, timeout_s=0.2))


def test_files_in_the_making_are_not_seen(tmp_path):
    directory = write_store(tmp_path / "store", SAMPLES)
    (directory / ".000009.safetensors.tmp-1-00000000").write_bytes(b"half of a shard")
    assert each_once(list(follower(directory)), SAMPLES)


def test_the_writer_says_the_end_once_and_only_after_a_whole_run(tmp_path):
    with open_writer(tmp_path / "whole", max_samples=10) as writer:
        for made in SAMPLES:
            writer.append(made)
        writer.flush()
        assert not (tmp_path / "whole" / END_NAME).exists()
    assert (tmp_path / "whole" / END_NAME).read_text() == '{"num_shards": 3, "num_samples": 23}'
    assert len(open_reader(tmp_path / "whole")) == 23
    with contextlib.suppress(KeyError), open_writer(tmp_path / "broken") as writer:
        writer.append(SAMPLES[0])
        raise KeyError
    assert not (tmp_path / "broken" / END_NAME).exists()
    with open_writer(tmp_path / "empty"):
        pass
    with pytest.raises(StorageError, match=r"found:    1, the first shards\.end"):
        open_writer(tmp_path / "empty")


def aged(directory, aside=None, *, max_version_lag=1, prefetch=2):
    checks = Checks(max_version_lag=max_version_lag)
    if aside is not None:
        checks = Checks(max_version_lag=max_version_lag, on_fault="quarantine", quarantine=aside)
    return follower(directory, checks=checks, prefetch=prefetch, step_samples=4)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_samples_that_are_too_old_when_their_step_is_asked_for_are_set_aside(tmp_path, prefetch):
    # Steps of four samples, drawn by versions 0 0 0 0, 1 1 0 1, 2 2 2 0.
    versions = [0, 0, 0, 0, 1, 1, 0, 1, 2, 2, 2, 0]
    samples = [numbered(number, version=version) for number, version in enumerate(versions)]
    loader = aged(write_store(tmp_path / "store", samples), tmp_path / "aside", prefetch=prefetch)
    loader.trainer_version = 0
    used = []
    for batch in loader:
        used += [(loader.trainer_version, name) for name in names_in([batch])]
        if batch.step.is_last:
            loader.trainer_version += 1
    # Version 1 takes 0 and 1; version 2 takes 1 and 2, and t11 of version 0 no more.
    assert sorted(used) == sorted(
        [(0, f"t{number}") for number in range(4)]
        + [(1, f"t{number}") for number in range(4, 8)]
        + [(2, f"t{number}") for number in range(8, 11)]
    )
    assert [made.trajectory_id for made in open_reader(tmp_path / "aside")] == ["t11"]
    assert loader.metrics()["rlbatch/loader_findings/version-too-old"] == 1


def test_ranks_that_read_ahead_differently_judge_alike(tmp_path):
    samples = [numbered(number, version=number // 4) for number in range(12)]
    store = write_store(tmp_path / "store", samples)
    seen = []
    for prefetch in (0, 1, 4):
        loader = aged(store, tmp_path / f"aside{prefetch}", max_version_lag=0, prefetch=prefetch)
        loader.trainer_version = 0
        names = []
        for batch in loader:
            names.append(names_in([batch]))
            time.sleep(0.02)
            if batch.step.is_last:
                loader.trainer_version += 1
        seen.append(names)
    assert seen[0] == seen[1] == seen[2]
    assert sum(map(len, seen[0])) == 12


def test_too_old_is_an_error_where_nothing_is_set_aside(tmp_path):
    store = write_store(tmp_path / "store", [numbered(number, version=3) for number in range(4)])
    loader = aged(store)
    loader.trainer_version = 5
    with pytest.raises(SoundnessError, match="version-too-old"):
        list(loader)


def test_a_bound_on_age_needs_the_trainer_version(tmp_path):
    store = write_store(tmp_path / "store", SAMPLES)
    with pytest.raises(RecordError, match=r"RolloutLoader\.trainer_version"):
        iter(aged(store))


def test_resuming_in_a_step_judges_it_by_the_version_it_was_begun_with(tmp_path):
    samples = [numbered(number, length=20, version=number % 2) for number in range(8)]
    store = write_store(tmp_path / "store", samples)
    first = aged(store, tmp_path / "aside")
    first.trainer_version = 1
    passed = list(islice(iter(first), 1))
    assert not passed[0].step.is_last
    second = aged(store, tmp_path / "aside")
    second.load_state_dict(through_json(first.state_dict()))
    second.trainer_version = 2
    rest = list(second)
    # The first step stays whole; of the second, what version 0 drew is two behind.
    assert sorted(names_in([*passed, *rest])) == ["t0", "t1", "t2", "t3", "t5", "t7"]
