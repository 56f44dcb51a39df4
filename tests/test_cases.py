"""Faults that people reported in public, as small inputs with the right answer; and their clean twins.

Each name is that of the report's pattern; the numbers are those of the report where it gives any.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import provenance, sample, trajectory, turn

from rlbatch import parse_response
from rlbatch.alignment import Judge, Limits, measure
from rlbatch.assemble import to_samples
from rlbatch.batch import NO_TARGET
from rlbatch.collate import collate
from rlbatch.errors import ReplyError
from rlbatch.records import LayoutArrays, SamplingParams, Usage, VersionSpan
from rlbatch.soundness import check_sound, check_sound_layout, check_sound_trajectory

PROMPT = [1, 5]


def completions_reply(ids, logprobs):
    choice = {
        "index": 0,
        "text": "",
        "logprobs": {"token_logprobs": logprobs, "tokens": ["x"] * len(logprobs)},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_token_ids": PROMPT,
    }
    usage = {"prompt_tokens": 2, "total_tokens": 2 + len(ids), "completion_tokens": len(ids)}
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], "usage": usage}


def judged(
    rows, trainer_rows, *, layout="padded", trainer_version=None, purpose="train", limits=None, **changes
):
    """Verdict on rows of inference logprobs against the trainer's."""
    samples = [
        sample(PROMPT, list(range(10, 10 + len(row))), row, trajectory_id=f"row{i}", **changes)
        for i, row in enumerate(rows)
    ]
    return judged_samples(
        samples, trainer_rows, layout=layout, trainer_version=trainer_version, purpose=purpose, limits=limits
    )


def judged_samples(
    samples, trainer_rows, *, layout="padded", trainer_version=None, purpose="train", limits=None
):
    batch = collate(samples, layout=layout, purpose=purpose)
    trainer = torch.zeros(batch.shape, dtype=torch.float64)
    for segment, values in zip(batch.host_segments, trainer_rows, strict=True):
        trainer[segment.row, segment.start : segment.stop] = torch.tensor(np.asarray(values, float))
    judge = Judge(trainer_version=trainer_version, limits=limits or Limits())
    judge.add(measure(batch, trainer))
    return judge.verdict()


def told(verdict):
    return [(found.code, found.where.sample) for found in verdict.findings]


def truth(num_tokens, seed=0, low=-5.0):
    return np.random.default_rng(seed).uniform(low, -0.05, num_tokens)


def with_bf16_noise(values, seed=1):
    return np.minimum(values + np.random.default_rng(seed).normal(0, 0.003, len(values)), 0)


LAYOUTS = pytest.mark.parametrize("layout", ["padded", "packed"])


# -- ids and logprobs at the source ----------------------------------------------------------------------


def test_eos_1_ids_that_lost_their_eos_are_a_length_mismatch_at_the_source():
    body = completions_reply([7, 8, 9, 10, 11, 12], [-0.5, -1.0, -0.1, -0.2, -0.3, -0.4, -0.01])
    with pytest.raises(ReplyError) as caught:
        parse_response(body, provenance=provenance())
    assert caught.value.code == "length-mismatch"
    assert "7" in caught.value.findings[0].found
    assert "6" in caught.value.findings[0].found
    assert parse_response(completions_reply([7, 8], [-0.5, -1.0]), provenance=provenance())


@pytest.mark.parametrize(("stop_ids", "ends"), [((2, 11), 2), ((2, 11), 11), ((151645,), 151645)])
def test_eos_2_stop_ids_trimmed_from_the_ids_alone(stop_ids, ends):
    how = provenance(eos_token_ids=stop_ids)
    ids, logprobs = [7, 8, 9, ends], [-0.5, -1.0, -0.1, -0.2]
    assert parse_response(completions_reply(ids, logprobs), provenance=how)
    with pytest.raises(ReplyError) as caught:
        parse_response(completions_reply(ids[:-1], logprobs), provenance=how)
    assert caught.value.code == "length-mismatch"
    assert (
        f"the ids lack the stop token ({' or '.join(map(str, stop_ids))})" in caught.value.findings[0].found
    )
    with pytest.raises(ReplyError) as caught:
        parse_response(completions_reply(ids, logprobs[:-1]), provenance=how)
    assert f"the stop token {ends} at the end of the ids has no logprob" in caught.value.findings[0].found


def test_a_difference_that_equals_the_nulls_says_so():
    with pytest.raises(ReplyError) as caught:
        parse_response(completions_reply([7, 8], [-0.5, None, None, -1.0, None]), provenance=provenance())
    assert caught.value.code == "length-mismatch"
    assert "3 logprobs too many; as many as there are nulls among them" in caught.value.findings[0].found


@LAYOUTS
def test_eos_1_lists_cut_to_one_length_are_shifted(layout):
    values = truth(24)
    others = [truth(24, seed) for seed in (1, 2)]
    verdict = judged([[-0.3, *values[:-1]], *others], [values, *others], layout=layout)
    assert told(verdict) == [("shifted", 0)]
    assert "at lag -1" in verdict.findings[0].found


@LAYOUTS
def test_eos_4_an_eos_put_in_afterwards_with_logprob_zero_is_zero_filled(layout):
    rows = [truth(12, seed) for seed in range(5)]
    trainer = [[*row[:-1], -4.6] for row in rows]
    verdict = judged([[*row[:-1], 0.0] for row in rows], trainer, layout=layout)
    assert told(verdict) == [("zero-filled", index) for index in range(5)]
    assert all((found.where.start, found.where.stop) == (13, 14) for found in verdict.findings)


def test_retok_1_a_padded_tail_is_zero_filled():
    values = truth(10)
    verdict = judged([[*values[:8], 0.0, 0.0]], [values])
    assert told(verdict) == [("zero-filled", 0)]
    assert (verdict.findings[0].where.start, verdict.findings[0].where.stop) == (10, 12)


@LAYOUTS
def test_shift_1_trainer_logprobs_one_slot_left_are_lag_minus_one(layout):
    rows = [truth(32, seed) for seed in range(4)]
    verdict = judged(rows, [np.roll(row, -1) for row in rows], layout=layout)
    assert told(verdict) == [("shifted", index) for index in range(4)]
    assert all("at lag -1" in found.found for found in verdict.findings)


# -- values that stand for nothing -----------------------------------------------------------------------


@pytest.mark.parametrize("at", [[0], [3, 20, 41], [47, 48, 49]])
def test_fill_1_a_buffer_of_zeros_is_zero_filled_at_its_positions(at):
    values = np.full(50, -3.0) - np.arange(50) % 7 * 0.3
    inference = with_bf16_noise(values)
    inference[at] = 0.0
    verdict = judged([inference], [values])
    assert told(verdict) == [("zero-filled", 0)]
    assert (verdict.findings[0].where.start, verdict.findings[0].where.stop) == (2 + at[0], 3 + at[-1])
    assert f"0 at {len(at)} of 50" in verdict.findings[0].found


def test_fill_2_all_zeros_are_zero_filled():
    rows = [truth(64, seed) for seed in (0, 1)]
    assert told(judged([[0.0] * 64] * 2, rows)) == [("zero-filled", 0), ("zero-filled", 1)]


@pytest.mark.parametrize("value", [1.0, 5.0, 123.7])
def test_fill_6_and_num_2_anything_above_zero_is_positive(value):
    bad = sample(PROMPT, [7, 8, 9], [-0.5, value, -0.7])
    assert [found.code for found in check_sound([bad], purpose="train")] == ["logprob-positive"]
    assert told(judged_samples([bad], [[-0.5, -0.6, -0.7]])) == [("logprob-positive", 0)]


def test_sent_1_nan_or_null_is_named_with_its_count():
    with pytest.raises(ReplyError) as caught:
        parse_response(completions_reply([7, 8, 9], [-0.5, None, -0.7]), provenance=provenance())
    assert caught.value.code == "logprob-missing"
    bad = sample(PROMPT, [7, 8, 9], [-0.5, float("nan"), float("nan")])
    (found,) = check_sound([bad], purpose="train")
    assert (found.code, found.where.start) == ("logprob-missing", 3)
    assert "2 of 3 tokens" in found.found


def test_sent_3_a_log_ratio_of_89_is_pointed_out_and_every_metric_stays_finite():
    values = truth(30)
    inference = values.copy()
    inference[11] = values[11] - 89
    verdict = judged([inference], [values])
    assert told(verdict) == [("ratio-tail", 0)]
    assert all(np.isfinite(value) for value in verdict.metrics.values())


# -- turns: counts, templates, images -------------------------------------------------------------------


@pytest.mark.parametrize(("sampled", "lost"), [(20, slice(5, 13)), (20, slice(0, 12)), (6, slice(2, 3))])
def test_retok_3_chunks_that_lost_their_ids_are_fewer_than_usage_counts(sampled, lost):
    ids = np.delete(np.arange(10, 10 + sampled), lost).tolist()
    made = turn(PROMPT, ids, [-0.5] * len(ids), usage=Usage(num_completion_tokens=sampled))
    (found,) = check_sound_trajectory(trajectory(made))
    assert found.code == "usage-mismatch"
    assert found.found == f"{len(ids)} ids: {sampled - len(ids)} missing"
    whole = turn(PROMPT, list(range(sampled)), [-0.5] * sampled, usage=Usage(num_completion_tokens=sampled))
    assert check_sound_trajectory(trajectory(whole)) == ()


OPEN, CLOSE, STOP, NEWLINE = 90, 91, 2, 13


@pytest.mark.parametrize("num_thoughts", [1, 7, 80])
def test_tmpl_1_thinking_stripped_from_the_history(num_thoughts):
    thinking = [OPEN, *range(100, 100 + num_thoughts), CLOSE]
    first = [*thinking, 7, 8, STOP]
    kept = turn([*PROMPT, *first, NEWLINE, 30], [9, STOP], [-0.1] * 2)
    stripped = turn([*PROMPT, 7, 8, STOP, NEWLINE, 30], [9, STOP], [-0.1] * 2)
    start = turn(PROMPT, first, [-0.1] * len(first))
    (found,) = check_sound_trajectory(trajectory(start, stripped))
    assert (found.code, found.where.turn, found.where.start) == ("turn-prefix-broken", 1, 2)
    assert found.found.startswith("stripped thinking: the first 2 tokens agree")
    assert f"tokens 2:{2 + len(thinking)} are left out" in found.found
    assert len(to_samples(trajectory(start, stripped))) == 2
    assert check_sound_trajectory(trajectory(start, kept)) == ()
    assert len(to_samples(trajectory(start, kept))) == 1


@pytest.mark.parametrize("num_turns", [2, 3, 5])
def test_tmpl_2_a_newline_lost_after_every_stop_token(num_turns):
    def rollout(between):
        turns, history = [], list(PROMPT)
        for at in range(num_turns):
            answer = [40 + at, 50 + at, STOP]
            turns.append(turn(history, answer, [-0.1] * 3))
            history = [*history, *answer, *between(at), 60 + at, 61]
        return trajectory(*turns)

    assert check_sound_trajectory(rollout(lambda at: [NEWLINE])) == ()
    turns = rollout(lambda at: [NEWLINE]).turns
    # Each later prompt is rendered anew, and lacks the newline that the earlier ones had.
    prompts = [
        [token for token in made.prompt_token_ids.tolist() if token != NEWLINE]
        if at == len(turns) - 1
        else made.prompt_token_ids.tolist()
        for at, made in enumerate(turns)
    ]
    again = [turn(p, made.completion_token_ids, [-0.1] * 3) for p, made in zip(prompts, turns, strict=True)]
    found = check_sound_trajectory(trajectory(*again))
    if num_turns == 2:
        # Nothing after the stop token was in a prompt before: both are extensions.
        assert found == ()
    else:
        assert [each.code for each in found] == ["turn-prefix-broken"]
        assert found[0].found.startswith("template suffix: the first 5 tokens agree")


@pytest.mark.parametrize("bos", [1, 128000])
def test_tmpl_4_bos_twice_or_not_at_all(bos):
    how = provenance(bos_token_id=bos)
    clean = [sample([bos, 5, 6 + at], [7], [-0.5], provenance=how, trajectory_id=f"{at}") for at in range(4)]
    assert check_sound(clean, purpose="train") == ()
    doubled = sample([bos, bos, 5], [7], [-0.5], provenance=how, trajectory_id="2")
    missing = sample([5, 6], [7], [-0.5], provenance=how, trajectory_id="2")
    for bad, code in ((doubled, "bos-doubled"), (missing, "bos-missing")):
        (found,) = check_sound([*clean[:2], bad, clean[3]], purpose="train")
        assert (found.code, found.where.sample, found.where.start) == (code, 2, 0)


@pytest.mark.parametrize(
    ("num_images", "places", "times"), [(1, 64, 2), (1, 64, 3), (2, 100, 2), (1, 6496, 2)]
)
def test_mm_1_placeholders_expanded_twice(num_images, places, times):
    def prompt(times):
        return [1, *([5, *[151655] * places * times, 6] * num_images), 9]

    said = Usage(num_prompt_tokens=len(prompt(1)))
    clean = turn(prompt(1), [7, 2], [-0.1, -0.2], usage=said)
    assert check_sound_trajectory(trajectory(clean)) == ()
    twice = turn(prompt(times), [7, 2], [-0.1, -0.2], usage=said)
    (found,) = check_sound_trajectory(trajectory(twice))
    assert found.code == "placeholder-count"
    assert f"{places * (times - 1) * num_images} too many" in found.found
    # Never expanded: one placeholder stands where the engine counts all of them.
    once = turn(prompt(1), [7, 2], [-0.1, -0.2], usage=Usage(num_prompt_tokens=len(prompt(2))))
    (found,) = check_sound_trajectory(trajectory(once))
    assert (found.code, f"{places * num_images} missing" in found.found) == ("placeholder-count", True)


# -- another distribution, another vocabulary ------------------------------------------------------------


def test_sem_2_raw_values_at_another_temperature_are_refused_before_any_arithmetic():
    how = provenance(logprobs_mode="raw", sampling=SamplingParams(temperature=0.7))
    made = sample(PROMPT, [7, 8], [-0.5, -1.0], provenance=how)
    (found,) = check_sound([made], purpose="train")
    assert (found.code, found.severity) == ("incomparable", "error")
    assert "raw logprobs of tokens sampled with temperature 0.7" in found.found


def test_vocab_1_an_id_beyond_the_vocabulary_is_named_in_prompt_or_completion():
    for made in (sample([1, 248090], [7], [-0.5]), sample([1, 5], [248090], [-0.5])):
        (found,) = check_sound([made], purpose="train", vocab_size=248077)
        assert found.code == "token-out-of-range"
        assert "248090" in found.found


# -- masks and normalisers -------------------------------------------------------------------------------


def test_mask_1_metrics_are_of_trained_tokens_only():
    first, values = turn(PROMPT, [10, 11, 12], [-1.0, -2.0, -3.0]), [-1.01, -2.01, -3.01]
    plain = to_samples(trajectory(first, turn([*PROMPT, 10, 11, 12], [13], [-1.0])))
    tools = to_samples(trajectory(first, turn([*PROMPT, 10, 11, 12, *[30] * 40], [13], [-1.0])))
    verdicts = [judged_samples(samples, [values, [-1.01]]) for samples in (plain, tools)]
    assert verdicts[0].metrics == verdicts[1].metrics


def test_mask_3_a_live_header_was_never_sampled():
    made = sample([1, 5, 3, 69, 203], [7, 8, 4], [-0.1, -0.2, -0.3])
    mask = made.loss_mask.copy()
    mask[2:5] = True
    (found,) = check_sound([replace(made, loss_mask=mask)], purpose="train")
    assert (found.code, found.where.start, found.where.stop) == ("mask-without-logprob", 2, 5)


@pytest.mark.parametrize("eos", [0, 2, 128001])
def test_pos_4_pad_is_eos_and_every_true_eos_loses_its_loss(eos):
    how = provenance(eos_token_ids=(eos,))
    rows = [
        sample(PROMPT, [7, 8 + at, eos], [-0.5, -0.25, -0.1], provenance=how, trajectory_id=f"{at}")
        for at in range(4)
    ]
    assert check_sound(rows, purpose="train") == ()
    # The mask of "ids that are not pad".
    masked = [replace(made, loss_mask=made.loss_mask & (made.token_ids != eos)) for made in rows]
    found = check_sound(masked, purpose="train")
    assert [(each.code, each.where.sample) for each in found] == [("mask-drops-eos", at) for at in range(4)]
    assert {(each.where.start, each.where.stop) for each in found} == {(4, 5)}
    (found,) = check_sound([*rows[:3], masked[3]], purpose="train")
    assert (found.code, found.where.sample) == ("mask-drops-eos", 3)


@LAYOUTS
def test_row_1_reordering_cannot_part_a_sample_from_what_belongs_to_it(layout):
    rows = [
        sample(
            PROMPT, [10 + at] * (at + 2), [-0.1 * (at + 1)] * (at + 2), trajectory_id=f"t{at}", advantage=at
        )
        for at in range(4)
    ]
    for order in ([3, 1, 0, 2], [1, 0, 3, 2]):
        batch = collate([rows[at] for at in order], layout=layout)
        assert [ref.trajectory_id for ref in batch.refs] == [f"t{at}" for at in order]
        for segment, at in zip(batch.host_segments, order, strict=True):
            span = (segment.row, slice(segment.start, segment.stop))
            assert set(batch.advantages[span].tolist()) == {at}
            assert set(batch.target_ids[span].tolist()) == {10 + at}
            np.testing.assert_allclose(batch.inference_logprobs[span], -0.1 * (at + 1), rtol=1e-6)


def pack(documents, **changes):
    """Documents end to end, as loss_mask values, in target coordinates unless said else."""
    bounds = np.cumsum([0, *map(len, documents)])
    fields = {
        "input_ids": np.arange(bounds[-1])[None] + 10,
        "loss_mask": np.concatenate(documents).astype(bool)[None],
        "align": "target",
        "cu_seqlens": bounds.astype(np.int32),
    }
    return LayoutArrays(**fields | changes)


def layout_told(arrays, **sizes):
    return [(found.code, found.where.sample) for found in check_sound_layout(arrays, **sizes)]


@pytest.mark.parametrize("lengths", [(4, 3), (2, 9, 5), (6, 6, 6, 6)])
def test_pack_3_a_global_roll_leaks_the_next_documents_first_value(lengths):
    # The reported masks, [0,1,1,1] and [1,0,1], in token coordinates; then others of the kind.
    documents = [[0, 1, 1, 1], [1, 0, 1]] if lengths == (4, 3) else [[1] * length for length in lengths]
    rolled = np.roll(np.concatenate(documents), -1)
    cut = np.split(rolled, np.cumsum(lengths)[:-1])
    leaks = [at for at, part in enumerate(cut) if part[-1]]
    assert 0 in leaks
    assert layout_told(pack(cut)) == [("boundary-target", at) for at in leaks]
    shifted = [[*document[1:], 0] for document in documents]
    assert layout_told(pack(shifted)) == []


def test_pack_3_a_first_token_cannot_be_trained():
    (found,) = check_sound_layout(pack([[0, 1, 1, 1], [1, 0, 1]], align="input"))
    assert (found.code, found.where.sample, found.where.start) == ("boundary-trained", 1, 0)


@pytest.mark.parametrize(("lengths", "missing"), [((5, 4, 3), 3), ((2, 2), 2), ((7, 1, 4, 9, 3), 5)])
def test_shift_3_as_many_logprobs_missing_as_sequences_in_the_pack(lengths, missing):
    documents = [[*[1] * (length - 1), 0] for length in lengths]
    values = np.full(sum(lengths), -1.0, np.float32)
    (found,) = check_sound_layout(pack(documents, inference_logprobs=values[missing:]))
    assert found.code == "length-mismatch"
    assert f"a difference of -{missing}; as many are missing as there are sequences" in found.found
    assert layout_told(pack(documents, inference_logprobs=values)) == []
    (other,) = check_sound_layout(pack(documents, inference_logprobs=values[missing + 1 :]))
    assert other.code == "length-mismatch"
    assert "sequences" not in other.found


def left_padded(paddings, width, **changes):
    mask = np.arange(width) >= np.array(paddings)[:, None]
    fields = {
        "input_ids": np.where(mask, 7, 0),
        "loss_mask": mask & (np.arange(width) < width - 1),
        "align": "target",
        "attention_mask": mask,
    }
    return LayoutArrays(**fields | changes)


@pytest.mark.parametrize("paddings", [[3], [0, 2, 5], [1, 1]])
def test_pos_2_positions_that_count_padding(paddings):
    width = 9
    counted = np.broadcast_to(np.arange(width), (len(paddings), width))
    arrays = left_padded(paddings, width, position_ids=counted)
    assert layout_told(arrays) == [
        ("positions-count-padding", row) for row, pad in enumerate(paddings) if pad
    ]
    right = np.maximum(np.cumsum(arrays.attention_mask, axis=1) - 1, 0)
    assert layout_told(left_padded(paddings, width, position_ids=right)) == []


def test_clean_a_left_padded_batch_with_its_attention_mask_and_no_positions():
    assert layout_told(left_padded([3, 0, 6], 9)) == []


@pytest.mark.parametrize(("filler", "sizes"), [(2, (2, 2)), (6, (1, 4)), (12, (4, 2))])
def test_cp_2_a_filler_shorter_than_the_split(filler, sizes):
    told = {"tensor_parallel": sizes[0], "context_parallel": sizes[1]}
    multiple = sizes[0] * sizes[1] * 2
    arrays = pack([[0] * multiple, [0] * filler, [0] * 2 * multiple])
    (found,) = check_sound_layout(arrays, **told)
    assert (found.code, found.where.sample, found.found) == ("padding-too-short", 1, f"{filler} positions")
    assert f"a multiple of {multiple} positions" in found.expected
    assert layout_told(pack([[0] * multiple] * 3), **told) == []


@pytest.mark.parametrize(("parts", "gap"), [((4, 5), 3), ((1, 2), 6), ((3, 3), 1)])
def test_mask_4_a_length_field_that_counts_the_span(parts, gap):
    row = [0, 0, *[1] * parts[0], *[0] * gap, *[1] * parts[1], 0]
    span, live = sum(parts) + gap, sum(parts)
    (found,) = check_sound_layout(pack([[1, 0], row], sequence_num_loss_tokens=np.array([1, span])))
    assert (found.code, found.where.sample) == ("length-field-mismatch", 1)
    assert (found.expected, found.found) == (
        f"{live}, the trained tokens",
        f"{span}, the span from the first to the last of them",
    )
    assert layout_told(pack([[1, 0], row], sequence_num_loss_tokens=np.array([1, live]))) == []


@pytest.mark.parametrize("row", [[1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 0]])
def test_norm_2_masked_tokens_stay_in_the_denominator(row):
    (found,) = check_sound_layout(pack([row], normalizer=len(row)))
    assert found.code == "normalizer-mismatch"
    assert found.expected == f"{sum(row)}, the trained tokens"
    assert found.found.startswith(f"{len(row)}, the number of all ")
    assert layout_told(pack([row], normalizer=sum(row))) == []


@LAYOUTS
def test_pack_3_the_last_slot_of_a_sequence_has_no_target(layout):
    samples = [sample([1, 5], [7], [-0.1]), sample([1], [8, 9], [-0.2, -0.3])]
    samples = [replace(made, loss_mask=np.ones(len(made), bool)) for made in samples]
    batch = collate(samples, layout=layout)
    assert not batch.loss_mask[batch.target_ids == NO_TARGET].any()
    assert int((batch.target_ids == NO_TARGET).sum()) == 2


def test_norm_5_no_live_token_gives_no_nan():
    made = sample(PROMPT, [7, 8], [-0.1, -0.2])
    verdict = judged_samples([replace(made, loss_mask=np.zeros(4, bool))], [[-0.1, -0.2]])
    assert all(np.isfinite(value) for value in verdict.metrics.values())
    assert verdict.judged is False


# -- clean twins: nothing may be raised ------------------------------------------------------------------


@LAYOUTS
def test_clean_a_healthy_batch_with_a_kld_of_0_028(layout):
    rng = np.random.default_rng(0)
    rows = [truth(100, seed) for seed in range(16)]
    trainer = [np.minimum(row + rng.normal(-0.028, 0.24, len(row)), 0) for row in rows]
    verdict = judged(rows, trainer, layout=layout)
    assert verdict.findings == ()
    assert verdict.judged is True
    assert 0.02 < verdict.metrics["rlbatch/inference_kld/mean"] < 0.04


@pytest.mark.parametrize("sampling", [{"top_p": 0.5}, {"top_k": 1}, {"structured_output": True}])
def test_clean_exact_zeros_of_a_kept_set_of_one(sampling):
    how = provenance(sampling=SamplingParams(temperature=1.0, **sampling))
    verdict = judged([[0.0, 0.0, -0.4, 0.0]], [[-0.3, -0.1, -0.9, -0.6]], purpose="audit", provenance=how)
    # Of kept sets the trainer can find its own; of what a grammar leaves it knows nothing.
    assert told(verdict) == ([] if how.keeps_set else [("incomparable", 0)])
    assert all(found.severity == "warning" for found in verdict.findings)


def test_clean_data_several_versions_old():
    rng = np.random.default_rng(0)
    rows = [truth(200, seed) for seed in range(8)]
    trainer = [np.minimum(row + rng.normal(0, 0.6, len(row)), 0) for row in rows]
    spans = (VersionSpan(label="3", start=0, stop=200),)
    verdict = judged(rows, trainer, trainer_version=7, policy_versions=spans)
    assert {found.severity for found in verdict.findings} <= {"warning"}


def test_clean_forced_tokens_whose_probability_is_one():
    verdict = judged([[0.0] * 40], [[-1e-7] * 40])
    assert verdict.findings == ()


def test_clean_a_peaked_row_of_sixteen_tokens_with_bf16_noise():
    rng = np.random.default_rng(0)
    for _ in range(200):
        values = -rng.exponential(0.004, 16)
        values[rng.integers(16)] = -rng.uniform(0.5, 3)
        noisy = np.minimum(values * (1 + rng.normal(0, 0.02, 16)), 0)
        assert judged([noisy], [values]).findings == ()


def test_clean_anything_under_the_mask():
    made = sample(PROMPT, [7, 8, 9, 10], [-0.1, -0.2, -0.3, -0.4])
    mask = made.loss_mask.copy()
    mask[3] = False
    verdicts = []
    for rubbish in (-0.2, float("nan"), 1100.0, -1e10):
        logprobs = made.inference_logprobs.copy()
        logprobs[3] = rubbish
        masked = replace(made, loss_mask=mask, inference_logprobs=logprobs)
        verdicts.append(judged_samples([masked], [[-0.1, rubbish, -0.3, -0.4]]))
    assert all(verdict.findings == () for verdict in verdicts)
    assert all(verdict.metrics == verdicts[0].metrics for verdict in verdicts)


def test_clean_sentinels_among_the_alternatives_that_were_not_sampled(data_dir):
    recording = json.loads(
        (data_dir / "replies/fp32_processed/completions_ids_lp5_t1_topk2.json").read_text()
    )
    assert "-9999.0" in json.dumps(recording["response"])
    how = provenance(sampling=SamplingParams(temperature=1.0, top_k=2))
    (made,) = parse_response(recording["response"], provenance=how)
    assert (made.inference_logprobs > -100).all()
