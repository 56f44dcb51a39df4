"""Batches as arrays: every fault by hand and by its corruption; what collate makes is silent."""

from dataclasses import replace

import numpy as np
import pytest
from builders import sample

from rlbatch.batch import Batch
from rlbatch.collate import Padding, collate
from rlbatch.errors import RecordError, SoundnessError
from rlbatch.faults import LAYOUT_FAULTS
from rlbatch.records import LayoutArrays
from rlbatch.soundness import check_sound_layout, require_sound_layout


def arrays_of(batch: Batch) -> LayoutArrays:
    """A collated batch as arrays, with its own counts."""
    return LayoutArrays(
        input_ids=batch.input_ids.numpy(),
        loss_mask=batch.loss_mask.numpy(),
        align="target",
        position_ids=batch.position_ids.numpy(),
        attention_mask=None if batch.attention_mask is None else batch.attention_mask.numpy(),
        cu_seqlens=None if batch.cu_seqlens is None else batch.cu_seqlens.numpy(),
        max_seqlen=batch.max_seqlen,
        inference_logprobs=batch.inference_logprobs.numpy().reshape(-1),
        sequence_num_loss_tokens=np.array(batch.sequence_num_loss_tokens),
        normalizer=batch.num_loss_tokens,
    )


def packed(lengths, **changes):
    """Sequences of these lengths, all of them trained as far as they can be."""
    bounds = np.cumsum([0, *lengths])
    mask = np.ones((1, bounds[-1]), bool)
    mask[0, bounds[1:] - 1] = False
    fields = {
        "input_ids": np.arange(10, 10 + bounds[-1])[None],
        "loss_mask": mask,
        "align": "target",
        "position_ids": np.concatenate([np.arange(length) for length in lengths])[None],
        "cu_seqlens": bounds.astype(np.int32),
        "max_seqlen": max(lengths),
    }
    return LayoutArrays(**fields | changes)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    return [
        sample([1, 5, 6][: 1 + i % 3], rng.integers(9, 99, n).tolist(), [-0.5] * n, trajectory_id=f"t{i}")
        for i, n in enumerate([7, 4, 12, 1, 9, 3])
    ]


def clean_for(code, samples):
    """Arrays that offer a place for the fault, and the parallel sizes that show it."""
    side = "left" if code == "positions-count-padding" else "right"
    layout = "padded" if code == "positions-count-padding" else "packed"
    clean = arrays_of(collate(samples, layout=layout, padding=Padding(side=side)))
    if code == "boundary-trained":
        mask = np.roll(clean.loss_mask, 1)
        return replace(clean, loss_mask=mask, align="input"), {}
    if code == "padding-too-short":
        return packed([8, 16, 24, 8]), {"context_parallel": 2, "tensor_parallel": 2}
    return clean, {}


def codes(arrays, **sizes):
    return [found.code for found in check_sound_layout(arrays, **sizes)]


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_collate_makes_is_sound(samples, layout, side):
    arrays = arrays_of(collate(samples, layout=layout, padding=Padding(side=side)))
    assert check_sound_layout(arrays) == ()
    assert require_sound_layout(arrays) is arrays


@pytest.mark.parametrize("row_multiple", [1, 64])
def test_what_collate_makes_for_parallel_ranks_is_sound(samples, row_multiple):
    padding = Padding(sequence_multiple=8, row_multiple=row_multiple)
    arrays = arrays_of(collate(samples, layout="packed", padding=padding))
    assert check_sound_layout(arrays, context_parallel=2, tensor_parallel=2) == ()
    (found,) = check_sound_layout(replace(arrays, sequence_num_loss_tokens=np.array([8, 4])))
    assert found.code == "length-field-mismatch"


@pytest.mark.parametrize("code", LAYOUT_FAULTS)
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_a_planted_fault_is_named_and_nothing_else_is_said(samples, code, share):
    clean, sizes = clean_for(code, samples)
    assert codes(clean, **sizes) == []
    for seed in range(4):
        planted = LAYOUT_FAULTS[code].plant(clean, np.random.default_rng(seed), share=share)
        assert set(codes(planted, **sizes)) == {code}


@pytest.mark.parametrize("code", LAYOUT_FAULTS)
def test_planting_leaves_the_original_alone(samples, code):
    clean, _ = clean_for(code, samples)
    before = {name: np.copy(getattr(clean, name)) for name in ("input_ids", "loss_mask", "position_ids")}
    LAYOUT_FAULTS[code].plant(clean, np.random.default_rng(0))
    assert all(np.array_equal(getattr(clean, name), value) for name, value in before.items())


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ([0, 4, 8], "from 0 to 8"),
        ([1, 4, 7], "from 1 to 7"),
        ([0, 4, 4, 7], "4 after 4"),
        ([0, 5, 4, 7], "4 after 5"),
    ],
)
def test_boundaries_that_are_none(bounds, said):
    (found,) = check_sound_layout(packed([4, 3], cu_seqlens=np.array(bounds, np.int32), max_seqlen=None))
    assert found.code == "boundary-invalid"
    assert found.found == said


def test_max_seqlen_of_another_batch():
    (found,) = check_sound_layout(packed([4, 3], max_seqlen=3))
    assert (found.code, found.expected) == ("boundary-invalid", "max_seqlen 4, the longest sequence")


def test_two_sequences_between_two_boundaries():
    arrays = packed([4, 3, 5], cu_seqlens=np.array([0, 4, 12], np.int32), max_seqlen=8)
    (found,) = check_sound_layout(arrays)
    assert (found.code, found.where.sample, found.where.start) == ("boundary-invalid", 1, 3)
    assert found.found == "position 0 after 2"


def test_padding_behind_a_sequence_may_begin_anew():
    mask = np.array([[1, 1, 0, 0, 1, 0, 0, 0]], bool)
    positions = np.array([[0, 1, 2, 0, 0, 1, 0, 1]])
    arrays = packed([4, 4], loss_mask=mask, position_ids=positions)
    assert codes(arrays, context_parallel=2) == []


def test_lengths_are_of_sequences_and_padding_behind_them_has_none():
    # Two sequences and a piece of padding; whoever counts the trained tokens counts 3 and 2, or 3, 2 and 0.
    mask = np.array([[1, 1, 1, 0, 1, 1, 0, 0, 0]], bool)
    for said, expected in (
        ([3, 2], []),
        ([3, 2, 0], []),
        ([3], ["length-field-mismatch"]),
        ([3, 2, 0, 0], ["length-field-mismatch"]),
        ([3, 3], ["length-field-mismatch"]),
    ):
        arrays = packed([4, 3, 2], loss_mask=mask, sequence_num_loss_tokens=np.array(said))
        assert codes(arrays) == expected, said


def test_a_micro_batch_is_divided_by_the_total_of_its_step():
    # 3 + 2 of 12 trained tokens are in this batch.
    assert codes(packed([4, 3], normalizer=12, step_num_loss_tokens=12)) == []
    assert codes(packed([4, 3], normalizer=5)) == []
    (found,) = check_sound_layout(packed([4, 3], normalizer=5, step_num_loss_tokens=12))
    assert (found.code, found.severity) == ("normalizer-mismatch", "error")
    assert found.expected == "12, the trained tokens of the step"
    assert found.found == "5, the trained tokens of this micro-batch alone"


def test_a_total_that_nobody_told_of_is_asked_for():
    (found,) = check_sound_layout(packed([4, 3], normalizer=12))
    assert (found.expected, found.found) == ("5, the trained tokens", "12")
    assert found.likely.startswith("the batch is a part of a step, whose total was not given")
    assert "LayoutArrays.step_num_loss_tokens" in found.fix


def test_a_step_has_no_fewer_trained_tokens_than_its_batch():
    (found,) = check_sound_layout(packed([4, 3], normalizer=4, step_num_loss_tokens=4))
    assert (found.code, found.found) == ("normalizer-mismatch", "step_num_loss_tokens 4")


def test_a_normalizer_planted_into_a_part_of_a_step_is_found():
    clean = packed([4, 3], normalizer=12, step_num_loss_tokens=12)
    spoilt = LAYOUT_FAULTS["normalizer-mismatch"].plant(clean, np.random.default_rng(0))
    (found,) = check_sound_layout(spoilt)
    assert found.found == "7, the number of all positions, padding too"
    trained = LAYOUT_FAULTS["boundary-target"].plant(clean, np.random.default_rng(0))
    assert set(codes(trained)) == {"boundary-target"}


def test_errors_are_raised_and_arguments_are_checked():
    with pytest.raises(SoundnessError, match=r"\[boundary-invalid\]"):
        require_sound_layout(packed([4, 3], max_seqlen=3))
    with pytest.raises(RecordError, match="context_parallel: expected an int >= 1, found 0"):
        check_sound_layout(packed([4]), context_parallel=0)
    with pytest.raises(RecordError, match="expected LayoutArrays, found dict"):
        check_sound_layout({})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss_mask": np.ones((1, 6), bool)}, r"loss_mask: expected shape \[1, 7\], found \[1, 6\]"),
        ({"loss_mask": np.ones((1, 7))}, "loss_mask: expected bool, found float64"),
        ({"loss_mask": [[True] * 7]}, "loss_mask: expected a numpy array, found list"),
        ({"input_ids": np.arange(7)}, "input_ids: expected 2 dimensions"),
        ({"input_ids": np.zeros((0, 7), int)}, "expected at least one position"),
        ({"cu_seqlens": np.array([0], np.int32)}, "expected at least two boundaries"),
        ({"align": "left"}, "align: expected one of input, target"),
        ({"normalizer": "4"}, "normalizer"),
        ({"step_num_loss_tokens": 4.5}, "step_num_loss_tokens"),
        ({"max_seqlen": 4.0}, "max_seqlen"),
    ],
)
def test_arrays_of_another_structure_are_refused(changes, said):
    with pytest.raises(RecordError, match=said):
        packed([4, 3], **changes)
