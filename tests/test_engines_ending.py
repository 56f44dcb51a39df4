"""What reply and request say of a completion's end, against its ids: three engines, whole and streamed.

The ids of the replies written by hand end with 4, of five; vLLM's are recorded.
"""

import copy
import json
from typing import Any

import pytest
from replies_by_hand import (
    IDS,
    PROMPT,
    fireworks_reply,
    fireworks_request,
    sglang_chunks,
    sglang_reply,
    sglang_request,
)
from test_engines import PARSED, parse, provenance_of, recorded
from test_engines_request import NEUTRAL, code_of, reply, turns

from rlbatch.engines import ResponseAssembler, parse_response
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance, SamplingParams, Turn


def by_hand(engine: str) -> Provenance:
    sampling = SamplingParams(temperature=1.0)
    return Provenance(engine=engine, logprobs_mode="processed", sampling=sampling)


def refused(body: Any, request: Any, provenance: Provenance) -> str:
    with pytest.raises(ReplyError) as caught:
        parse_response(body, request=request, provenance=provenance)
    return f"{caught.value.code}: {caught.value.findings[0].found}"


# -- the stop token -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["completions", "chat", "generate"])
def test_the_stop_token_that_vllm_names_is_the_last_id(route):
    body = reply(
        route, {"token_ids": [7, 2], "stop_reason": 2, "prompt_token_ids": [1]}, prompt_token_ids=[1]
    )
    assert turns(body)[0].stop_reason == 2
    body["choices"][0]["stop_reason"] = 99
    assert code_of(body) == "finish-mismatch: choice 0: the last of 2 ids is another"
    # A parser may rename the end, which is the same.
    body["choices"][0]["finish_reason"] = "tool_calls"
    assert code_of(body).startswith("finish-mismatch")
    empty = reply(route, {"token_ids": [], "stop_reason": 2}, prompt_token_ids=[1])
    if route != "completions":
        assert code_of(empty) == "finish-mismatch: choice 0: no ids"


@pytest.mark.parametrize("stop_reason", [None, "stop", "2"])
def test_a_stop_string_or_the_main_eos_says_nothing_of_the_last_id(stop_reason):
    body = reply("generate", {"token_ids": [7, 5], "stop_reason": stop_reason}, prompt_token_ids=[1])
    assert turns(body)[0].stop_reason == stop_reason


@pytest.mark.parametrize(
    "key", ["fp32_raw/chat_toolcall_stop_token.json", "fp32_raw/completions_stop_token_id.json"]
)
def test_a_recorded_stop_token_that_was_cut_off_with_its_logprob_is_refused(key):
    """As when ids and logprobs are both encoded again without the end: all lengths agree."""
    (whole,) = parse(key)
    assert whole.completion_token_ids[-1] == whole.stop_reason
    body, request = recorded(key)
    choice = body["choices"][0]
    del choice["token_ids"][-1]
    for rows in choice["logprobs"].values():
        if rows:
            del rows[-1]
    body["usage"]["completion_tokens"] -= 1
    body["usage"]["total_tokens"] -= 1
    assert refused(body, request, provenance_of(key, request)).startswith("finish-mismatch")


# -- the most tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", PARSED)
def test_every_recorded_reply_has_no_more_ids_than_were_asked_for_and_is_refused_where_one_less_was(key):
    body, request = recorded(key)
    longest = max(len(turn.completion_token_ids) for turn in parse(key))
    changed = copy.deepcopy(request)
    changed.get("sampling_params", changed)["max_tokens"] = longest - 1
    found = refused(body, changed, provenance_of(key, request))
    assert found.startswith("statement-contradicted: choice")
    assert found.endswith(f": {longest} ids")


@pytest.mark.parametrize(
    ("route", "fields", "fits"),
    [
        ("completions", {"max_tokens": 3}, True),
        ("completions", {"max_tokens": 1}, False),
        ("completions", {"max_tokens": 0}, False),
        ("completions", {"max_tokens": None}, True),
        # Of chat only, where the newer name counts before the older one.
        ("completions", {"max_completion_tokens": 1}, True),
        ("chat", {"max_completion_tokens": 1}, False),
        ("chat", {"max_completion_tokens": 3, "max_tokens": 1}, True),
        ("chat", {"max_completion_tokens": 1, "max_tokens": 3}, False),
        ("chat", {"max_completion_tokens": None, "max_tokens": 1}, False),
        ("generate", {"max_tokens": 1}, False),
        ("generate", {"max_tokens": 3}, True),
    ],
)
def test_more_ids_than_the_request_asked_for_contradict_it(route, fields, fits):
    body = reply(route, {"token_ids": [7, 8, 9], "finish_reason": "length"}, prompt_token_ids=[1])
    if route == "completions":
        body["choices"][0]["prompt_token_ids"] = [1]
    request: dict[str, Any] = {
        "completions": {"prompt": [1], **fields},
        "chat": {"messages": [], **fields},
        "generate": {"token_ids": [1], "sampling_params": fields},
    }[route]
    if fits:
        assert turns(body, request)[0].completion_token_ids.tolist() == [7, 8, 9]
    else:
        assert code_of(body, request) == "statement-contradicted: choice 0: 3 ids"


def test_fewer_ids_than_were_asked_for_prove_nothing():
    """The context may have been full, or a stop string found: neither can be told from the reply."""
    for finish_reason in ("length", "stop", "abort"):
        body = reply("completions", {"token_ids": [7], "finish_reason": finish_reason})
        assert len(turns(body, {"prompt": [1], "max_tokens": 100}, NEUTRAL)) == 1


def test_each_engine_has_its_own_name_for_the_most_tokens():
    fits, too_many = sglang_request(), sglang_request()
    fits["sampling_params"]["max_new_tokens"] = 5
    too_many["sampling_params"]["max_new_tokens"] = 4
    (turn,) = parse_response(sglang_reply(), request=fits, provenance=by_hand("sglang"))
    assert turn.completion_token_ids.tolist() == IDS
    assert refused(sglang_reply(), too_many, by_hand("sglang")) == "statement-contradicted: choice 0: 5 ids"
    (turn,) = parse_response(
        fireworks_reply(), request=fireworks_request(max_tokens=5), provenance=by_hand("fireworks")
    )
    assert turn.completion_token_ids.tolist() == IDS
    found = refused(fireworks_reply(), fireworks_request(max_tokens=4), by_hand("fireworks"))
    assert found == "statement-contradicted: choice 0: 5 ids"


def test_prompts_with_parameters_of_their_own_have_their_own_most_tokens():
    def sampling(*limits: int) -> list[dict[str, Any]]:
        return [{"temperature": 1.0, "n": 2, "max_new_tokens": limit} for limit in limits]

    replies = [sglang_reply() for _ in range(4)]
    request = sglang_request(input_ids=[PROMPT, PROMPT], sampling_params=sampling(5, 5))
    assert len(parse_response(replies, request=request, provenance=by_hand("sglang"))) == 4
    request = sglang_request(input_ids=[PROMPT, PROMPT], sampling_params=sampling(5, 4))
    assert refused(replies, request, by_hand("sglang")) == "statement-contradicted: choice 2: 5 ids"


def test_the_end_of_a_stream_is_held_against_its_ids_too():
    def streamed(events: list[Any], request: Any) -> list[Turn]:
        assembler = ResponseAssembler(request=request, provenance=by_hand("sglang"))
        assembler.feed("".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n")
        return assembler.finish()

    events = sglang_chunks(incremental=True)
    assert len(streamed(events, sglang_request(stream=True))) == 1
    request = sglang_request(stream=True, sampling_params={"max_new_tokens": 4})
    with pytest.raises(ReplyError, match="at most the 4 tokens"):
        streamed(events, request)
    events[-1]["meta_info"]["finish_reason"]["matched"] = 5
    with pytest.raises(ReplyError, match="finish-mismatch"):
        streamed(events, sglang_request(stream=True))
