"""A batch moves as one thing: between devices, through a pytree, through a DataLoader."""

import torch
from builders import sample
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from rlbatch.batch import Batch
from rlbatch.collate import collate


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
