"""SGLang's replies. Nobody recorded real ones here: they are written by hand from its documents and clients.

`replies_by_hand` has them; expected values are its own constants, spelled out where a test changes one.
"""

import base64
import copy
import json
import math
from typing import Any

import numpy as np
import pytest
from replies_by_hand import IDS, PROMPT, SAMPLED, TEXTS, sglang_chunks, sglang_reply, sglang_request

from rlbatch.engines import ResponseAssembler, parse_response
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance, SamplingParams, Turn, VersionSpan

NEUTRAL = SamplingParams(temperature=1.0)


def provenance(**changes: Any) -> Provenance:
    return Provenance(**{"engine": "sglang", "logprobs_mode": "processed", "sampling": NEUTRAL} | changes)


def parse(body: Any, request: Any = None, **changes: Any) -> list[Turn]:
    return parse_response(body, engine="sglang", request=request, provenance=provenance(**changes))


def refused(body: Any, request: Any = None, **changes: Any) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        parse(body, request, **changes)
    return caught.value


def streamed(events: list[Any], request: Any = None, **changes: Any) -> list[Turn]:
    """The turns of a stream whose body comes in pieces of seven bytes."""
    assembler = ResponseAssembler(engine="sglang", request=request, provenance=provenance(**changes))
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    for start in range(0, len(text), 7):
        assembler.feed(text[start : start + 7].encode())
    return assembler.finish()


def stream_refused(events: list[Any], request: Any = None) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        streamed(events, request)
    return caught.value


def assert_the_turn(turn: Turn) -> None:
    assert turn.prompt_token_ids.tolist() == PROMPT
    assert turn.completion_token_ids.tolist() == IDS
    assert turn.inference_logprobs.tolist() == SAMPLED
    assert turn.raw_inference_logprobs is None
    assert (turn.finish_reason, turn.stop_reason) == ("stop", 4)
    assert turn.policy_versions == (VersionSpan(label="step-3", start=0, stop=5),)
    assert (turn.usage.num_prompt_tokens, turn.usage.num_completion_tokens) == (4, 5)
    assert turn.text == " Chen starts with 12"


# -- whole replies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [lambda b: b, json.dumps, lambda b: json.dumps(b).encode(), lambda b: [b]])
def test_object_text_bytes_and_list_of_one_give_the_same_turn(form):
    body = sglang_reply()
    before = copy.deepcopy(body)
    (turn,) = parse(form(body), sglang_request())
    assert_the_turn(turn)
    assert turn.request_id == "5f1c"
    assert body == before


def test_ids_beside_the_logprobs_suffice_where_output_ids_are_absent():
    body = sglang_reply()
    del body["output_ids"]
    assert_the_turn(parse(body, sglang_request())[0])


def test_prompt_ids_come_from_the_reply_its_input_rows_or_the_request():
    body = sglang_reply()
    assert parse(body)[0].prompt_token_ids.tolist() == PROMPT
    body["meta_info"]["input_token_logprobs"] = []
    assert refused(body).code == "prompt-ids-missing"
    assert parse(body, sglang_request())[0].prompt_token_ids.tolist() == PROMPT
    body["prompt_token_ids"] = list(PROMPT)
    assert parse(body, {"text": "x"})[0].prompt_token_ids.tolist() == PROMPT


def test_input_rows_from_logprob_start_len_on_must_be_the_prompts_end_and_are_no_prompt_alone():
    body = sglang_reply()
    body["meta_info"]["input_token_logprobs"] = [[None, 30, None], [-1.0, 579, None]]
    assert parse(body, sglang_request())[0].prompt_token_ids.tolist() == PROMPT
    assert refused(body).code == "prompt-ids-missing"
    body["meta_info"]["input_token_logprobs"][0][1] = 31
    assert refused(body, sglang_request()).code == "statement-contradicted"


def test_choices_follow_the_prompts_of_the_request_n_each():
    other = sglang_reply()
    other["meta_info"]["input_token_logprobs"] = []
    other["meta_info"]["prompt_tokens"] = 2
    request = sglang_request(
        input_ids=[PROMPT, [1, 9]], sampling_params={"temperature": 1.0, "n": 2, "max_new_tokens": 8}
    )
    turns = parse([sglang_reply(), sglang_reply(), other, copy.deepcopy(other)], request)
    assert [turn.prompt_token_ids.tolist() for turn in turns] == [PROMPT, PROMPT, [1, 9], [1, 9]]
    error = refused([sglang_reply(), sglang_reply(), other], request)
    assert error.code == "statement-contradicted"
    assert "3 choices; the request has 2 prompts, n=2" in str(error)


def test_an_empty_completion_is_legal_and_one_entry_without_an_id_is_not():
    (turn,) = parse(sglang_reply([], []), sglang_request())
    assert (len(turn.completion_token_ids), turn.finish_reason) == (0, "length")
    # What max_new_tokens=0 gives: a logprob of a token that was not kept.
    phantom = sglang_reply([], [])
    phantom["meta_info"]["output_token_logprobs"] = [[-0.5, 572, None]]
    phantom["meta_info"]["output_top_logprobs"] = []
    error = refused(phantom, sglang_request())
    assert error.code == "length-mismatch"
    assert "max_new_tokens=0" in str(error)
    del phantom["output_ids"]
    phantom["meta_info"]["output_token_logprobs"] = [[-0.5, None, None]]
    assert refused(phantom, sglang_request()).code == "ids-missing"


@pytest.mark.parametrize(
    ("finish", "reason", "stop"),
    [
        ({"type": "length", "length": 5}, "length", None),
        ({"type": "abort", "message": "client left", "status_code": 499}, "abort", None),
        ({"type": "stop", "matched": "12"}, "stop", "12"),
        ({"type": "stop", "matched": None}, "stop", None),
    ],
)
def test_the_finish_object_becomes_reason_and_stop(finish, reason, stop):
    body = sglang_reply()
    body["meta_info"]["finish_reason"] = finish
    (turn,) = parse(body)
    assert (turn.finish_reason, turn.stop_reason) == (reason, stop)


def test_versions_are_spans_where_the_reply_has_them():
    body = sglang_reply()
    spans = [{"version": "step-2", "start": 0, "end": 2}, {"version": "step-3", "start": 2, "end": 5}]
    body["meta_info"]["weight_versions"] = spans
    (turn,) = parse(body)
    assert [(span.label, span.start, span.stop) for span in turn.policy_versions] == [
        ("step-2", 0, 2),
        ("step-3", 2, 5),
    ]
    body["meta_info"]["weight_version"] = "step-9"
    assert refused(body).code == "statement-contradicted"
    del body["meta_info"]["weight_version"]
    spans[1]["end"] = 4
    assert refused(body).code == "statement-contradicted"
    del body["meta_info"]["weight_versions"]
    assert parse(body)[0].policy_versions == ()


def change(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The reply with one value replaced."""
    body: Any = sglang_reply()
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return body


META = "meta_info"
ROWS = "output_token_logprobs"


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        (("output_ids", 1), 424, "statement-contradicted"),
        (("output_ids",), IDS[:-1], "length-mismatch"),
        ((META, ROWS), sglang_reply()[META][ROWS][:-1], "length-mismatch"),
        ((META, ROWS), None, "logprobs-missing"),
        ((META, "completion_tokens"), 6, "usage-mismatch"),
        ((META, "output_token_logprobs_length"), 4, "usage-mismatch"),
        ((META, "prompt_tokens"), 5, "usage-mismatch"),
        ((META, "output_top_logprobs", 2, 0, 0), -0.5, "statement-contradicted"),
        ((META, "output_top_logprobs"), [[]], "statement-contradicted"),
        ((META, "finish_reason", "matched"), 2, "finish-mismatch"),
        ((META, "finish_reason"), None, "route-unsupported"),
        ((META, "finish_reason"), "stop", "reply-malformed"),
        ((META, "finish_reason", "type"), "error", "reply-malformed"),
        # /generate writes NaN and infinity as null.
        ((META, ROWS, 1, 0), None, "logprob-missing"),
        ((META, ROWS, 1, 0), math.nan, "logprob-not-finite"),
        ((META, ROWS, 1, 0), True, "reply-malformed"),
        ((META, ROWS, 1, 0), "-0.5", "reply-malformed"),
        ((META, ROWS, 1, 1), 423.0, "reply-malformed"),
        ((META, ROWS, 1), {"logprob": -0.5, "token_id": 423}, "reply-malformed"),
        (("output_ids", 1), -1, "reply-malformed"),
        (("output_ids", 1), True, "reply-malformed"),
        ((META,), None, "reply-malformed"),
    ],
)
def test_what_disagrees_or_is_no_number_is_refused(path, value, code):
    body = change(path, value)
    if path[-1] == "output_top_logprobs" or ROWS in path:
        # The alternatives would speak of the same fault first.
        body[META]["output_top_logprobs"] = value if path[-1] == "output_top_logprobs" else None
    error = refused(body, sglang_request())
    assert error.code == code
    for secret in (" Chen", "579", "step-3"):
        assert secret not in str(error)


def test_texts_beside_the_logprobs_must_make_the_text():
    body = sglang_reply()
    for row, text in zip(body[META][ROWS], TEXTS, strict=True):
        row[2] = text
    assert_the_turn(parse(body)[0])
    body["text"] = " Chen ends with 12"
    error = refused(body)
    assert error.code == "text-mismatch"
    assert "Chen" not in str(error)


@pytest.mark.parametrize("value", [0, 0.0, -9999.0])
def test_zeros_and_sentinels_are_kept_for_the_checks_to_judge(value):
    body = change((META, ROWS, 0, 0), value)
    body[META]["output_top_logprobs"] = None
    assert parse(body)[0].inference_logprobs[0] == np.float32(value)


def test_a_number_that_no_double_holds_is_not_finite():
    text = json.dumps(change((META, ROWS, 0, 0), "HERE")).replace('"HERE"', "-1e400")
    assert refused(text).code == "logprob-not-finite"


def test_bodies_that_are_no_reply_are_named():
    assert refused({"error": {"message": "secret prompt"}}).code == "reply-error-body"
    assert "secret" not in str(refused({"object": "error", "message": "secret prompt"}))
    named = {"error": {"message": "secret prompt", "type": "BadRequestError", "code": 400}}
    for body in (named, json.dumps(named)):
        assert "type BadRequestError, code 400" in str(refused(body))
        assert "secret" not in str(refused(body))
    assert refused([]).code == "reply-malformed"
    assert refused("{").code == "reply-malformed"
    assert refused("\ud800").code == "reply-malformed"
    assert refused(sglang_reply(), sglang_request(stream=True)).code == "route-unsupported"


@pytest.mark.parametrize(
    ("sampling", "fits"),
    [
        ({"temperature": 1.0, "top_k": -1}, True),
        ({"temperature": 0.7}, False),
        ({"top_p": 0.9}, False),
        ({"min_new_tokens": 3}, False),
        ({"json_schema": "{}"}, False),
        ({"regex": "a"}, False),
        ({"ebnf": "a"}, False),
        ([{"temperature": 1.0}], True),
        ([{"temperature": 0.5}], False),
    ],
)
def test_a_request_that_contradicts_the_provenance_is_refused(sampling, fits):
    request = sglang_request(sampling_params=sampling)
    if fits:
        assert_the_turn(parse(sglang_reply(), request)[0])
    else:
        assert refused(sglang_reply(), request).code == "statement-contradicted"


# -- routed experts ---------------------------------------------------------------------------------------


def with_routing(start: int = 0) -> tuple[dict[str, Any], np.ndarray]:
    """The reply with 3 layers of 2 experts for each of its 8 passes, or for those from `start` on."""
    rows = np.arange(8 * 3 * 2, dtype="<i4").reshape(8, 3, 2)[start:]
    body = sglang_reply()
    body[META]["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
    return body, rows


def test_a_flat_buffer_gets_the_shape_that_the_provenance_says():
    body, rows = with_routing()
    (turn,) = parse(body, sglang_request(), routing_shape=(3, 2))
    assert np.array_equal(turn.routed_experts, rows)
    assert turn.routed_experts_start == 0
    error = refused(body, sglang_request())
    assert error.code == "routing-unreadable"
    assert "routing_shape" in str(error)


def test_rows_begin_where_the_request_says():
    body, rows = with_routing(start=3)
    (turn,) = parse(body, sglang_request(routed_experts_start_len=3), routing_shape=(3, 2))
    assert np.array_equal(turn.routed_experts, rows)
    assert turn.routed_experts_start == 3
    for request in (sglang_request(), sglang_request(routed_experts_start_len=2)):
        assert refused(body, request, routing_shape=(3, 2)).code == "routed-experts-mismatch"


def test_bytes_of_other_sizes_signs_or_alphabets_are_refused():
    body, rows = with_routing()
    assert refused(body, sglang_request(), routing_shape=(5, 2)).code == "routed-experts-malformed"
    for value in (base64.b64encode((-rows).tobytes()).decode(), "%%", "", 7):
        body[META]["routed_experts"] = value
        error = refused(body, sglang_request(), routing_shape=(3, 2))
        assert error.code == "routed-experts-malformed"


# -- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("sizes", [(5,), (1, 3, 5), (1, 2, 3, 4, 5)])
def test_both_ways_of_streaming_give_the_whole_reply(incremental, sizes):
    (turn,) = streamed(sglang_chunks(incremental=incremental, sizes=sizes), sglang_request(stream=True))
    assert turn.text.startswith(" Chen starts with 12")
    turn = copy.copy(turn)
    assert turn.completion_token_ids.tolist() == IDS
    assert turn.inference_logprobs.tolist() == SAMPLED
    assert turn.policy_versions == (VersionSpan(label="step-3", start=0, stop=5),)


def test_a_last_chunk_may_bring_the_end_alone():
    events = sglang_chunks(incremental=True)
    end = copy.deepcopy(events[-1])
    events[-1][META]["finish_reason"] = None
    end |= {"text": "", "output_ids": []}
    end[META] |= {ROWS: [], "output_top_logprobs": []}
    (turn,) = streamed([*events, end])
    assert turn.completion_token_ids.tolist() == IDS


def test_interleaved_choices_are_told_apart_by_their_index():
    first, second = (sglang_chunks(incremental=True, index=index) for index in (0, 1))
    request = sglang_request(stream=True, sampling_params={"n": 2})
    turns = streamed([first[0], second[0], second[1], first[1], first[2], second[2]], request)
    assert [turn.request_id for turn in turns] == ["5f1c_0", "5f1c_1"]
    assert all(turn.completion_token_ids.tolist() == IDS for turn in turns)
    error = stream_refused(first, request)
    assert error.code == "statement-contradicted"
    assert stream_refused(second, sglang_request()).code == "stream-disordered"


def test_a_version_that_changes_between_chunks_is_two_spans():
    events = sglang_chunks(incremental=True)
    events[2][META]["weight_version"] = "step-4"
    (turn,) = streamed(events)
    assert [(span.label, span.start, span.stop) for span in turn.policy_versions] == [
        ("step-3", 0, 3),
        ("step-4", 3, 5),
    ]


def test_what_the_whole_reply_says_twice_is_compared_in_a_stream_too():
    for incremental in (False, True):
        events = sglang_chunks(incremental=incremental)
        for event in events:
            event[META]["cached_tokens"] = 4
        assert streamed(events)[0].completion_token_ids.tolist() == IDS
        for event in events:
            event[META]["cached_tokens"] = 999
        assert stream_refused(events).code == "statement-contradicted"
        assert refused(change((META, "cached_tokens"), 999)).code == "statement-contradicted"


def test_spans_at_the_end_of_a_stream_hold_every_version_that_a_chunk_names():
    events = sglang_chunks(incremental=True)
    events[0][META]["weight_version"] = "step-2"
    spans = [{"version": "step-2", "start": 0, "end": 2}, {"version": "step-3", "start": 2, "end": 5}]
    events[-1][META]["weight_versions"] = spans
    (turn,) = streamed(events)
    assert [(span.label, span.start, span.stop) for span in turn.policy_versions] == [
        ("step-2", 0, 2),
        ("step-3", 2, 5),
    ]
    for at in (0, 2):
        broken = copy.deepcopy(events)
        broken[at][META]["weight_version"] = "step-9"
        error = stream_refused(broken)
        assert error.code == "statement-contradicted"
        assert "step-9" not in str(error)
    # Chunks that name no version deny none.
    del events[-1][META]["weight_version"], events[1][META]["weight_version"]
    assert len(streamed(events)[0].policy_versions) == 2


def events_changed(name: str, incremental: bool) -> list[Any]:
    events = sglang_chunks(incremental=incremental)
    match name:
        case "repeated":
            events.insert(1, copy.deepcopy(events[1]))
        case "dropped":
            del events[1]
        case "swapped":
            events[0], events[1] = events[1], events[0]
        case "after the end":
            events.append(copy.deepcopy(events[-1]))
        case "other request":
            events[1][META]["id"] = "6a00"
        case "other prompt":
            events[1][META]["input_token_logprobs"][2][1] += 1
        case "list lost":
            events[1]["output_ids"] = None
        case "count lost":
            del events[1][META]["completion_tokens"], events[1][META]["output_token_logprobs_length"]
        case "other way":
            events[2] = sglang_chunks(incremental=not incremental)[2]
        case "ids rewritten":
            events[2]["output_ids"][0] += 1
            events[2][META][ROWS][0][1] += 1
    return events


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("repeated", {"stream-disordered"}),
        ("dropped", {"stream-disordered"}),
        ("swapped", {"stream-disordered"}),
        ("after the end", {"stream-disordered"}),
        ("other request", {"stream-disordered"}),
        ("other prompt", {"statement-contradicted"}),
        ("list lost", {"stream-disordered"}),
        ("count lost", {"reply-malformed"}),
        ("other way", {"stream-disordered"}),
    ],
)
def test_chunks_that_do_not_follow_one_another_are_refused(name, incremental, codes):
    if (name, incremental) == ("dropped", False):
        # All so far are repeated anyway: nothing is lost with a chunk in the middle.
        assert streamed(events_changed(name, incremental))[0].completion_token_ids.tolist() == IDS
        return
    assert stream_refused(events_changed(name, incremental)).code in codes


def test_a_repetition_that_says_other_ids_is_refused():
    assert stream_refused(events_changed("ids rewritten", False)).code == "stream-disordered"


def test_a_stream_without_an_end_is_refused():
    assert stream_refused(sglang_chunks(incremental=True)[:-1]).code == "stream-truncated"
    assert stream_refused([]).code == "stream-truncated"
    assert stream_refused([[sglang_reply()]]).code == "reply-malformed"
    assert stream_refused([{"error": {"message": "secret"}}]).code == "reply-error-body"


def test_routing_comes_with_the_last_chunk():
    body, rows = with_routing()
    events = sglang_chunks(incremental=True)
    events[-1][META]["routed_experts"] = body[META]["routed_experts"]
    (turn,) = streamed(events, sglang_request(stream=True), routing_shape=(3, 2))
    assert np.array_equal(turn.routed_experts, rows)
