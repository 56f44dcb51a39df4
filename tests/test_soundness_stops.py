"""BOS, EOS, precision and vocabulary limits: each by hand, with its clean twin."""

from dataclasses import replace

import numpy as np
import pytest
from builders import provenance, sample, trajectory
from builders import turn as built_turn

from rlbatch.assemble import to_samples
from rlbatch.soundness import check_sound, check_sound_trajectory

HOW = provenance(bos_token_id=1, eos_token_ids=(2, 4))


def told(*samples, **changes):
    found = check_sound(samples, purpose="train", **changes)
    return [(each.code, each.where.sample, each.where.start, each.where.stop) for each in found]


def made(prompt, ids, name="t0", finish="stop", how=HOW, stop=None):
    said = {"finish_reason": finish, "stop_reason": stop, "trajectory_id": name}
    return sample(prompt, ids, [-0.3] * len(ids), provenance=how, **said)


def turn(prompt, ids, how):
    return built_turn(prompt, ids, [-0.3] * len(ids), provenance=how, finish_reason="stop")


def test_bos_once_is_sound():
    assert told(made([1, 5, 6], [7, 2])) == []
    assert told(made([1], [7, 2])) == []


def test_bos_twice_and_three_times():
    assert told(made([1, 5], [7, 2], "a"), made([1, 1, 5], [7, 2], "b")) == [("bos-doubled", 1, 0, 2)]
    assert told(made([1, 1, 1], [7, 2])) == [("bos-doubled", 0, 0, 3)]


def test_bos_missing():
    (found,) = check_sound([made([1, 5], [7, 2], "a"), made([5, 6], [7, 2], "b")], purpose="train")
    assert (found.code, found.where.sample, found.where.start) == ("bos-missing", 1, 0)
    assert (found.expected, found.found) == ("a prompt that begins with BOS, id 1", "id 5 at token 0")


def test_a_model_without_bos_is_not_asked_for_one():
    plain = provenance(eos_token_ids=(2,))
    assert told(made([5, 6], [7, 2], how=plain), made([1, 1], [8, 2], "b", how=plain)) == []


def test_a_sample_begins_as_its_first_turn_says():
    # The second turn came from a server whose tokenizer begins with 3; its prompt is what was there before.
    other = replace(HOW, bos_token_id=3)
    turns = {how: turn([1, 5], [7, 2], how) for how in (HOW, other)}
    for first, second, expected in ((HOW, other, []), (other, HOW, [("bos-missing", 0, 0, 1)])):
        (joined,) = to_samples(trajectory(turns[first], turn([1, 5, 7, 2, 9], [8, 2], second)))
        assert told(joined) == expected


def untrained(sample, *tokens):
    mask = sample.loss_mask.copy()
    mask[list(tokens)] = False
    return replace(sample, loss_mask=mask)


def test_a_stop_token_alone_is_left_untrained():
    whole = made([1, 5], [7, 8, 2])
    assert told(whole) == []
    assert told(untrained(whole, 4)) == [("mask-drops-eos", 0, 4, 5)]
    assert told(untrained(made([1, 5], [7, 8, 4]), 4)) == [("mask-drops-eos", 0, 4, 5)]


def test_a_turn_or_a_tail_that_is_left_untrained_on_purpose_is_sound():
    others = made([1, 5], [9, 2], "other")
    assert told(untrained(made([1, 5], [7, 8, 2]), 2, 3, 4), others) == []
    assert told(untrained(made([1, 5], [7, 8, 2]), 3, 4), others) == []
    assert told(untrained(made([1, 5], [7, 8, 9], finish="length"), 4), others) == []
    # A turn of nothing but its stop token: what is before it, and trained, is of another turn.
    (joined,) = to_samples(trajectory(turn([1, 5], [7, 2], HOW), turn([1, 5, 7, 2], [2], HOW)))
    assert told(untrained(joined, 4), others) == []


def test_tokens_after_a_stop_token():
    assert told(made([1, 5], [7, 2, 8, 9, 2])) == [("stop-overrun", 0, 4, 7)]
    assert told(made([1, 5], [7, 8, 4, 2])) == [("stop-overrun", 0, 5, 6)]


def test_padding_that_was_kept_behind_the_stop_token_is_no_lost_stop_token():
    # As `generate` gives a row that ended before its batch.
    (found,) = check_sound([made([1, 5], [7, 2, 0, 0, 0])], purpose="train")
    assert (found.code, found.severity) == ("stop-overrun", "error")
    assert (found.where.start, found.where.stop) == (4, 7)
    assert found.found == "3 tokens after the stop token at 3, each of them id 0"
    assert "padding" in found.likely
    (said,) = check_sound_trajectory(trajectory(turn([1, 5], [7, 2, 0, 0, 0], HOW)))
    assert (said.code, said.severity, said.found) == (found.code, found.severity, found.found)
    assert (said.where.start, said.where.stop) == (4, 7)


def test_padding_by_the_stop_token_itself_is_named_too():
    (found,) = check_sound([made([1, 5], [7, 2, 2, 2])], purpose="train")
    assert found.found == "2 tokens after the stop token at 3, each of them id 2"
    assert "padding" in found.likely


def test_one_token_or_other_tokens_after_the_stop_token_are_not_called_padding():
    for ids in ([7, 2, 0], [7, 2, 8, 9]):
        (found,) = check_sound([made([1, 5], ids)], purpose="train")
        assert (found.code, found.severity) == ("stop-overrun", "error")
        assert "padding" not in found.likely


def test_an_engine_that_does_not_say_why_leaves_it_a_doubt():
    how = replace(HOW, engine="other")
    (found,) = check_sound([made([1, 5], [7, 2, 0, 0], how=how)], purpose="train")
    assert (found.code, found.severity) == ("stop-overrun", "warning")
    (said,) = check_sound_trajectory(trajectory(turn([1, 5], [7, 2, 0, 0], how)))
    assert (said.code, said.severity) == ("stop-overrun", "warning")


def test_another_stop_token_than_the_one_that_stands_earlier_is_lost_all_the_same():
    codes = [each[0] for each in told(made([1, 5], [7, 2, 8], stop=4))]
    assert codes == ["stop-overrun", "finish-mismatch"]
    assert [each[0] for each in told(made([1, 5], [7, 9, 8], stop=9))] == ["finish-mismatch"]
    assert told(made([1, 5], [7, 4, 8], stop=4)) == [("stop-overrun", 0, 4, 5)]


def test_where_the_last_is_no_stop_token_a_stop_string_may_have_ended_the_turn():
    (found,) = check_sound([made([1, 5], [7, 2, 8, 9], stop="x")], purpose="train")
    assert (found.code, found.severity, found.where.start) == ("stop-overrun", "warning", 4)


def test_tokens_after_a_stop_token_that_did_not_end_the_turn_are_ignore_eos():
    assert told(made([1, 5], [7, 2, 8, 9, 2], finish="length")) == []
    assert told(made([1, 5], [7, 2, 8, 9, 2], finish=None)) == []


def test_stop_ids_are_those_of_the_turns_own_provenance():
    other = replace(HOW, eos_token_ids=(9,))
    assert told(made([1, 5], [7, 9, 8, 2], "a"), made([1, 5], [7, 2, 8, 9], "b", how=other)) == []
    assert told(made([1, 5], [7, 2], "a"), made([1, 5], [7, 2], "b", how=other)) == [
        ("finish-mismatch", 1, 3, 4)
    ]
    assert told(made([1, 5], [7, 2, 8, 2], "a"), made([1, 5], [7, 9, 8, 9], "b", how=other)) == [
        ("stop-overrun", 0, 4, 6),
        ("stop-overrun", 1, 4, 6),
    ]


@pytest.mark.parametrize(
    ("ids", "finish", "stop", "expected"),
    [
        ([7, 2], "stop", None, []),
        ([7, 4], "stop", 4, []),
        ([7, 8], "stop", None, ["error"]),
        ([7, 2], "stop", 4, ["error"]),
        ([7, 9], "stop", 9, []),
        ([7, 8], "stop", "x", []),
        ([7, 8], "length", None, []),
        ([7, 8], "abort", None, []),
        ([7, 8], None, None, []),
    ],
)
def test_a_turn_that_stopped_ends_with_what_stopped_it(ids, finish, stop, expected):
    found = check_sound([made([1, 5], ids, finish=finish, stop=stop)], purpose="train")
    assert [(each.code, each.severity) for each in found] == [("finish-mismatch", each) for each in expected]
    assert all((each.where.turn, each.where.start, each.where.stop) == (0, 3, 4) for each in found)


def test_the_end_of_an_earlier_turn_is_looked_at_too():
    first, second = turn([1, 5], [7, 8], HOW), turn([1, 5, 7, 8, 2, 6], [9, 2], HOW)
    # The template put the stop token in that the engine's list has lost.
    (both,) = to_samples(trajectory(first, second))
    assert told(both) == [("finish-mismatch", 0, 3, 4)]
    assert told(untrained(both, 2, 3)) == []


def test_a_turn_with_a_hole_ends_with_its_last_run():
    whole = made([1, 5], [7, 8, 9, 2])
    turns = whole.turn.copy()
    turns[3] = -1
    assert told(replace(untrained(whole, 3), turn=turns)) == []


def test_without_what_stopped_a_turn_or_which_ids_do_nothing_is_said_of_its_end():
    lost = made([1, 5], [7, 8])
    assert told(replace(lost, stop_reasons=())) == []
    assert told(replace(lost, finish_reasons=())) == []
    assert told(made([1, 5], [7, 8], how=provenance())) == []
    other = made([1, 5], [7, 8], how=replace(HOW, engine="other"))
    (found,) = check_sound([other], purpose="train")
    assert (found.code, found.severity) == ("finish-mismatch", "warning")


def as_bf16(values):
    return (np.float32(values).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize(("count", "expected"), [(16, ["low-precision-logprobs"]), (15, [])])
def test_sixteen_distinct_bf16_values_are_no_chance(count, expected):
    values = as_bf16(-np.exp(np.linspace(-3, 2, count))).tolist()
    rounded = sample([1, 5], list(range(10, 10 + count)), values)
    assert [each.code for each in check_sound([rounded], purpose="train")] == expected
    one_off = replace(rounded, inference_logprobs=rounded.inference_logprobs * np.float32(1 + 2**-12))
    assert check_sound([one_off], purpose="train") == ()


@pytest.mark.parametrize(("count", "expected"), [(16, ["low-precision-logprobs"]), (15, [])])
def test_sixteen_distinct_fp16_values_are_no_chance(count, expected):
    # Two of them are subnormal in fp16, and none is a bf16 number.
    exact = -np.exp(np.linspace(-11, 2, count))
    values = exact.astype(np.float16).astype(np.float32)
    rounded = sample([1, 5], list(range(10, 10 + count)), values.tolist())
    found = check_sound([rounded], purpose="train")
    assert [each.code for each in found] == expected
    assert all(each.found == "16 distinct values, each an fp16 number" for each in found)
    one_off = sample([1, 5], list(range(10, 10 + count)), exact.tolist())
    assert check_sound([one_off], purpose="train") == ()


def test_values_of_bf16_are_not_called_fp16():
    # 7 bits and exponents beyond fp16's 5 are bf16's own; both grids hold 0.5.
    rounded = sample([1, 5], list(range(10, 26)), as_bf16(-np.exp(np.linspace(-30, 2, 16))).tolist())
    (found,) = check_sound([rounded], purpose="train")
    assert found.found == "16 distinct values, each a bf16 number"


def test_a_value_off_the_grid_behind_sixteen_on_it_is_enough_to_tell():
    values = [*as_bf16(-np.exp(np.linspace(-3, 2, 16))).tolist(), -0.1]
    assert check_sound([sample([1, 5], list(range(10, 27)), values)], purpose="train") == ()


def test_round_numbers_that_repeat_are_no_rounding():
    assert check_sound([sample([1, 5], [7] * 60, [-0.5, 0.0, -0.25, -1.0] * 15)], purpose="train") == ()


def test_an_id_says_which_limit_it_is_beyond():
    how = provenance(vocab_size=100)
    (slot,) = check_sound([sample([1, 5], [105], [-0.5], provenance=how)], purpose="train", vocab_size=128)
    assert slot.expected == "ids below the vocabulary size 100"
    assert "a slot of the model's 128 rows that no token of the tokenizer has" in slot.found
    (beyond,) = check_sound([sample([1, 5], [128], [-0.5], provenance=how)], purpose="train", vocab_size=128)
    assert "beyond the model's 128 rows, so that it has no embedding" in beyond.found
    assert check_sound([sample([1, 5], [99], [-0.5], provenance=how)], purpose="train", vocab_size=128) == ()
