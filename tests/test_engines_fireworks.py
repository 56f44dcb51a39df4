"""Fireworks' replies. Nobody recorded real ones here: they are by hand from its reference and clients.

`replies_by_hand` has them; expected values are its own constants, spelled out where a test changes one.
"""

import copy
import json
import math
from typing import Any

import numpy as np
import pytest
from replies_by_hand import (
    IDS,
    PROMPT,
    RAW,
    SAMPLED,
    fireworks_chunks,
    fireworks_echo,
    fireworks_entries,
    fireworks_legacy,
    fireworks_reply,
    fireworks_request,
)

from rlbatch.engines import ResponseAssembler, parse_response
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance, SamplingParams, Turn

NEUTRAL = SamplingParams(temperature=1.0)


def provenance(**changes: Any) -> Provenance:
    return Provenance(**{"engine": "fireworks", "logprobs_mode": "processed", "sampling": NEUTRAL} | changes)


def parse(body: Any, request: Any = None, **changes: Any) -> list[Turn]:
    return parse_response(body, engine="fireworks", request=request, provenance=provenance(**changes))


def refused(body: Any, request: Any = None, **changes: Any) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        parse(body, request, **changes)
    return caught.value


def streamed(events: list[Any], request: Any = None) -> list[Turn]:
    assembler = ResponseAssembler(engine="fireworks", request=request, provenance=provenance())
    for event in events:
        assembler.feed(f"data: {json.dumps(event)}\n\n")
    assembler.feed("data: [DONE]\n\n")
    return assembler.finish()


def stream_refused(events: list[Any], request: Any = None) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        streamed(events, request)
    return caught.value


def choice_of(body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = body["choices"][0]
    return choice


def assert_the_turn(turn: Turn) -> None:
    assert turn.prompt_token_ids.tolist() == PROMPT
    assert turn.completion_token_ids.tolist() == IDS
    assert turn.inference_logprobs.tolist() == SAMPLED
    assert turn.raw_inference_logprobs.tolist() == RAW
    assert (turn.finish_reason, turn.request_id) == ("stop", "cmpl-7")


# -- ids and logprobs, wherever they stand ------------------------------------------------------------------


@pytest.mark.parametrize("form", [lambda b: b, json.dumps, lambda b: json.dumps(b).encode()])
def test_object_text_and_bytes_give_the_same_turn_with_both_kinds_of_logprobs(form):
    body = fireworks_reply()
    before = copy.deepcopy(body)
    (turn,) = parse(form(body), fireworks_request())
    assert_the_turn(turn)
    assert (turn.usage.num_prompt_tokens, turn.usage.num_completion_tokens) == (4, 5)
    assert turn.text == " Chen starts with 12"
    assert body == before


def test_any_one_place_of_ids_suffices():
    for kept in ("token_ids", "raw_output", "content"):
        body = fireworks_reply()
        choice = choice_of(body)
        for place in ("token_ids", "raw_output"):
            if place != kept:
                del choice[place]
        if kept != "content":
            for entry in choice["logprobs"]["content"]:
                del entry["token_id"]
        assert_the_turn(parse(body, fireworks_request())[0])


def test_logprobs_of_raw_output_count_and_must_agree():
    body = fireworks_reply()
    choice = choice_of(body)
    choice["raw_output"]["completion_logprobs"] = {"content": fireworks_entries()}
    assert_the_turn(parse(body)[0])
    choice["logprobs"] = None
    assert_the_turn(parse(body)[0])
    choice["logprobs"] = {"content": fireworks_entries()}
    choice["raw_output"]["completion_logprobs"]["content"][1]["sampling_logprob"] = -7.0
    error = refused(body)
    assert error.code == "statement-contradicted"
    assert "differ at 1 of 5, first at token 1" in str(error)


def test_the_provenance_chooses_the_list_and_raw_is_kept_apart():
    warm = SamplingParams(temperature=0.7)
    (turn,) = parse(fireworks_reply(), sampling=warm)
    assert turn.inference_logprobs.tolist() == SAMPLED
    assert turn.raw_inference_logprobs.tolist() == RAW
    (turn,) = parse(fireworks_reply(), logprobs_mode="raw", sampling=warm)
    assert np.isnan(turn.inference_logprobs).all()
    assert turn.raw_inference_logprobs.tolist() == RAW
    # At temperature 1 with nothing else in force the raw values are those of the sampled distribution.
    (turn,) = parse(fireworks_reply(), logprobs_mode="raw")
    assert turn.inference_logprobs.tolist() == RAW
    assert turn.raw_inference_logprobs is None


def test_processed_without_sampling_logprobs_is_refused_and_never_copied_from_raw():
    body = fireworks_reply()
    for entry in choice_of(body)["logprobs"]["content"]:
        entry["sampling_logprob"] = None
    error = refused(body)
    assert error.code == "logprobs-missing"
    assert "only raw ones" in str(error)
    assert parse(body, logprobs_mode="raw")[0].inference_logprobs.tolist() == RAW


def test_one_null_among_them_is_missing():
    for name in ("sampling_logprob", "logprob"):
        body = fireworks_reply()
        choice_of(body)["logprobs"]["content"][2][name] = None
        choice_of(body)["logprobs"]["content"][2]["top_logprobs"] = []
        error = refused(body)
        assert error.code == "logprob-missing"
        assert "1 of 5 are null, at sampled token 2" in str(error)


def test_legacy_lists_are_raw_logprobs():
    (turn,) = parse(fireworks_legacy(), fireworks_request(), logprobs_mode="raw")
    assert turn.completion_token_ids.tolist() == IDS
    assert turn.inference_logprobs.tolist() == RAW
    assert refused(fireworks_legacy(), fireworks_request()).code == "logprobs-missing"
    bare = fireworks_legacy()
    choice_of(bare)["logprobs"] = list(RAW)
    assert parse(bare, logprobs_mode="raw")[0].inference_logprobs.tolist() == RAW


@pytest.mark.parametrize("place", ["token_ids", "raw_output"])
def test_ids_one_short_of_the_logprobs_are_a_length_mismatch(place):
    # The seed's case: encoding the text again lost the end-of-turn token, on every row.
    body = fireworks_legacy()
    choice = choice_of(body)
    del choice["logprobs"]["token_ids"]
    choice["token_ids"] = choice["raw_output"]["completion_token_ids"] = IDS[:-1]
    del choice["raw_output" if place == "token_ids" else "token_ids"]
    del body["usage"]
    error = refused(body, logprobs_mode="raw")
    assert error.code == "length-mismatch"
    assert "5 logprobs for 4 ids: 1 logprobs too many" in str(error)


def test_without_ids_the_text_is_never_encoded():
    body = fireworks_legacy()
    choice = choice_of(body)
    del choice["token_ids"], choice["raw_output"], choice["logprobs"]["token_ids"]
    error = refused(body, fireworks_request(), logprobs_mode="raw")
    assert error.code == "ids-missing"
    assert "return_token_ids=true or raw_output=true" in str(error)


def test_an_empty_completion_is_legal_and_one_entry_without_ids_is_not():
    body = fireworks_reply()
    choice = choice_of(body)
    choice |= {"token_ids": [], "text": "", "finish_reason": "length"}
    choice["raw_output"]["completion_token_ids"] = []
    choice["logprobs"] = None
    body["usage"] |= {"completion_tokens": 0, "total_tokens": 4}
    (turn,) = parse(body, fireworks_request())
    assert len(turn.completion_token_ids) == 0
    choice["logprobs"] = {"content": [{"logprob": -0.5, "sampling_logprob": -0.5}]}
    assert refused(body, fireworks_request()).code == "length-mismatch"


def change(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The reply with one value replaced."""
    body: Any = fireworks_reply()
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return body


CHOICE = ("choices", 0)
ROW = (*CHOICE, "logprobs", "content", 1)


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        ((*CHOICE, "token_ids", 1), 424, "statement-contradicted"),
        ((*CHOICE, "token_ids"), IDS[:-1], "length-mismatch"),
        ((*CHOICE, "token_ids"), [], "length-mismatch"),
        ((*CHOICE, "raw_output", "completion_token_ids", 0), 573, "statement-contradicted"),
        ((*CHOICE, "raw_output", "prompt_token_ids", 0), 2, "statement-contradicted"),
        ((*CHOICE, "prompt_token_ids"), PROMPT[1:], "length-mismatch"),
        (("prompt_token_ids",), PROMPT[::-1], "statement-contradicted"),
        ((*ROW, "token_id"), 424, "statement-contradicted"),
        ((*ROW, "token_id"), None, "statement-contradicted"),
        ((*ROW, "top_logprobs", 0, "logprob"), -0.5, "statement-contradicted"),
        ((*ROW, "token"), " ends", "text-mismatch"),
        ((*CHOICE, "text"), " Chen ends with 12", "text-mismatch"),
        (("usage", "completion_tokens"), 6, "usage-mismatch"),
        (("usage", "prompt_tokens"), 5, "usage-mismatch"),
        (("usage", "total_tokens"), 10, "usage-mismatch"),
        ((*CHOICE, "finish_reason"), None, "route-unsupported"),
        ((*CHOICE, "finish_reason"), "unknown", "reply-malformed"),
        ((*CHOICE, "index"), 1, "reply-malformed"),
        (("choices",), [], "reply-malformed"),
        ((*ROW, "sampling_logprob"), math.nan, "logprob-not-finite"),
        ((*ROW, "sampling_logprob"), False, "reply-malformed"),
        ((*ROW, "logprob"), math.inf, "logprob-not-finite"),
        ((*ROW, "logprob"), "-0.25", "reply-malformed"),
        ((*ROW, "token_id"), 423.0, "reply-malformed"),
        ((*ROW, "token_id"), -1, "reply-malformed"),
        ((*CHOICE, "token_ids", 0), True, "reply-malformed"),
    ],
)
def test_what_disagrees_or_is_no_number_is_refused(path, value, code):
    body = change(path, value)
    if path[:-1] == ROW and path[-1] == "logprob":
        body["choices"][0]["logprobs"]["content"][1]["top_logprobs"] = []
    error = refused(body, fireworks_request())
    assert error.code == code
    for secret in (" Chen", "579"):
        assert secret not in str(error)


def test_choices_follow_the_prompts_of_the_request():
    body = fireworks_reply()
    second = copy.deepcopy(choice_of(body)) | {"index": 1}
    body["choices"].insert(0, second)
    body["usage"] = {"prompt_tokens": 4, "completion_tokens": 10, "total_tokens": 14}
    assert len(parse(body, fireworks_request(n=2))) == 2
    error = refused(body, fireworks_request(n=3))
    assert "2 choices; the request has 1 prompts, n=3" in str(error)
    assert refused(body, fireworks_request(prompt=[PROMPT, PROMPT[1:]])).code == "length-mismatch"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 40},
        {"typical_p": 0.9},
        {"mirostat_target": 2.0},
        {"response_format": {"type": "grammar", "grammar": "root"}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_a_request_that_the_provenance_denies_or_cannot_state_is_refused(fields):
    assert refused(fireworks_reply(), fireworks_request(**fields)).code == "statement-contradicted"


# -- echo ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "sent"), [(None, {}), (2, {"echo_last": 2}), (4, {"echo_last": 4})])
def test_an_echo_is_stripped_from_ids_and_both_lists(last, sent):
    (turn,) = parse(fireworks_echo(last), fireworks_request(echo=True, **sent))
    assert_the_turn(turn)


def test_echo_last_beyond_the_prompt_is_all_of_it():
    assert_the_turn(parse(fireworks_echo(), fireworks_request(echo=True, echo_last=99))[0])


def test_an_echo_that_nobody_asked_for_or_that_is_another_prompt_is_refused():
    # Nobody says that the first rows are the prompt's: the counts disagree, and the first row is null.
    for body in (fireworks_echo(2), fireworks_echo()):
        assert refused(body, fireworks_request()).code == "usage-mismatch"
        del body["usage"]
        assert refused(body, fireworks_request(max_tokens=9)).code == "logprob-missing"
    assert refused(fireworks_reply(), fireworks_request(echo=True)).code == "statement-contradicted"
    assert refused(fireworks_echo(2), fireworks_request(echo=True)).code == "statement-contradicted"
    body = fireworks_echo(2)
    body["choices"][0]["logprobs"]["content"] = [{**each, "token_id": None} for each in fireworks_entries()]
    error = refused(body, fireworks_request(echo=True, echo_last=2))
    assert error.code == "length-mismatch"
    assert "5 logprobs for 7 ids, 2 of them echoed" in str(error)


def test_a_text_that_begins_with_the_prompts_is_not_kept_as_the_completions():
    assert parse(fireworks_echo(), fireworks_request(echo=True))[0].text is None
    assert parse(fireworks_reply(), fireworks_request())[0].text == " Chen starts with 12"


def without_nulls(body: dict[str, Any]) -> dict[str, Any]:
    """Every row with a logprob, as an echo of the prompt's end has them."""
    for row in choice_of(body)["logprobs"]["content"]:
        row |= {"logprob": -1.0, "sampling_logprob": -1.0, "top_logprobs": []}
    return body


@pytest.mark.parametrize(("last", "num"), [(None, 4), (2, 2), (1, 1)])
def test_without_its_request_an_echo_is_never_taken_for_sampled_tokens(last, num):
    body = without_nulls(fireworks_echo(last))
    for usage in (body["usage"], {"prompt_tokens": 4}, None):
        body["usage"] = usage
        error = refused(body)
        assert error.code == "echo-unsupported"
        assert f"the first {num} ids are the last {num} of the prompt" in str(error)
    sent = {"echo": True} if last is None else {"echo_last": last}
    assert parse(body, fireworks_request(**sent))[0].completion_token_ids.tolist() == IDS


def test_sampled_tokens_that_are_like_the_prompts_end_pass_where_request_or_usage_counts_them():
    body = without_nulls(fireworks_echo(1))
    ids = [PROMPT[-1], *IDS]
    body["usage"] = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert parse(body)[0].completion_token_ids.tolist() == ids
    del body["usage"]
    assert parse(body, fireworks_request())[0].completion_token_ids.tolist() == ids
    plain = fireworks_reply()
    del plain["usage"]
    assert_the_turn(parse(plain)[0])


# -- streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(5,), (1, 3, 5), (1, 2, 3, 4, 5)])
def test_chunks_give_the_whole_reply(sizes):
    (turn,) = streamed(fireworks_chunks(sizes), fireworks_request(stream=True))
    assert_the_turn(turn)
    assert turn.text == " Chen starts with 12<|im_end|>"


def test_either_count_of_the_whole_suffices_and_one_is_needed():
    for dropped in ({"usage"}, {"raw_output"}, {"usage", "raw_output"}):
        events = fireworks_chunks()
        if "usage" in dropped:
            events[-1]["usage"] = None
        if "raw_output" in dropped:
            choice_of(events[-1])["raw_output"] = None
        if len(dropped) == 1:
            assert_the_turn(streamed(events)[0])
        else:
            error = stream_refused(events)
            assert error.code == "stream-truncated"
            assert "would not show" in str(error)


def test_a_lost_repeated_or_foreign_chunk_is_refused():
    events = fireworks_chunks()
    assert stream_refused([events[0], events[2]]).code == "length-mismatch"
    assert stream_refused([events[0], events[1], events[1], events[2]]).code == "length-mismatch"
    assert stream_refused([events[1], events[0], events[2]]).code == "statement-contradicted"
    assert stream_refused([*events, events[2]]).code == "stream-disordered"
    assert stream_refused(events[:2]).code == "stream-truncated"
    assert stream_refused([]).code == "stream-truncated"
    events[1]["id"] = "cmpl-8"
    assert stream_refused(events).code == "stream-disordered"


def test_raw_output_in_several_chunks_goes_on_from_itself():
    events = fireworks_chunks()
    choice_of(events[1])["raw_output"] = {"completion_token_ids": IDS[:3], "prompt_token_ids": PROMPT}
    assert_the_turn(streamed(events)[0])
    choice_of(events[1])["raw_output"] = {"completion_token_ids": [9], "prompt_token_ids": PROMPT}
    assert stream_refused(events).code == "stream-disordered"


def test_an_error_within_the_stream_is_an_error():
    events = [*fireworks_chunks()[:1], {"error": {"message": "secret", "code": 503}}]
    error = stream_refused(events)
    assert error.code == "reply-error-body"
    assert "secret" not in str(error)
