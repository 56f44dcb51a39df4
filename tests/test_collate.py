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
from rlbatch.collate import Padding, collate, unpack
from rlbatch.errors import RecordError, SoundnessError
from rlbatch.records import TOKEN_FIELDS, Origin, SamplingParams, Segment, VersionSpan, identical

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
    batch = collate(two_samples(), layout="padded", padding=Padding(token_id=9))
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
    batch = collate(two_samples(), layout="padded", padding=Padding(side="left"))
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


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_what_has_no_advantage_is_collated_for_an_audit_only(layout):
    good, forgotten = two_samples()[0], sample([1], [8], [-0.75], trajectory_id="c", advantage=None)
    origins = [Origin(path="a.safetensors", index=at) for at in (3, 7)]
    with pytest.raises(SoundnessError, match=r"set Trajectory\.advantage") as caught:
        collate([good, forgotten], layout=layout, origins=origins)
    (found,) = caught.value.findings
    assert (found.code, found.where.path, found.where.sample) == ("advantage-not-finite", "a.safetensors", 7)
    batch = collate([good, forgotten], layout=layout, purpose="audit")
    assert batch.advantages[batch.loss_mask].isnan().tolist() == [False, False, True]
    # What is not trained needs none.
    untrained = replace(forgotten, loss_mask=np.zeros(2, bool))
    assert collate([good, untrained], layout=layout).num_loss_tokens == 2


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
    made = [sample([1], [7], [-1.0]), sample([1], [7], [-1.0], provenance=raw, trajectory_id="other")]
    origins = [Origin(path="a.safetensors", index=at) for at in (3, 7)]
    for stored, place in ((None, "sample 1"), (origins, r"a\.safetensors sample 7")):
        with pytest.raises(
            RecordError, match=rf"\[modes-mixed\] {place}, trajectory 'other', turn 0\n"
        ) as caught:
            collate(made, layout="packed", origins=stored)
        (found,) = caught.value.findings
        assert found.found == "1 turns with processed and 1 turns with raw logprobs"
        assert "RolloutLoader" in found.fix


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


@pytest.mark.parametrize("misspelt", [{"layout": "pack"}, {"purpose": "training"}, {"layout": "Packed"}])
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


def test_sequences_padded_to_a_multiple_by_hand():
    batch = collate(two_samples(), layout="packed", padding=Padding(sequence_multiple=3, token_id=9))
    # Lengths 4 and 2 in 6 and 3: what context-parallel ranks can cut each of, at cu_seqlens.
    eq(batch.input_ids, [[1, 5, 7, 2, 9, 9, 1, 8, 9]])
    eq(batch.target_ids, [[5, 7, 2, -100, -100, -100, 8, -100, -100]])
    eq(batch.position_ids, [[0, 1, 2, 3, 0, 1, 0, 1, 0]])
    eq(batch.loss_mask, [[False, True, True, False, False, False, True, False, False]])
    eq(batch.inference_logprobs, [[NAN, -0.25, -0.5, NAN, NAN, NAN, -0.75, NAN, NAN]])
    eq(batch.policy_version, [[-1, 4, 4, -1, -1, -1, -1, -1, -1]])
    eq(batch.cu_seqlens, [0, 6, 9])
    assert (batch.max_seqlen, batch.segment_versions) == (6, (4, -1))
    assert [batch.tokens_of(segment) for segment in batch.host_segments] == [(2, 4), (1, 2)]


def test_a_row_padded_to_a_multiple_ends_in_pieces_no_longer_than_the_longest_sequence():
    batch = collate(two_samples(), layout="packed", padding=Padding(row_multiple=16))
    # 6 tokens in 16: 10 of padding, as 4 + 4 + 2.
    eq(batch.cu_seqlens, [0, 4, 6, 10, 14, 16])
    eq(batch.position_ids, [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1]])
    eq(batch.input_ids, [[1, 5, 7, 2, 1, 8] + [0] * 10])
    assert (batch.max_seqlen, len(batch.refs), batch.num_loss_tokens) == (4, 2, 3)
    both = collate(
        two_samples(), layout="packed", padding=Padding(row_multiple=8, sequence_multiple=3)
    ).cu_seqlens
    # Multiples of 3 throughout, and 24 in all, the first multiple of 8 and 3.
    eq(both, [0, 6, 9, 15, 21, 24])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_to_a_multiple(side):
    batch = collate(
        two_samples(), layout="padded", padding=Padding(sequence_multiple=3, row_multiple=2, side=side)
    )
    assert batch.shape == (2, 6)
    assert batch.attention_mask.sum(1).tolist() == [4, 2]
    kept = batch.target_ids[batch.loss_mask]
    assert kept.tolist() == [7, 2, 8]
    eq(batch.position_ids[1], [0, 1, 2, 3, 0, 1] if side == "left" else [0, 1, 0, 1, 2, 3])


@pytest.mark.parametrize(
    "wrong", [{"sequence_multiple": 0}, {"row_multiple": -2}, {"token_id": -1}, {"side": "up"}]
)
def test_padding_that_cannot_be_is_refused(wrong):
    with pytest.raises(RecordError, match="expected"):
        Padding(**wrong)


def test_reused_memory_leaves_no_trace_of_what_it_held():
    clean = [collate(two_samples(), layout=layout) for layout in ("padded", "packed")]
    for byte in (0xFF, 0x01):
        memory = torch.full((1 << 16,), byte, dtype=torch.uint8)
        for layout, expected in zip(("padded", "packed"), clean, strict=True):
            memory.fill_(byte)
            batch = collate(two_samples(), layout=layout, allocate=lambda _, memory=memory: memory)
            assert batch.buffer.data_ptr() == memory.data_ptr()
            for name in ("input_ids", "target_ids", "position_ids", "segments", *TARGET_FIELDS):
                if getattr(expected, name) is not None:
                    eq(getattr(batch, name), getattr(expected, name).tolist())


@pytest.mark.parametrize(
    "memory",
    [
        None,
        torch.empty(10, dtype=torch.uint8),
        torch.empty(1 << 16),
        torch.empty(256, 256, dtype=torch.uint8),
        torch.empty(1 << 16, dtype=torch.uint8)[1:],
        torch.empty(1 << 16, dtype=torch.uint8)[::2],
        torch.empty(1 << 16, dtype=torch.uint8, device="meta"),
    ],
)
def test_memory_that_cannot_hold_the_batch_is_refused(memory):
    with pytest.raises(RecordError, match="allocate: expected a flat"):
        collate(two_samples(), layout="packed", allocate=lambda num_bytes: memory)


def test_a_sample_knows_its_segments_their_versions_and_its_trained_tokens():
    spans = (VersionSpan(label="1", start=0, stop=2), VersionSpan(label="2", start=2, stop=3))
    first = turn([1, 5], [7, 2, 3], [-1.0, -2.0, -3.0], policy_versions=spans)
    later = (VersionSpan(label="2", start=0, stop=1),)
    second = turn([1, 5, 7, 2, 3, 9], [4], [-4.0], policy_versions=later)
    (made,) = to_samples(trajectory(first, second))
    # Tokens 1 5 | 7 2 3 | 9 | 4, of which the third and fourth were drawn by other weights than the fifth.
    assert made.segments == (Segment(0, 2, 5, 0), Segment(0, 6, 7, 1))
    assert made.segment_versions == (-1, 2)
    assert made.num_loss_tokens == 4
    # Token 0 is predicted by nothing, so it is none of those that count.
    everything = replace(made, loss_mask=np.ones(7, bool))
    assert everything.num_loss_tokens == 6


def test_a_filler_that_nobody_sampled_has_no_segments_and_nothing_to_train():
    made = sample([3, 4], [], [])
    batch = collate([made], layout="packed")
    assert (batch.segments.shape, batch.host_segments, batch.num_loss_tokens) == ((0, 4), (), 0)
    eq(batch.target_ids, [[4, NO_TARGET]])
    assert identical(unpack(batch)[0], made)


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
        padded = collate(samples, layout="padded", padding=Padding(side=side))
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


@settings(max_examples=60)
@given(
    sequences,
    st.sampled_from(["packed", "padded"]),
    st.builds(
        Padding,
        side=st.sampled_from(["left", "right"]),
        sequence_multiple=st.integers(1, 5),
        row_multiple=st.integers(1, 7),
    ),
    st.integers(0, 2**31 - 1),
)
def test_unpack_undoes_collate(shapes, layout, padding, seed):
    rng = np.random.default_rng(seed)
    samples = []
    for i, (p, c) in enumerate(shapes):
        made = sample(
            rng.integers(0, 99, p),
            rng.integers(0, 99, c),
            -rng.random(c),
            trajectory_id=f"t{i}",
            group_id="g",
            reward=float(rng.normal()),
            advantage=float(rng.normal()),
            policy_versions=(VersionSpan(label="3", start=0, stop=c),) if c else (),
        )
        values = np.where(made.turn >= 0, -rng.random(p + c), np.nan).astype(np.float32)
        routed = rng.integers(0, 300, (p + c - 1, 3, 2)).astype(np.int32)
        if c and i % 2:
            made = replace(made, teacher_logprobs=values)
        if c and i % 3:
            made = replace(made, routed_experts=routed)
        samples.append(made)
    batch = collate(samples, layout=layout, padding=padding)
    assert batch.shape[1] == padding.row_tokens([len(s) for s in samples], layout)
    back = unpack(batch)
    assert [identical(a, b) for a, b in zip(back, samples, strict=True)] == [True] * len(samples)
    if layout == "packed":
        lengths = batch.cu_seqlens.diff()
        assert all(length % padding.sequence_multiple == 0 for length in lengths)
        assert batch.cu_seqlens[-1] == batch.shape[1]
        assert lengths.max() == batch.max_seqlen
