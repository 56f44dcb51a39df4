"""Buffers are used again, and never while anybody can still see them."""

import gc
from itertools import islice

import pytest
import torch
from loader_cases import numbered_samples, same_bits, write_store

from rlbatch.collate import collate
from rlbatch.loader import Feed, RolloutLoader
from rlbatch.loader.ring import BufferRing

POISON = 0xA5
SAMPLES = numbered_samples(240, seed=2)


@pytest.fixture
def store(tmp_path):
    return write_store(tmp_path / "store", SAMPLES)


@pytest.fixture
def poisoned(monkeypatch):
    """Every buffer is overwritten the moment it is returned; the list counts them."""
    returned = []
    give_back = BufferRing._give_back

    def poison(ring, slot):
        slot.fill_(POISON)
        returned.append(slot.data_ptr())
        give_back(ring, slot)

    monkeypatch.setattr(BufferRing, "_give_back", poison)
    return returned


def loader_of(store, **feed):
    return RolloutLoader(store, layout="packed", max_tokens=64, feed=Feed(**feed))


def clones(loader):
    """Copies in memory of their own, made while each batch is at hand."""
    return [collate_again(batch) for batch in loader]


def collate_again(batch):
    return torch.utils._pytree.tree_map(torch.clone, batch)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_no_batch_changes_while_it_is_held(store, poisoned, prefetch):
    truth = clones(loader_of(store, prefetch=0))
    poisoned.clear()
    held = None
    for number, batch in enumerate(loader_of(store, prefetch=prefetch)):
        assert same_bits(batch, truth[number])
        assert held is None or same_bits(held, truth[number - 1])
        held = batch
    # The check can fail: buffers did come back, and were used again.
    assert len(poisoned) > len(set(poisoned)) > 1


def test_batches_that_are_kept_stay_whole(store, poisoned):
    truth = clones(loader_of(store, prefetch=0))
    poisoned.clear()
    kept = list(loader_of(store, prefetch=2))
    gc.collect()
    assert poisoned == []
    assert all(same_bits(a, b) for a, b in zip(kept, truth, strict=True))


def test_one_tensor_of_a_batch_keeps_its_buffer(store, poisoned):
    batches = iter(loader_of(store, prefetch=0))
    batch = next(batches)
    mask, expected = batch.loss_mask, batch.loss_mask.clone()
    row = batch.input_ids[0, 2:5].numpy()
    ids = row.copy()
    del batch
    list(batches)
    assert torch.equal(mask, expected)
    del mask
    assert (row == ids).all()
    count = len(poisoned)
    del row
    assert len(poisoned) == count + 1


def test_a_loop_needs_as_many_buffers_as_are_made_ahead_and_held(store, monkeypatch):
    made = []
    take = BufferRing._take

    def counted(ring, num_bytes):
        slot = take(ring, num_bytes)
        made.append(slot.data_ptr())
        return slot

    monkeypatch.setattr(BufferRing, "_take", counted)
    for _ in range(3):
        for batch in loader_of(store, prefetch=0):
            del batch
    assert len(made) > 30
    # Each pass has a ring of its own, which grows to its largest batch; then few are used again and again.
    assert len(set(made)) <= len(made) // 2


def test_a_buffer_is_at_least_as_large_as_asked_and_starts_aligned():
    ring = BufferRing(num_spare=2, pinned=False)
    for num_bytes in (10, 1000, 500, 2000):
        buffer = ring.allocate(num_bytes)
        assert buffer.dtype == torch.uint8
        assert len(buffer) >= num_bytes
        assert buffer.storage_offset() == 0
        del buffer


def test_only_so_many_spare_buffers_are_kept():
    ring = BufferRing(num_spare=2, pinned=False)
    held = [ring.allocate(100) for _ in range(5)]
    held.clear()
    assert len(ring._spare) == 2


def test_what_a_buffer_held_before_is_in_no_batch():
    def rubbish(num_bytes):
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    for layout in ("padded", "packed"):
        clean = collate(SAMPLES[:7], layout=layout)
        dirty = collate(SAMPLES[:7], layout=layout, allocate=rubbish)
        assert same_bits(clean, dirty)


def test_the_whole_batch_is_one_buffer(store):
    for batch in islice(loader_of(store), 3):
        assert batch.buffer is not None
        storages = {leaf.untyped_storage().data_ptr() for leaf in torch.utils._pytree.tree_leaves(batch)}
        assert storages == {batch.buffer.untyped_storage().data_ptr()}


def test_a_device_gets_each_batch(store):
    batch = next(iter(loader_of(store, device="cpu")))
    assert batch.input_ids.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gets_each_batch_in_one_copy(store, poisoned):
    truth = clones(loader_of(store, prefetch=0))
    held = []
    for number, batch in enumerate(loader_of(store, prefetch=2, device="cuda")):
        assert batch.buffer.is_cuda
        held.append((number, batch))
    for number, batch in held:
        assert same_bits(batch.to("cpu"), truth[number])
