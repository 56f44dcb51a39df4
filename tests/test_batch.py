"""A batch moves as one thing: between devices, through a pytree, a pickle, a DataLoader."""

import dataclasses
import pickle

import pytest
import torch
from builders import sample
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from rlbatch.batch import FIELD_ALIGNMENT, Batch
from rlbatch.collate import collate
from rlbatch.errors import RecordError


def small(layout: str = "packed") -> Batch:
    return collate(
        [sample([1, 5], [7, 2], [-0.25, -0.5]), sample([1], [8], [-0.75])],
        layout=layout,
    )


def test_to_moves_every_tensor_and_nothing_else(device):
    batch = small()
    moved = batch.to(device)
    assert moved.input_ids.device.type == device.type
    for name in ("target_ids", "loss_mask", "segments", "cu_seqlens", "inference_logprobs"):
        assert getattr(moved, name).device.type == device.type
        torch.testing.assert_close(getattr(moved, name).cpu(), getattr(batch, name), equal_nan=True)
    assert moved.host_segments is batch.host_segments


def test_a_batch_is_a_pytree_that_comes_back_whole():
    for layout in ("padded", "packed"):
        batch = small(layout)
        doubled = pytree.tree_map(lambda tensor: tensor * 1, batch)
        assert isinstance(doubled, Batch)
        assert doubled.layout == layout
        torch.testing.assert_close(doubled.input_ids, batch.input_ids)
        assert doubled.refs == batch.refs
        assert all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(batch))


def test_two_batches_of_one_structure_are_trees_of_one_structure():
    summed = pytree.tree_map(lambda a, b: a + b, small(), small())
    torch.testing.assert_close(summed.input_ids, 2 * small().input_ids)


def test_the_table_of_segments_is_the_list_of_segments():
    batch = small("padded")
    rows = [(part.row, part.start, part.stop, part.turn) for part in batch.host_segments]
    assert batch.segments.tolist() == [list(row) for row in rows]
    assert batch.segments.dtype == torch.int32


def test_a_plain_data_loader_takes_samples_and_collate():
    samples = [sample([1], [8, 9], [-0.5, -0.25], trajectory_id=f"t{i}") for i in range(5)]
    batches = list(DataLoader(samples, batch_size=2, collate_fn=lambda part: collate(part, layout="padded")))
    assert [batch.shape for batch in batches] == [(2, 3), (2, 3), (1, 3)]
    assert sum(batch.num_loss_tokens for batch in batches) == 10


def tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    values = {spec.name: getattr(batch, spec.name) for spec in dataclasses.fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def assert_same(a: Batch, b: Batch) -> None:
    mine, others = tensors_of(a), tensors_of(b)
    assert mine.keys() == others.keys()
    for name in mine.keys() - {"buffer"}:
        torch.testing.assert_close(mine[name], others[name], rtol=0, atol=0, equal_nan=True)
    for spec in dataclasses.fields(a):
        if spec.name not in mine:
            assert getattr(a, spec.name) == getattr(b, spec.name), spec.name


def in_one_buffer(batch: Batch) -> bool:
    first, end = batch.buffer.data_ptr(), batch.buffer.data_ptr() + batch.buffer.numel()
    views = [tensor for name, tensor in tensors_of(batch).items() if name != "buffer"]
    return all(
        first <= view.data_ptr() <= view.data_ptr() + view.nbytes <= end
        and (view.data_ptr() - first) % FIELD_ALIGNMENT == 0
        for view in views
    )


def test_all_fields_lie_in_one_buffer_each_at_a_multiple_of_256_bytes():
    for layout in ("padded", "packed"):
        batch = small(layout)
        assert FIELD_ALIGNMENT == 256
        assert in_one_buffer(batch)
        starts = sorted(tensor.data_ptr() for name, tensor in tensors_of(batch).items() if name != "buffer")
        assert len(set(starts)) == len(starts)


class CountedCopies(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_copies += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def test_to_copies_the_buffer_once_and_loose_tensors_each():
    batch = small()
    with CountedCopies() as counted:
        moved = batch.to("meta")
    assert counted.num_copies == 1
    assert moved.input_ids.device.type == moved.buffer.device.type == "meta"
    loose = dataclasses.replace(batch, advantages=batch.advantages * 2)
    with CountedCopies() as counted:
        loose.to("meta")
    assert counted.num_copies == 2


def test_a_tensor_that_was_replaced_is_moved_as_it_is_and_not_as_the_buffer_has_it(device):
    batch = small()
    doubled = dataclasses.replace(batch, advantages=batch.advantages + 3)
    for copied in (doubled.to(device).to("cpu"), pickle.loads(pickle.dumps(doubled))):
        assert_same(copied, doubled)


def test_after_a_map_over_the_tree_the_tensors_are_independent():
    mapped = pytree.tree_map(lambda tensor: tensor.clone(), small())
    assert mapped.buffer is None
    assert_same(mapped.to("cpu"), dataclasses.replace(small(), buffer=None))


def test_pickled_the_buffer_goes_once_and_alone():
    for layout in ("padded", "packed"):
        memory = torch.full((1 << 20,), 7, dtype=torch.uint8)
        batch = collate(
            [sample([1, 5], [7, 2], [-0.25, -0.5])], layout=layout, allocate=lambda _, memory=memory: memory
        )
        text = pickle.dumps(batch)
        # Neither the rest of the memory it was cut from, nor the buffer once more for each of its views.
        assert len(text) < batch.buffer.numel() + 8000
        back = pickle.loads(text)
        assert in_one_buffer(back)
        assert_same(back, batch)


@pytest.mark.parametrize("device", [torch.float16, torch.zeros(1), None])
def test_what_is_no_device_is_refused_by_name(device):
    batch = collate([sample([1, 5], [7, 2], [-0.5, -0.25])], layout="packed")
    with pytest.raises(RecordError, match=r"Batch\.to: expected a device, found"):
        batch.to(device)
