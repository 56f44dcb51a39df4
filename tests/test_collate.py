"""The one shift, worked by hand; and padded, packed and one-at-a-time say the same."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import provenance, sample, trajectory, turn
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbatch.assemble import to_samples
from rlbatch.batch import NO_TARGET
from rlbatch.collate import collate
from rlbatch.errors import RecordError
from rlbatch.records import TOKEN_FIELDS, Origin, SamplingParams, Segment, VersionSpan

NAN = float("nan")
TARGET_FIELDS = [spec.name for spec in TOKEN_FIELDS if spec.align == "target" and spec.name != "turn"]


def two_samples():
    spans = (VersionSpan(label="4", start=0, stop=2),)
    a = sample([1, 5], [7, 2], [-0.25, -0.5], policy_versions=spans, trajectory_id="a", advantage=2.0)
    b = sample([1], [8], [-0.75], trajectory_id="b", advantage=-1.0)
    return [a, b]


def eq(tensor, rows):
    torch.testing.assert_close(tensor, torch.tensor(rows, dtype=tensor.dtype), equal_nan=True, rtol=0, atol=0)


def test_padded_by_hand():
    batch = collate(two_samples(), layout="padded", pad_token_id=9)
    eq(batch.input_ids, [[1, 5, 7, 2], [1, 8, 9, 9]])
    eq(batch.target_ids, [[5, 7, 2, NO_TARGET], [8, NO_TARGET, NO_TARGET, NO_TARGET]])
    eq(batch.position_ids, [[0, 1, 2, 3], [0, 1, 0, 1]])
    eq(batch.attention_mask, [[True] * 4, [True, True, False, False]])
    eq(batch.inference_logprobs, [[NAN, -0.25, -0.5, NAN], [-0.75, NAN, NAN, NAN]])
    eq(batch.loss_mask, [[False, True, True, False], [True, False, False, False]])
    eq(batch.advantages, [[0, 2, 2, 0], [-1, 0, 0, 0]])
    eq(batch.temperature, [[1.0] * 4, [1.0] * 4])
    eq(batch.policy_version, [[-1, 4, 4, -1], [-1, -1, -1, -1]])
    eq(batch.segments, [[0, 1, 3, 0], [1, 0, 1, 0]])
    assert batch.segment_versions == (4, -1)
    assert (batch.cu_seqlens, batch.max_seqlen, batch.layout) == (None, None, "padded")
    assert (batch.num_loss_tokens, batch.sequence_num_loss_tokens, batch.num_trajectories) == (3, (2, 1), 2)


def test_padded_on_the_left_by_hand():
    batch = collate(two_samples(), layout="padded", padding_side="left")
    eq(batch.input_ids, [[1, 5, 7, 2], [0, 0, 1, 8]])
    eq(batch.target_ids, [[5, 7, 2, NO_TARGET], [NO_TARGET, NO_TARGET, 8, NO_TARGET]])
    eq(batch.position_ids, [[0, 1, 2, 3], [0, 1, 0, 1]])
    eq(batch.attention_mask, [[True] * 4, [False, False, True, True]])
    eq(batch.inference_logprobs, [[NAN, -0.25, -0.5, NAN], [NAN, NAN, -0.75, NAN]])
    eq(batch.segments, [[0, 1, 3, 0], [1, 2, 3, 0]])
    assert batch.tokens_of(batch.host_segments[1]) == (1, 2)


def test_packed_by_hand():
    batch = collate(two_samples(), layout="packed")
    eq(batch.input_ids, [[1, 5, 7, 2, 1, 8]])
    eq(batch.target_ids, [[5, 7, 2, NO_TARGET, 8, NO_TARGET]])
    eq(batch.position_ids, [[0, 1, 2, 3, 0, 1]])
    eq(batch.inference_logprobs, [[NAN, -0.25, -0.5, NAN, -0.75, NAN]])
    eq(batch.loss_mask, [[False, True, True, False, True, False]])
    eq(batch.cu_seqlens, [0, 4, 6])
    eq(batch.segments, [[0, 1, 3, 0], [0, 4, 5, 0]])
    assert (batch.attention_mask, batch.max_seqlen, batch.layout) == (None, 4, "packed")
    assert [batch.ref_of(segment).trajectory_id for segment in batch.host_segments] == ["a", "b"]
    assert [batch.tokens_of(segment) for segment in batch.host_segments] == [(2, 4), (1, 2)]


def test_the_last_position_of_every_sequence_has_no_target_and_no_loss():
    for layout in ("padded", "packed"):
        batch = collate([replace(s, loss_mask=np.ones(len(s), bool)) for s in two_samples()], layout=layout)
        assert not batch.loss_mask[batch.target_ids == NO_TARGET].any()


def test_optional_fields_are_none_where_absent_and_nan_for_samples_without():
    a, b = two_samples()
    assert collate([a, b], layout="packed").ref_logprobs is None
    with_ref = replace(a, ref_logprobs=np.float32([NAN, NAN, -1.0, -2.0]))
    eq(collate([with_ref, b], layout="packed").ref_logprobs, [[NAN, -1.0, -2.0, NAN, NAN, NAN]])


def test_an_audit_compares_raw_values_at_temperature_one_and_training_does_not():
    raw = provenance(logprobs_mode="raw", sampling=SamplingParams(temperature=0.5))
    made = [sample([1, 5], [7, 2], [-0.25, -0.5], provenance=raw)]
    audit, train = (collate(made, layout="padded", purpose=purpose) for purpose in ("audit", "train"))
    eq(audit.inference_logprobs, [[NAN, -0.25, -0.5, NAN]])
    eq(audit.temperature, [[1.0] * 4])
    eq(train.inference_logprobs, [[NAN] * 4])
    eq(train.temperature, [[1.0, 0.5, 0.5, 1.0]])
    unknown = provenance(logprobs_mode="unknown", sampling=SamplingParams(temperature=0.5))
    eq(
        collate(
            [sample([1], [7], [-1.0], provenance=unknown)], layout="padded", purpose="audit"
        ).inference_logprobs,
        [[NAN, NAN]],
    )


def test_a_batch_never_mixes_raw_and_processed_turns():
    raw = provenance(logprobs_mode="raw")
    with pytest.raises(RecordError, match="one logprobs_mode, found processed and raw"):
        collate([sample([1], [7], [-1.0]), sample([1], [7], [-1.0], provenance=raw)], layout="packed")


def test_turns_keep_their_own_segments_even_where_nothing_lies_between():
    first, second = turn([1], [5, 6], [-1.0, -2.0]), turn([1, 5, 6], [7], [-3.0])
    batch = collate(to_samples(trajectory(first, second)), layout="packed")
    assert batch.host_segments == (
        Segment(row=0, start=0, stop=2, turn=0),
        Segment(row=0, start=2, stop=3, turn=1),
    )


def test_a_segment_of_several_versions_has_none():
    spans = (VersionSpan(label="1", start=0, stop=1), VersionSpan(label="2", start=1, stop=2))
    batch = collate([sample([1], [7, 8], [-1.0, -2.0], policy_versions=spans)], layout="padded")
    assert batch.segment_versions == (-1,)
    eq(batch.policy_version, [[1, 2, -1]])


def test_origins_name_the_place_and_must_be_one_a_sample():
    origins = [Origin(path="x.safetensors", index=7), Origin(path="x.safetensors", index=9)]
    batch = collate(two_samples(), layout="packed", origins=origins)
    assert [(ref.path, ref.index, ref.sample_id) for ref in batch.refs] == [
        ("x.safetensors", 7, "a:0"),
        ("x.safetensors", 9, "b:0"),
    ]
    with pytest.raises(RecordError, match="expected 2"):
        collate(two_samples(), layout="packed", origins=origins[:1])
    with pytest.raises(RecordError, match="at least one sample"):
        collate([], layout="packed")


@pytest.mark.parametrize(
    "misspelt", [{"layout": "pack"}, {"padding_side": "Left"}, {"purpose": "training"}, {"layout": "Packed"}]
)
def test_a_misspelt_word_is_refused(misspelt):
    with pytest.raises(RecordError, match="expected one of"):
        collate(two_samples(), **{"layout": "padded"} | misspelt)


@pytest.mark.parametrize("samples", [iter(()), [1], 3, {"a": 1}])
def test_what_is_no_sequence_of_samples_is_refused(samples):
    with pytest.raises(RecordError, match="samples"):
        collate(samples, layout="padded")


def test_trajectories_are_counted_once_over_all_batches():
    first, second = turn([1, 5], [3, 7], [-1.0, -1.0]), turn([1, 6], [8], [-1.0])
    samples = to_samples(trajectory(first, second))
    assert len(samples) == 2
    batches = [collate([s], layout="padded") for s in samples]
    assert [batch.num_trajectories for batch in batches] == [1, 0]
    assert [batch.sequence_num_siblings for batch in batches] == [(2,), (2,)]


sequences = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 7)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(sequences, st.integers(0, 2**31 - 1))
def test_padded_packed_and_alone_give_the_same_loss_inputs(shapes, seed):
    rng = np.random.default_rng(seed)
    samples = [
        sample(
            rng.integers(0, 99, p),
            rng.integers(0, 99, c),
            -rng.random(c),
            trajectory_id=f"t{i}",
            advantage=float(rng.normal()),
        )
        for i, (p, c) in enumerate(shapes)
    ]
    alone = [collate([s], layout="padded") for s in samples]
    packed = collate(samples, layout="packed")
    for side in ("left", "right"):
        padded = collate(samples, layout="padded", padding_side=side)
        for row, one in enumerate(alone):
            start = padded.refs[row].token_offset
            in_row = slice(start, start + one.shape[1])
            in_pack = slice(packed.refs[row].token_offset, packed.refs[row].token_offset + one.shape[1])
            for name in ["input_ids", "target_ids", "position_ids", *TARGET_FIELDS]:
                mine = getattr(one, name)
                if mine is None:
                    continue
                for other in (getattr(padded, name)[row, in_row], getattr(packed, name)[0, in_pack]):
                    torch.testing.assert_close(other, mine[0], rtol=0, atol=0, equal_nan=True)
    assert packed.num_loss_tokens == sum(one.num_loss_tokens for one in alone) == int(packed.loss_mask.sum())
