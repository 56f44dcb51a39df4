"""Turns become samples by their ids alone; every sampled token is trained exactly once."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import provenance, trajectory, turn
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rlbatch.assemble import prefix_findings, to_samples
from rlbatch.errors import Finding, RecordError
from rlbatch.records import SamplingParams, Trajectory, Turn, VersionSpan

NAN = np.float32(np.nan)


def test_one_turn_becomes_one_sample_with_every_field_in_its_place():
    made = turn([1, 5], [7, 2], [-0.25, -0.5], finish_reason="stop")
    (sample,) = to_samples(trajectory(made, group_id="g", reward=1.0, advantage=0.75))
    np.testing.assert_array_equal(sample.token_ids, [1, 5, 7, 2])
    np.testing.assert_array_equal(sample.inference_logprobs, np.float32([NAN, NAN, -0.25, -0.5]))
    np.testing.assert_array_equal(sample.loss_mask, [False, False, True, True])
    np.testing.assert_array_equal(sample.advantages, np.float32([0, 0, 0.75, 0.75]))
    np.testing.assert_array_equal(sample.policy_version, [-1, -1, -1, -1])
    np.testing.assert_array_equal(sample.temperature, np.float32([1, 1, 1, 1]))
    np.testing.assert_array_equal(sample.turn, [-1, -1, 0, 0])
    assert sample.raw_inference_logprobs is None
    assert (sample.trajectory_id, sample.group_id, sample.reward) == ("t0", "g", 1.0)
    assert (sample.sibling, sample.num_siblings, sample.finish_reasons) == (0, 1, ("stop",))
    assert sample.stop_reasons == (None,)


def test_an_advantage_that_nobody_has_said_is_no_number():
    made = turn([1, 5], [7, 2], [-0.25, -0.5])
    (sample,) = to_samples(Trajectory(trajectory_id="t0", turns=(made,)))
    np.testing.assert_array_equal(sample.advantages, np.float32([0, 0, NAN, NAN]))
    (said,) = to_samples(trajectory(made, advantage=0.0))
    np.testing.assert_array_equal(said.advantages, np.float32([0, 0, 0, 0]))


def test_turns_that_extend_one_another_join_and_tokens_between_are_context():
    first = turn([1, 5], [7, 2], [-0.1, -0.2])
    second = turn([1, 5, 7, 2, 9, 9], [8], [-0.3])
    (sample,) = to_samples(trajectory(first, second))
    np.testing.assert_array_equal(sample.token_ids, [1, 5, 7, 2, 9, 9, 8])
    np.testing.assert_array_equal(sample.turn, [-1, -1, 0, 0, -1, -1, 1])
    np.testing.assert_array_equal(sample.loss_mask, [False, False, True, True, False, False, True])
    assert np.isnan(sample.inference_logprobs[[0, 1, 4, 5]]).all()
    assert prefix_findings(trajectory(first, second)) == ()


def test_a_broken_prefix_branches_at_its_token_and_is_reported():
    # Template case: the thinking 3 4 of turn 0 is gone from the prompt of turn 1.
    first = turn([1, 5], [3, 4, 7, 2], [-0.1, -0.2, -0.3, -0.4])
    second = turn([1, 5, 7, 2, 9], [8], [-0.5])
    made = trajectory(first, second)
    samples = to_samples(made)
    assert [list(sample.token_ids) for sample in samples] == [[1, 5, 3, 4, 7, 2], [1, 5, 7, 2, 9, 8]]
    assert [int(sample.loss_mask.sum()) for sample in samples] == [4, 1]
    assert [(sample.sibling, sample.num_siblings) for sample in samples] == [(0, 2), (1, 2)]
    assert [sample.sample_id for sample in samples] == ["t0:0", "t0:1"]
    np.testing.assert_array_equal(samples[1].turn, [-1, -1, -1, -1, -1, 1])
    (found,) = prefix_findings(made)
    assert (found.code, found.severity) == ("turn-prefix-broken", "warning")
    assert (found.where.turn, found.where.start) == (1, 2)
    assert "first 2 tokens agree" in found.found


def test_a_later_turn_joins_the_longest_sequence_that_it_extends():
    # Turns 0 and 2 are one conversation, turn 1 another in between.
    main = turn([1, 5], [7], [-0.1])
    other = turn([1, 6], [8], [-0.2])
    again = turn([1, 5, 7, 9], [2], [-0.3])
    samples = to_samples(trajectory(main, other, again))
    assert [list(sample.token_ids) for sample in samples] == [[1, 5, 7, 9, 2], [1, 6, 8]]
    np.testing.assert_array_equal(samples[0].turn, [-1, -1, 0, -1, 2])
    # Both turns begin what turn 2 goes on with; the longer of them is what it was asked after.
    short, long = turn([1, 5], [7], [-0.1]), turn([1, 5], [7, 2, 9], [-0.1, -0.2, -0.3])
    samples = to_samples(trajectory(short, long, turn([1, 5, 7, 2, 9, 4], [8], [-0.4])))
    assert [list(sample.token_ids) for sample in samples] == [[1, 5, 7], [1, 5, 7, 2, 9, 4, 8]]


def routed(num_rows, first=0):
    """[num_rows, 1, 1], each row its own number."""
    return np.arange(first, first + num_rows, dtype=np.uint8).reshape(-1, 1, 1)


def test_an_aborted_turn_without_tokens_needs_no_routed_experts():
    aborted = turn([1], [], [], finish_reason="abort")
    whole = turn([1], [4, 5], [-0.1, -0.2], routed_experts=routed(2))
    (made,) = to_samples(trajectory(aborted, whole))
    np.testing.assert_array_equal(made.routed_experts[:, 0, 0], [0, 1])
    (same,) = to_samples(trajectory(whole, turn([1, 4, 5], [], [])))
    np.testing.assert_array_equal(same.routed_experts[:, 0, 0], [0, 1])


def test_routed_experts_that_lack_drawn_tokens_or_the_end_are_refused():
    whole = turn([1], [4, 5], [-0.1, -0.2], routed_experts=routed(2))
    with pytest.raises(RecordError, match="found them in 1 of 2 that drew tokens"):
        to_samples(trajectory(whole, turn([1, 4, 5], [6], [-0.1])))
    with pytest.raises(RecordError, match="of 3 tokens, found 2: the last turn drew nothing"):
        to_samples(trajectory(whole, turn([1, 4, 5, 9], [], [])))


def test_version_labels_become_integers_by_mapping_or_by_being_decimal():
    spans = (VersionSpan(label="default", start=0, stop=1), VersionSpan(label="12", start=1, stop=3))
    made = trajectory(turn([1], [7, 8, 9], [-1.0, -1.0, -1.0], policy_versions=spans))
    np.testing.assert_array_equal(to_samples(made)[0].policy_version, [-1, -1, 12, 12])
    mapped = to_samples(made, {"default": 3, "12": np.int64(4)})[0]
    np.testing.assert_array_equal(mapped.policy_version, [-1, 3, 4, 4])
    # A label that is left out is no number of the mapping's kind, though it may look like one.
    for versions, lacking in (({"step-2": 3}, "default"), ({"default": 3}, "12")):
        with pytest.raises(RecordError, match=f"every label of the trajectory, found none for '{lacking}'"):
            to_samples(made, versions)
    for number in (2.0, "3", -7, 2**31, True):
        with pytest.raises(RecordError, match=r"versions\['default'\]: expected (int|from 0)"):
            to_samples(made, {"default": number, "12": 12})


@pytest.mark.parametrize("label", ["٣", "1" * 5000, "-1", "1.0", ""])
def test_what_is_no_plain_number_is_a_name(label):
    spans = (VersionSpan(label=label, start=0, stop=1),)
    made = trajectory(turn([1], [7], [-1.0], policy_versions=spans))
    np.testing.assert_array_equal(to_samples(made)[0].policy_version, [-1, -1])


def test_a_decimal_label_too_large_for_a_version_is_a_name_like_any_other():
    spans = (VersionSpan(label="1735689600123", start=0, stop=1),)
    made = trajectory(turn([1], [7], [-1.0], policy_versions=spans))
    np.testing.assert_array_equal(to_samples(made)[0].policy_version, [-1, -1])
    np.testing.assert_array_equal(to_samples(made, {"1735689600123": 4})[0].policy_version, [-1, 4])


@pytest.mark.parametrize(
    ("mode", "temperature", "divisor", "behaviour"),
    [
        ("processed", 0.7, 0.7, True),
        ("raw", 0.7, 0.7, False),
        ("processed", 0.0, 1.0, True),
        ("raw", 1.0, 1.0, True),
    ],
)
def test_values_lie_where_the_provenance_puts_them(mode, temperature, divisor, behaviour):
    how = provenance(logprobs_mode=mode, sampling=SamplingParams(temperature=temperature))
    (sample,) = to_samples(trajectory(turn([1], [7, 8], [-0.1, -0.2], provenance=how)))
    np.testing.assert_array_equal(sample.temperature, np.float32([1, divisor, divisor]))
    assert bool(np.isfinite(sample.inference_logprobs[1:]).all()) is behaviour
    assert (sample.raw_inference_logprobs is None) is behaviour
    if not behaviour:
        np.testing.assert_array_equal(sample.raw_inference_logprobs[1:], np.float32([-0.1, -0.2]))
    assert sample.loss_mask[1:].all()


def test_a_recorded_conversation_joins_into_one_sample(data_dir):
    recording = json.loads((data_dir / "replies/fp32_raw/chat_multi_turn_t0.json").read_text())
    conversation = recording["turns"][0]
    replies = [conversation[name]["response"] for name in ("turn1", "turn2")]
    turns = [
        turn(
            reply["prompt_token_ids"],
            reply["choices"][0]["token_ids"],
            [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]],
        )
        for reply in replies
    ]
    samples = to_samples(trajectory(*turns))
    assert len(samples) == 1
    assert int(samples[0].loss_mask.sum()) == sum(len(part.completion_token_ids) for part in turns)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), min_size=1, max_size=6))
def test_every_sampled_token_is_trained_in_exactly_one_sample(plan):
    context: list[int] = [1]
    turns = []
    for index, (num_between, num_sampled, broken) in enumerate(plan):
        prompt = [100 + index, *context] if broken else [*context, *[50] * num_between]
        ids = list(range(10 * index, 10 * index + num_sampled))
        turns.append(turn(prompt, ids, [-1.0] * num_sampled))
        context = [*prompt, *ids]
    made = trajectory(*turns)
    samples = to_samples(made)
    trained = sorted(int(i) for sample in samples for i in sample.token_ids[sample.loss_mask])
    assert trained == sorted(int(i) for part in turns for i in part.completion_token_ids)
    assert len(samples) == 1 + len(prefix_findings(made)) == 1 + sum(broken for _, _, broken in plan[1:])
    assert {sample.num_siblings for sample in samples} == {len(samples)}


def test_assembly_reads_and_never_writes():
    made = turn([1, 5], [7, 2], [-0.1, -0.2])
    before = replace(made)
    to_samples(trajectory(made))
    np.testing.assert_array_equal(made.completion_token_ids, before.completion_token_ids)


# -- breaks in recorded conversations ----------------------------------------------------------------------
#
# The ids and logprobs of the first turns are the engine's. The second turns' prompts are the engine's too, or
# made by the served model's own template and tokenizer from the recorded text, as a client does.


@pytest.fixture(scope="module")
def tokenizer(tinylm_dir):
    return AutoTokenizer.from_pretrained(tinylm_dir)


def recorded_turn(body: dict[str, Any]) -> Turn:
    """The one turn of a recorded chat reply."""
    choice = body["choices"][0]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return turn(body["prompt_token_ids"], choice["token_ids"], logprobs)


def chat(data_dir, name: str) -> dict[str, Any]:
    return json.loads((data_dir / "replies/fp32_raw" / name).read_text())


def asked_again(tokenizer, recording: dict[str, Any], said: str, role: str, text: str) -> Turn:
    """A second turn whose prompt is the history rendered from text."""
    messages = [
        *recording["request"]["messages"],
        {"role": "assistant", "content": said},
        {"role": role, "content": text},
    ]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return turn(prompt, [1535], [-0.5])


def only_finding(*turns: Turn) -> Finding:
    made = trajectory(*turns)
    (found,) = prefix_findings(made)
    assert [sample.num_siblings for sample in to_samples(made)] == [2, 2]
    assert (found.code, found.severity, found.where.turn) == ("turn-prefix-broken", "warning", 1)
    return found


def test_a_recorded_answer_sent_back_whole_extends_its_prompt(data_dir, tokenizer):
    recording = chat(data_dir, "chat_imend.json")
    said = recording["response"]["choices"][0]["message"]["content"]
    first = recorded_turn(recording["response"])
    again = asked_again(tokenizer, recording, said, "user", "Why?")
    assert prefix_findings(trajectory(first, again)) == ()
    assert len(to_samples(trajectory(first, again))) == 1


def test_recorded_thinking_that_a_client_strips_is_named_and_placed(data_dir, tokenizer):
    recording = chat(data_dir, "chat_imend.json")
    said = recording["response"]["choices"][0]["message"]["content"]
    _, _, answer = said.partition("</think>\n")
    first = recorded_turn(recording["response"])
    found = only_finding(first, asked_again(tokenizer, recording, answer, "user", "Why?"))
    # <think> is id 1534, </think> 1535 with a newline (203) after it.
    ids = first.completion_token_ids.tolist()
    start = len(first.prompt_token_ids)
    assert (ids[0], ids[6:8]) == (1534, [1535, 203])
    assert found.where.start == start
    assert found.found.startswith(f"stripped thinking: the first {start} tokens agree")
    assert f"tokens {start}:{start + 8} are left out" in found.found
    assert "template leaves earlier thinking out" in found.likely


def test_two_recorded_turns_that_do_not_belong_together_differ_in_the_tool_call(data_dir):
    # The client of the second recording sent "12 * 7" back where this model had said "2 * 7".
    first = chat(data_dir, "chat_multi_turn_t0.json")["turns"][0]["turn1"]["response"]
    second = chat(data_dir, "chat_two_turns.json")["response"]
    found = only_finding(recorded_turn(first), recorded_turn(second))
    ids, prompt = first["choices"][0]["token_ids"], second["prompt_token_ids"]
    start = next(
        at for at, (a, b) in enumerate(zip(first["prompt_token_ids"] + ids, prompt, strict=False)) if a != b
    )
    assert len(first["prompt_token_ids"]) < start < len(first["prompt_token_ids"]) + len(ids)
    assert found.where.start == start
    assert found.found.startswith("re-tokenised: ")


def test_recorded_bytes_whose_text_encodes_to_no_id_of_them_are_rewritten(data_dir, tokenizer):
    # Ten single bytes were sampled. They are no characters: the text, and all of its ids, are others.
    recording = json.loads((data_dir / "replies/fp32_raw/completions_bytes_ids_lp1.json").read_text())
    choice = recording["response"]["choices"][0]
    first = turn(choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]["token_logprobs"])
    text = tokenizer.decode(choice["token_ids"])
    again = [*choice["prompt_token_ids"], *tokenizer.encode(text, add_special_tokens=False), 203, 203]
    found = only_finding(first, turn(again, [5], [-0.5]))
    assert found.where.start == len(choice["prompt_token_ids"]) == 7
    assert found.found.startswith("rewritten: ")
    assert "nothing of tokens 7:17 comes again" in found.found


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        # The newline (203) that the template puts after <|im_end|> (4) is lost; the tool's text is another.
        (lambda between: between[1:], "template suffix"),
        (lambda between: [*between[:-8], 77, *between[-7:]], "tool boundary"),
    ],
)
def test_the_ids_between_recorded_turns_that_come_back_changed_are_named(data_dir, change, kind):
    pair = chat(data_dir, "chat_multi_turn_t0.json")["turns"][0]
    first, second = recorded_turn(pair["turn1"]["response"]), recorded_turn(pair["turn2"]["response"])
    whole = [*first.prompt_token_ids.tolist(), *first.completion_token_ids.tolist()]
    between = second.prompt_token_ids.tolist()[len(whole) :]
    assert (whole[-1], between[0]) == (4, 203)
    third = [*whole, *change(between), *second.completion_token_ids.tolist(), 203, 3, 5]
    made = trajectory(first, second, turn(third, [6], [-0.5]))
    (found,) = prefix_findings(made)
    assert (found.where.turn, found.found.split(":")[0]) == (2, kind)
    assert [int(sample.loss_mask.sum()) for sample in to_samples(made)] == [28, 1]
