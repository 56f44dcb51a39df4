"""What torch's DataLoader and its like expect of a loader, and of a collate function."""

import copy
import pickle
from collections import Counter
from itertools import islice

import pytest
import torch
from loader_cases import each_once, names_in, numbered, numbered_samples, same_bits, write_store
from torch.utils.data import DataLoader, IterableDataset, Subset

from rlbatch.collate import collate
from rlbatch.errors import RecordError, SoundnessError
from rlbatch.loader import Checks, Collator, Feed, RolloutLoader, Steps
from rlbatch.storage import open_reader

SAMPLES = numbered_samples(40, seed=6)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("conventions") / "store", SAMPLES)


def loader_of(store, **feed):
    return RolloutLoader(
        store, layout="packed", max_tokens=64, steps=Steps(step_samples=15, seed=3), feed=Feed(**feed)
    )


def test_the_collator_checks_and_collates_and_pickles(store):
    collator = pickle.loads(pickle.dumps(Collator(layout="packed", vocab_size=200)))
    assert same_bits(collator(SAMPLES[:3]), collate(SAMPLES[:3], layout="packed"))
    assert same_bits(collator.torch_call(SAMPLES[:3]), collator(SAMPLES[:3]))
    with pytest.raises(SoundnessError, match="advantage-not-finite"):
        collator([numbered(1, advantage=float("nan"))])
    with pytest.raises(SoundnessError, match="token-out-of-range"):
        Collator(layout="packed", vocab_size=3)(SAMPLES[:3])


def test_a_shuffled_store_of_several_modes_is_refused_with_what_to_do_and_that_works(tinylm_dir):
    # Two of its shards have raw logprobs, two processed ones.
    reader = open_reader(tinylm_dir.parent / "rollouts")
    how = {"batch_size": 8, "collate_fn": Collator(layout="padded")}
    with pytest.raises(RecordError, match=r"^\[modes-mixed\] sample \d, trajectory .*\n(.*\n)*.*Subset"):
        list(DataLoader(reader, shuffle=True, generator=torch.Generator().manual_seed(0), **how))
    raw = [at for at, sample in enumerate(reader) if sample.logprobs_modes == {"raw"}]
    batches = list(DataLoader(Subset(reader, raw), shuffle=True, **how))
    assert Counter(names_in_rows(batches)) == Counter(reader[at].trajectory_id for at in raw)
    assert len(raw) == 38


def names_in_rows(batches):
    return [ref.trajectory_id for batch in batches for ref in batch.refs]


def test_a_data_loader_takes_the_loader_as_it_is(store):
    loader = loader_of(store)
    assert isinstance(loader, IterableDataset)
    direct = list(loader_of(store))
    through = list(DataLoader(loader, batch_size=None))
    assert len(direct) == len(through)
    assert all(same_bits(a, b) for a, b in zip(direct, through, strict=True))


def test_worker_processes_share_the_batches_and_keep_their_order(store):
    direct = list(loader_of(store))
    workers = DataLoader(
        loader_of(store, prefetch=1), batch_size=None, num_workers=2, multiprocessing_context="spawn"
    )
    through = list(workers)
    assert all(same_bits(a, b) for a, b in zip(direct, through, strict=True))


@pytest.mark.parametrize("copied", [lambda loader: pickle.loads(pickle.dumps(loader)), copy.deepcopy])
def test_a_copy_of_a_loader_knows_what_its_own_workers_passed(store, copied):
    loader = loader_of(store)
    again = copied(loader)
    workers = DataLoader(again, batch_size=None, num_workers=2)
    assert each_once(list(workers), SAMPLES)
    with pytest.raises(RecordError, match="expected another epoch than 0"):
        list(workers)
    # The copy's workers are none of the first one's.
    assert each_once(list(DataLoader(loader, batch_size=None, num_workers=2)), SAMPLES)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_do_not_repeat_a_shuffled_epoch(store, persistent):
    straight = loader_of(store)
    first, second = names_in(list(straight)), names_in(list(straight))
    assert first != second
    loader = loader_of(store)
    workers = DataLoader(loader, batch_size=None, num_workers=2, persistent_workers=persistent)
    assert names_in(list(workers)) == first
    if not persistent:
        with pytest.raises(RecordError, match="expected another epoch than 0"):
            list(workers)
        loader.set_epoch(0)
        assert names_in(list(workers)) == first
        loader.set_epoch(1)
    assert names_in(list(workers)) == second


def test_a_worker_gets_neither_a_device_nor_a_bound_on_age(store, monkeypatch):
    class Info:
        id, num_workers, seed = 0, 2, 7

    monkeypatch.setattr("rlbatch.loader.loader.get_worker_info", lambda: Info)
    with pytest.raises(RecordError, match=r"no Feed\.device"):
        iter(loader_of(store, device="cpu"))
    aged = RolloutLoader(store, layout="packed", max_tokens=64, checks=Checks(max_version_lag=1))
    aged.trainer_version = 1
    with pytest.raises(RecordError, match=r"no Checks\.max_version_lag"):
        iter(aged)


def test_each_worker_goes_on_where_it_stood(store, monkeypatch):
    """What a stateful DataLoader does: each worker's own state, taken after each of its batches."""
    whole = list(loader_of(store))

    def as_worker(index):
        info = type("Info", (), {"id": index, "num_workers": 2, "seed": 7 + index})
        monkeypatch.setattr("rlbatch.loader.loader.get_worker_info", lambda: info)

    batches = []
    for index in (0, 1):
        as_worker(index)
        first = loader_of(store, prefetch=2)
        passed = list(islice(iter(first), 3))
        second = loader_of(store, prefetch=0)
        second.load_state_dict(first.state_dict())
        batches += [*passed, *second]
        assert names_in([*passed]) == names_in(whole[index::2][:3])
    assert each_once(batches, SAMPLES)


def test_the_loader_pickles_with_its_state(store):
    loader = loader_of(store)
    passed = list(islice(iter(loader), 4))
    again = pickle.loads(pickle.dumps(loader))
    again.load_state_dict(loader.state_dict())
    assert each_once([*passed, *again], SAMPLES)


def test_set_epoch_keeps_a_state_that_was_loaded_for_it(store):
    loader = loader_of(store)
    list(loader)
    passed = list(islice(iter(loader), 2))
    again = loader_of(store)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(1)
    assert each_once([*passed, *again], SAMPLES)
    again.set_epoch(0)
    assert names_in(list(again)) == names_in(list(loader_of(store)))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdata_resumes_in_the_middle_with_and_without_workers(store):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    whole = list(loader_of(store))
    for num_workers in (0, 2):
        options = {"batch_size": None, "num_workers": num_workers}
        if num_workers:
            options["multiprocessing_context"] = "spawn"
        first = stateful(loader_of(store), **options)
        passed = list(islice(iter(first), 5))
        second = stateful(loader_of(store), **options)
        second.load_state_dict(first.state_dict())
        resumed = [*passed, *second]
        assert all(same_bits(a, b) for a, b in zip(resumed, whole, strict=True))


def test_accelerate_prepares_either_kind(store):
    accelerate = pytest.importorskip("accelerate")
    # Sent out from one process, which is accelerate's default for iterables, a batch would have to be a dict.
    config = accelerate.DataLoaderConfiguration(dispatch_batches=False)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    ahead = accelerator.prepare(DataLoader(loader_of(store), batch_size=None))
    assert each_once(list(ahead), SAMPLES)
    mapped = DataLoader(open_reader(store), batch_size=7, collate_fn=Collator(layout="padded"))
    batches = list(accelerator.prepare(mapped))
    assert sum(batch.num_trajectories for batch in batches) == len(SAMPLES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a CUDA device")
@pytest.mark.gpu
def test_pinned_batches_are_pinned(store):
    batch = next(iter(DataLoader(loader_of(store), batch_size=None, pin_memory=True)))
    assert batch.input_ids.is_pinned()
