"""Records refuse what cannot be right in structure, and represent every fault of value."""

from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch
from builders import NEUTRAL, provenance, sample, turn

from rlbatch.errors import RecordError
from rlbatch.records import (
    TOKEN_FIELDS,
    Provenance,
    Sample,
    SamplingParams,
    Segment,
    Trajectory,
    Turn,
    Usage,
    VersionSpan,
    identical,
    sampled_segments,
)


def test_the_one_list_of_fields_is_the_sample():
    names = {spec.name for spec in fields(Sample)}
    assert {spec.name for spec in TOKEN_FIELDS} <= names
    made = sample([1, 5], [7, 2], [-0.1, -0.2])
    for spec in TOKEN_FIELDS:
        value = getattr(made, spec.name)
        assert (value is None) if spec.optional else (value.dtype == spec.dtype and len(value) == 4)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("inference_logprobs", np.zeros(3, np.float32), "expected 4 entries"),
        (
            "inference_logprobs",
            np.zeros(4, np.float64),
            r"expected dtype float32.*values\.astype\(np\.float32\)",
        ),
        ("inference_logprobs", [0.0] * 4, "expected a numpy array"),
        ("token_ids", np.zeros((2, 2), np.int32), "expected one dimension"),
        ("token_ids", np.array([1, 5, -7, 2], np.int32), "found -7 at token 2"),
        ("token_ids", np.array([1, 5, 7, 2], np.int64), "expected dtype int32"),
        ("loss_mask", np.ones(4, np.int32), "expected dtype bool"),
        ("teacher_logprobs", np.zeros(5, np.float32), "expected 4 entries"),
        ("turn", np.array([-1, -1, 0, 1], np.int16), "one provenance a turn"),
        ("turn", np.array([-1, -2, 0, 0], np.int16), "one provenance a turn"),
        ("turn", np.array([0, 0, 0, 0], np.int16), "expected token 0 to be of a prompt"),
        ("num_siblings", 0, "0 <= sibling < num_siblings"),
        ("num_siblings", 1 << 63, "0 <= sibling < num_siblings"),
        ("sibling", False, "sibling: expected int"),
        ("sample_id", 7, "sample_id: expected text"),
        ("trajectory_id", None, "trajectory_id: expected text"),
        ("group_id", b"g", "group_id: expected text or None"),
        ("reward", "1", "reward: expected float"),
        ("finish_reasons", (3,), "finish_reasons: expected one of"),
        ("stop_reasons", (2.0,), "stop_reasons: expected a token id, a stop string or None, found float"),
        ("provenances", ("vllm",), "expected Provenance, found str"),
    ],
)
def test_a_sample_whose_structure_cannot_be_right_is_refused(field, value, says):
    with pytest.raises(RecordError, match=says):
        replace(sample([1, 5], [7, 2], [-0.1, -0.2]), **{field: value})


def test_a_sample_can_hold_every_fault_of_value():
    made = sample([1, 5], [7, 2], [-0.1, -0.2])
    odd = np.array([0.0, np.inf, 5.0, np.nan], np.float32)
    assert identical(replace(made, inference_logprobs=odd).inference_logprobs, odd)


def test_a_record_stays_as_it_was_checked():
    ids = np.array([7, 2], np.int32)
    made = replace(turn([1], [7, 2], [-0.1, -0.2]), completion_token_ids=ids)
    ids[0] = -5
    assert made.completion_token_ids.tolist() == [7, 2]


def test_bits_decide_but_for_nan():
    nans = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    assert identical(nans[:1], nans[1:])
    assert identical(float("nan"), -float("nan"))
    assert not identical(0.0, -0.0)
    assert not identical(np.float32([0.0]), np.float32([-0.0]))
    assert not identical(np.float32([1.0]), np.float64([1.0]))


def test_arrays_of_a_record_cannot_be_written():
    made = sample([1, 5], [7, 2], [-0.1, -0.2])
    with pytest.raises(ValueError, match="read-only"):
        made.token_ids[0] = 3
    with pytest.raises(FrozenInstanceError):
        made.reward = 1.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_token_ids": np.array([], np.int32)}, "at least one token"),
        ({"inference_logprobs": np.zeros(3, np.float32)}, "expected 2 entries"),
        ({"completion_token_ids": np.array([7, -1], np.int32)}, "found -1 at token 1"),
        ({"finish_reason": "eos"}, "stop, length, abort, tool_calls"),
        ({"provenance": None}, "expected Provenance"),
        ({"usage": None}, "usage: expected Usage, found NoneType"),
        ({"policy_versions": [("a", 0, 2)]}, "policy_versions: expected VersionSpan, found tuple"),
        ({"policy_versions": 3}, "policy_versions: expected a sequence, found int"),
        ({"stop_reason": 2.0}, "stop_reason: expected a token id, a stop string or None, found float"),
        ({"routed_experts_start": 0.5}, "routed_experts_start: expected int"),
        ({"policy_versions": (VersionSpan(label="1", start=0, stop=3),)}, "within 2 tokens"),
        (
            {
                "policy_versions": (
                    VersionSpan(label="1", start=1, stop=2),
                    VersionSpan(label="2", start=0, stop=1),
                )
            },
            "ordered",
        ),
    ],
)
def test_a_turn_whose_structure_cannot_be_right_is_refused(changes, says):
    with pytest.raises(RecordError, match=says):
        replace(turn([1], [7, 2], [-0.1, -0.2]), **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"label": 5}, "label: expected text, found int"),
        ({"stop": 1.5}, "stop: expected int, found 1.5"),
        ({"start": True}, "start: expected int, found True"),
    ],
)
def test_a_span_of_versions_is_a_label_and_two_integers(changes, says):
    with pytest.raises(RecordError, match=says):
        VersionSpan(**{"label": "a", "start": 0, "stop": 2} | changes)


def test_counts_of_an_engine_are_integers():
    with pytest.raises(RecordError, match=r"Usage\.num_completion_tokens: expected int, found 2\.5"):
        Usage(num_completion_tokens=2.5)


def test_a_turn_keeps_its_spans_as_they_were():
    spans = [VersionSpan(label="a", start=0, stop=2)]
    made = turn([1], [7, 2], [-0.1, -0.2], policy_versions=spans)
    spans.append(VersionSpan(label="b", start=0, stop=2))
    assert made.policy_versions == (VersionSpan(label="a", start=0, stop=2),)


def test_what_others_may_write_under_a_read_only_array_is_copied():
    ids = torch.tensor([7, 2], dtype=torch.int32)
    view = ids.numpy()
    view.flags.writeable = False
    memory = bytearray(np.int32([7, 2]).tobytes())
    buffer = np.frombuffer(memoryview(memory).toreadonly(), np.int32)
    for given, write in ((view, lambda: ids.fill_(55)), (buffer, lambda: memory.__setitem__(0, 55))):
        made = replace(turn([1], [7, 2], [-0.1, -0.2]), completion_token_ids=given)
        write()
        assert made.completion_token_ids.tolist() == [7, 2]


def test_what_nobody_can_write_is_not_copied():
    ids = np.frombuffer(np.int32([7, 2]).tobytes(), np.int32)
    made = replace(turn([1], [7, 2], [-0.1, -0.2]), completion_token_ids=ids)
    assert np.shares_memory(made.completion_token_ids, ids)


def test_a_turn_of_no_tokens_is_legal():
    assert len(turn([1], [], []).completion_token_ids) == 0


@pytest.mark.parametrize("value", [1, np.float64(1), np.float32(1), 1.0])
def test_a_reward_is_kept_as_a_float_whatever_number_it_was(value):
    assert identical(replace(sample([1], [2], [-1.0]), reward=value).reward, 1.0)
    with pytest.raises(RecordError, match="expected float, found True"):
        replace(sample([1], [2], [-1.0]), reward=True)


def test_a_trajectory_needs_turns_and_a_name():
    with pytest.raises(RecordError, match="at least one turn"):
        Trajectory(trajectory_id="a", turns=())
    with pytest.raises(RecordError, match="trajectory_id: expected text"):
        Trajectory(trajectory_id="", turns=(turn([1], [2], [-1.0]),))
    with pytest.raises(RecordError, match="expected Turn, found int"):
        Trajectory(trajectory_id="a", turns=(3,))
    for turns in (turn([1], [2], [-1.0]), None):
        with pytest.raises(RecordError, match="turns: expected a sequence, found"):
            Trajectory(trajectory_id="a", turns=turns)


def test_a_trajectory_has_no_more_turns_than_a_sample_counts():
    one = turn([1], [2], [-1.0])
    assert len(Trajectory(trajectory_id="a", turns=[one] * 2**15).turns) == 2**15
    with pytest.raises(RecordError, match="at least one turn and at most 32768, found 32769"):
        Trajectory(trajectory_id="a", turns=[one] * (2**15 + 1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"advantage": "1"}, "advantage: expected float, found '1'"),
        ({"advantage": 1e40}, "advantage: expected a number that float32 holds"),
        ({"reward": 10**400}, "reward: expected a number that a float holds"),
        ({"group_id": 3}, "group_id: expected text or None"),
    ],
)
def test_the_numbers_of_a_trajectory_are_numbers(changes, says):
    with pytest.raises(RecordError, match=says):
        Trajectory(**{"trajectory_id": "a", "turns": (turn([1], [2], [-1.0]),)} | changes)


def test_scalars_of_numpy_are_kept_as_those_of_python():
    drawn = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(5), bad_words=np.bool_(True))
    assert identical(drawn, SamplingParams(temperature=0.5, top_k=5, bad_words=True))
    how = provenance(vocab_size=np.int64(9), eos_token_ids=np.int32([2, 4]), bos_token_id=np.int32(1))
    assert identical(how, provenance(vocab_size=9, eos_token_ids=(2, 4), bos_token_id=1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "1"}, "temperature: expected float"),
        ({"temperature": True}, "temperature: expected float"),
        ({"temperature": 10**400}, "temperature: expected a number that a float holds"),
        ({"temperature": 1.0, "top_k": -1}, "0 is off"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "top_k": 2.5}, "top_k: expected int"),
        ({"temperature": 1.0, "min_p": float("nan")}, "min_p: expected from 0 to 1"),
        ({"temperature": 1.0, "min_p": -1}, "min_p"),
        ({"temperature": 1.0, "min_tokens": -3}, "min_tokens: expected >= 0"),
        ({"temperature": 1.0, "repetition_penalty": 0}, "repetition_penalty"),
        ({"temperature": 1.0, "presence_penalty": float("inf")}, "presence_penalty"),
        ({"temperature": 1.0, "logit_bias": 1}, "logit_bias: expected bool"),
    ],
)
def test_sampling_params_are_of_the_right_kind(changes, says):
    with pytest.raises(RecordError, match=says):
        SamplingParams(**changes)


def test_numbers_are_kept_as_floats_so_that_equal_parameters_are_identical():
    assert identical(SamplingParams(temperature=1, top_p=1), SamplingParams(temperature=1.0, top_p=1.0))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("the patient John Doe", "found a text of 20 characters"),
        (["the patient"], "found list"),
        ("eos", "found 'eos'"),
    ],
)
def test_errors_hold_no_text(given, says):
    with pytest.raises(RecordError, match=says) as caught:
        turn([1], [7], [-0.1], finish_reason=given)
    assert "patient" not in str(caught.value)


def test_a_number_of_thousands_of_digits_is_named_and_not_written():
    with pytest.raises(RecordError, match="reward: expected a number that a float holds"):
        replace(sample([1], [2], [-1.0]), reward=10**5000)
    with pytest.raises(RecordError, match="logit_bias: expected bool, found int"):
        SamplingParams(temperature=1.0, logit_bias=10**5000)


def test_temperature_has_no_default():
    with pytest.raises(TypeError):
        SamplingParams()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logprobs_mode": "logits"}, "processed, raw, unknown"),
        ({"sampling": {"temperature": 1}}, "expected SamplingParams"),
        ({"engine": ""}, "engine: expected text"),
        ({"vocab_size": np.float32(128)}, "vocab_size: expected int"),
        ({"eos_token_ids": 2}, "eos_token_ids: expected a sequence, found int"),
        ({"eos_token_ids": "27"}, "eos_token_ids: expected a sequence, found str"),
        ({"eos_token_ids": (2.9,)}, "eos_token_ids: expected int, found 2.9"),
        ({"eos_token_ids": (True,)}, "eos_token_ids: expected int, found True"),
        ({"bos_token_id": "1"}, "bos_token_id: expected int"),
        # Two surrogates that JSON would give back as one character.
        ({"model": "\ud83d\ude42"}, "UTF-8"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_a_provenance_that_says_nothing_is_refused(changes, says):
    with pytest.raises(RecordError, match=says):
        provenance(**changes)


# mode, sampling, behaviour logprobs?, trainable?, auditable? Worked out from the rules by hand. Where only an
# audit may compare processed values of a draw, training may too where it asks for kept sets.
RULES = [
    ("processed", {"temperature": 1.0}, True, True, True),
    ("processed", {"temperature": 0.7}, True, True, True),
    ("processed", {"temperature": 0.0}, True, False, True),
    ("processed", {"temperature": 0.0, "top_p": 0.8}, True, False, True),
    ("processed", {"temperature": 0.7, "top_p": 0.8}, True, False, True),
    ("processed", {"temperature": 1.0, "top_k": 20}, True, False, True),
    ("processed", {"temperature": 1.0, "min_p": 0.1}, True, False, True),
    ("processed", {"temperature": 1.0, "min_p": 0.1, "presence_penalty": 0.5}, True, False, False),
    ("processed", {"temperature": 1.0, "repetition_penalty": 1.3}, True, False, False),
    ("processed", {"temperature": 1.0, "logit_bias": True}, True, False, False),
    ("processed", {"temperature": 1.0, "min_tokens": 4}, True, False, False),
    ("processed", {"temperature": 1.0, "structured_output": True}, True, False, False),
    ("raw", {"temperature": 1.0}, True, True, True),
    ("raw", {"temperature": 0.7}, False, False, True),
    ("raw", {"temperature": 0.0}, False, False, True),
    ("raw", {"temperature": 1.0, "top_p": 0.8}, False, False, True),
    ("raw", {"temperature": 1.0, "bad_words": True}, False, False, True),
    ("raw", {"temperature": 1.0, "structured_output": True}, False, False, False),
    ("unknown", {"temperature": 1.0}, True, True, True),
    ("unknown", {"temperature": 0.7}, False, False, False),
    ("unknown", {"temperature": 0.0}, False, False, False),
    ("unknown", {"temperature": 1.0, "top_k": 5}, False, False, False),
]


@pytest.mark.parametrize(("mode", "sampling", "behaviour", "trainable", "auditable"), RULES)
def test_provenance_decides_what_may_be_compared(mode, sampling, behaviour, trainable, auditable):
    made = Provenance(engine="vllm", logprobs_mode=mode, sampling=SamplingParams(**sampling))
    assert made.gives_behaviour_logprobs is behaviour
    assert made.comparable("train") is trainable
    assert made.comparable("audit") is auditable
    kept = mode == "processed" and made.sampling.truncated and auditable
    assert made.comparable("train-truncated") is (trainable or kept)
    assert made.renormalised("audit") is made.renormalised("train-truncated") is kept
    assert made.renormalised("train") is False


@pytest.mark.parametrize("engine", ["sglang", "fireworks", "test"])
def test_kept_sets_of_an_engine_whose_rule_is_not_known_are_not_compared(engine):
    made = Provenance(
        engine=engine, logprobs_mode="processed", sampling=SamplingParams(temperature=1.0, top_k=20)
    )
    assert not any(made.comparable(purpose) for purpose in ("train", "train-truncated", "audit"))


def test_segments_are_the_runs_of_one_turn():
    turns = np.array([-1, 0, 0, -1, 1, 2, 2], np.int16)
    assert sampled_segments(turns, row=3) == [
        Segment(row=3, start=1, stop=3, turn=0),
        Segment(row=3, start=4, stop=5, turn=1),
        Segment(row=3, start=5, stop=7, turn=2),
    ]
    assert sampled_segments(np.array([-1, -1], np.int16)) == []
    assert sampled_segments(np.array([], np.int16)) == []


def test_identical_takes_nan_for_equal_and_sees_every_difference():
    a = sample([1, 5], [7, 2], [-0.1, -0.2])
    assert identical(a, sample([1, 5], [7, 2], [-0.1, -0.2]))
    for name, value in {
        "token_ids": np.array([1, 5, 7, 3], np.int32),
        "inference_logprobs": np.array([np.nan, np.nan, -0.1, np.nan], np.float32),
        "loss_mask": np.zeros(4, bool),
        "teacher_logprobs": np.zeros(4, np.float32),
        "reward": 1.0,
        "group_id": "g",
        "provenances": (provenance(vocab_size=9),),
    }.items():
        assert not identical(a, replace(a, **{name: value})), name
    assert identical(replace(a, reward=float("nan")), replace(a, reward=float("nan")))
    assert not identical(a, turn([1], [2], [-1.0]))
    assert SamplingParams(temperature=1.0) == NEUTRAL


def test_lists_and_mappings_of_records_compare_too():
    a = sample([1, 5], [7, 2], [-0.1, -0.2])
    assert identical([a], [replace(a)])
    assert not identical([a], [replace(a, reward=1.0)])
    assert not identical([a], [a, a])
    assert identical({"x": np.float32([1, np.nan])}, {"x": np.float32([1, np.nan])})
    assert not identical({"x": np.float32([1])}, {"x": np.float32([2])})
    assert not identical({"x": 1}, {"y": 1})
    assert identical("ab", "ab")


def test_what_does_not_compare_by_bits_is_refused():
    with pytest.raises(RecordError, match="expected records, arrays and plain values, found Tensor"):
        identical(torch.ones(2), torch.ones(2))


def test_records_of_turns_compare_too():
    assert identical(turn([1], [2], [-1.0]), turn([1], [2], [-1.0]))
    assert not identical(turn([1], [2], [-1.0]), turn([1], [2], [-1.5]))
    assert isinstance(turn([1], [2], [-1.0]), Turn)


@pytest.mark.parametrize("shape", [(3,), (3, 2, 1), (0, 2), (3, -1), (3.0, 2), (True, 2)])
def test_a_routing_shape_is_layers_and_experts_a_token(shape):
    assert provenance(routing_shape=[3, 2]).routing_shape == (3, 2)
    with pytest.raises(RecordError, match=r"Provenance\.routing_shape"):
        provenance(routing_shape=shape)
