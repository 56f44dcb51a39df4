"""What a request says: its prompts, and each statement that a reply or a provenance can deny."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlbatch.engines import parse_response
from rlbatch.errors import RecordError, ReplyError
from rlbatch.records import Provenance, SamplingParams, Turn

REPLIES = Path(__file__).parent / "data" / "vllm-0.32.0" / "replies"
NEUTRAL = Provenance(engine="vllm", logprobs_mode="processed", sampling=SamplingParams(temperature=1.0))


def reply(route: str, *choices: dict[str, Any], **top: Any) -> dict[str, Any]:
    """A small body of this route; each choice is given by its ids, and every logprob is -0.5."""
    head: dict[str, Any] = {
        "completions": {"id": "cmpl-1", "object": "text_completion"},
        "chat": {"id": "chatcmpl-1", "object": "chat.completion"},
        "generate": {"request_id": "generate-1", "output_mode": "tokens"},
    }[route]
    body = {**head, "choices": [], "usage": {}, **top}
    for index, choice in enumerate(choices):
        num = len(choice["token_ids"])
        content = {"content": [{"logprob": -0.5} for _ in range(num)]}
        logprobs = {"token_logprobs": [-0.5] * num} if route == "completions" else content
        body["choices"].append({"index": index, "finish_reason": "stop", "logprobs": logprobs, **choice})
    return body


def turns(body: Any, request: Any = None, provenance: Provenance = NEUTRAL) -> list[Turn]:
    return parse_response(body, request=request, provenance=provenance)


def code_of(body: Any, request: Any = None, provenance: Provenance = NEUTRAL) -> str:
    with pytest.raises(ReplyError) as caught:
        turns(body, request, provenance)
    return f"{caught.value.code}: {caught.value.findings[0].found}"


# -- prompt ids -------------------------------------------------------------------------------------------


def test_prompt_ids_come_from_the_request_where_the_reply_has_none():
    body = reply("generate", {"token_ids": [7, 2]})
    (turn,) = turns(body, {"token_ids": [1, 5, 6], "sampling_params": {}})
    assert turn.prompt_token_ids.tolist() == [1, 5, 6]
    body = reply("completions", {"token_ids": [7, 2]})
    (turn,) = turns(body, {"prompt": [1, 5]})
    assert turn.prompt_token_ids.tolist() == [1, 5]


@pytest.mark.parametrize(
    "request_body", [None, {}, {"prompt": "text"}, {"prompt": ["text"]}, {"prompt": [[]]}, {"prompt": None}]
)
def test_a_prompt_that_is_no_list_of_ids_gives_none(request_body):
    body = reply("completions", {"token_ids": [7, 2]})
    assert code_of(body, request_body).startswith("prompt-ids-missing")


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([1, True], "a list of bool, int"),
        ([1, 5.0], "a list of float, int"),
        ([1, -5], "a list of int"),
        ([1, 2**31], "a list of int"),
        ([[1, 5], [1, -5]], "a list of int"),
        (["text", 5], "a list of int, str"),
        (np.array([1, 5]), "ndarray"),
        ([np.int64(1), np.int64(5)], "a list of int64"),
        ({"prompt_token_ids": [1, 5]}, "dict"),
        ({1, 5}, "set"),
        (b"text", "bytes"),
        (7, "int"),
    ],
)
def test_a_prompt_in_no_form_that_a_request_has_is_a_record_error_and_never_passes_for_text(prompt, found):
    """Nothing could be compared with the reply's own ids, and what contradicts them would pass."""
    for route, field in (("completions", "prompt"), ("generate", "token_ids")):
        body = reply(route, {"token_ids": [7, 2]})
        place = body["choices"][0] if route == "completions" else body
        place["prompt_token_ids"] = [1, 5]
        assert len(turns(body, {field: [1, 5]})) == 1
        with pytest.raises(RecordError, match="expected the prompt as it was sent") as caught:
            turns(body, {field: prompt})
        assert route == "generate" or f"found {found};" in str(caught.value)


def test_text_is_no_prompt_of_the_route_that_takes_ids_alone():
    body = reply("generate", {"token_ids": [7, 2]}, prompt_token_ids=[1, 5])
    with pytest.raises(RecordError, match="as it was sent: ids, where"):
        turns(body, {"token_ids": "text"})


def test_chat_never_takes_ids_from_the_request():
    body = reply("chat", {"token_ids": [7, 2]})
    assert code_of(body, {"messages": [1, 2], "prompt": [1, 2]}).startswith("prompt-ids-missing")


def test_choices_belong_to_prompts_in_runs_of_n():
    # Two prompts, n=2: choices 0 and 1 are of the first, 2 and 3 of the second.
    body = reply("completions", *[{"token_ids": [10 + i]} for i in range(4)])
    body["usage"] = {"prompt_tokens": 5, "completion_tokens": 4}
    for request in ({"prompt": [[1, 5], [1, 6, 7]], "n": 2}, {"prompt": [[1, 5], [1, 6, 7]]}):
        result = turns(body, request)
        assert [turn.prompt_token_ids.tolist() for turn in result] == [[1, 5], [1, 5], [1, 6, 7], [1, 6, 7]]
        assert [turn.completion_token_ids.tolist() for turn in result] == [[10], [11], [12], [13]]
    body["usage"]["prompt_tokens"] = 10
    assert "prompt_tokens is 10, the lists have 5 ids" in code_of(body, {"prompt": [[1, 5], [1, 6, 7]]})


def test_each_choices_own_prompt_ids_are_used_and_compared():
    prompts = [[1, 5], [1, 6, 7]]
    choices = [{"token_ids": [10 + i], "prompt_token_ids": prompt} for i, prompt in enumerate(prompts)]
    body = reply("completions", *choices)
    assert [turn.prompt_token_ids.tolist() for turn in turns(body)] == prompts
    assert len(turns(body, {"prompt": prompts})) == 2
    found = code_of(body, {"prompt": [[1, 5], [1, 6, 8]]})
    assert "choice 1: 3 ids in the reply, 3 in the request; they differ first at token 2" in found
    found = code_of(body, {"prompt": [[1, 5], [1, 6, 7, 8]]})
    assert "choice 1: 3 ids in the reply, 4 in the request; one is the beginning of the other" in found
    # Swapped prompts have the right lengths in sum, and the wrong places.
    assert code_of(body, {"prompt": prompts[::-1]}).startswith("statement-contradicted: choice 0")


@pytest.mark.parametrize("route", ["chat", "generate"])
def test_one_prompt_of_several_choices_is_at_the_top(route):
    body = reply(route, {"token_ids": [7]}, {"token_ids": [8, 2]}, prompt_token_ids=[1, 5])
    body["usage"] = {"prompt_tokens": 2, "completion_tokens": 3}
    assert [turn.prompt_token_ids.tolist() for turn in turns(body)] == [[1, 5], [1, 5]]
    body["usage"]["prompt_tokens"] = 4
    assert code_of(body).startswith("usage-mismatch")


@pytest.mark.parametrize(
    ("route", "request_body"),
    [
        ("completions", {"prompt": [1, 5], "n": 3}),
        ("completions", {"prompt": "text", "n": 1}),
        ("completions", {"prompt": [[1, 5], [1, 5]], "n": 2}),
        ("completions", {"prompt": ["a", "b", "c"]}),
        ("completions", {"prompt": []}),
        ("chat", {"messages": [], "n": 1}),
        ("generate", {"token_ids": [1, 5], "sampling_params": {"n": 3}}),
    ],
)
def test_another_number_of_choices_than_asked_for_is_refused(route, request_body):
    where = {"prompt_token_ids": [1, 5]}
    body = reply(route, {"token_ids": [7]}, {"token_ids": [8]}, **where)
    assert code_of(body, request_body).startswith("statement-contradicted: 2 choices")


def test_a_request_of_another_route_is_refused():
    body = reply("completions", {"token_ids": [7], "prompt_token_ids": [1]})
    assert "the request has `messages`; the reply is of completions" in code_of(body, {"messages": []})
    body = reply("chat", {"token_ids": [7]}, prompt_token_ids=[1])
    assert "the request has `token_ids`; the reply is of chat" in code_of(body, {"token_ids": [1]})


@pytest.mark.parametrize("key", ["completions_prompt_as_ids", "generate_lp2_retids"])
def test_recorded_ids_that_differ_between_request_and_reply_are_refused(key):
    recording = json.loads((REPLIES / "fp32_raw" / f"{key}.json").read_text())
    fields = recording["request"].get("sampling_params") or recording["request"]
    sampling = SamplingParams(temperature=fields["temperature"])
    provenance = replace(NEUTRAL, logprobs_mode="raw", sampling=sampling)
    assert len(turns(recording["response"], recording["request"], provenance)) == 1
    request = copy.deepcopy(recording["request"])
    request["prompt" if "prompt" in request else "token_ids"][3] += 1
    assert "they differ first at token 3" in code_of(recording["response"], request, provenance)


def test_a_recorded_reply_with_its_own_prompt_ids_needs_no_request():
    recording = json.loads((REPLIES / "fp32_raw" / "chat_imend.json").read_text())
    provenance = replace(NEUTRAL, sampling=SamplingParams(temperature=0.0))
    (turn,) = turns(recording["response"], None, provenance)
    assert len(turn.prompt_token_ids) == 29


# -- sampling ---------------------------------------------------------------------------------------------


def everything_in_force() -> tuple[dict[str, Any], SamplingParams]:
    """A request that names every field, and the parameters that say the same."""
    request = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "min_tokens": 4,
        "logit_bias": {"5": 1.0},
        "allowed_token_ids": [5, 6],
        "bad_words": ["x"],
        "structured_outputs": {"choice": ["7"]},
    }
    sampling = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        min_tokens=4,
        logit_bias=True,
        allowed_token_ids=True,
        bad_words=True,
        structured_output=True,
    )
    return request, sampling


def of_route(route: str, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A reply, and a request of its route with these sampling fields in their place."""
    body = reply(route, {"token_ids": [7, 2]}, prompt_token_ids=[1, 5])
    if route == "generate":
        return body, {"token_ids": [1, 5], "sampling_params": fields}
    prompt = {"prompt": [1, 5]} if route == "completions" else {"messages": []}
    return body, {**prompt, **fields}


@pytest.mark.parametrize("route", ["completions", "chat", "generate"])
def test_a_request_that_says_what_the_provenance_says_is_accepted(route):
    fields, sampling = everything_in_force()
    body, request = of_route(route, fields)
    assert len(turns(body, request, replace(NEUTRAL, sampling=sampling))) == 1


@pytest.mark.parametrize("route", ["completions", "chat", "generate"])
@pytest.mark.parametrize("absent", [True, False])
def test_a_field_that_is_absent_or_null_contradicts_nothing(route, absent):
    fields, sampling = everything_in_force()
    body, request = of_route(route, {} if absent else dict.fromkeys(fields))
    assert len(turns(body, request, replace(NEUTRAL, sampling=sampling))) == 1


@pytest.mark.parametrize("route", ["completions", "chat", "generate"])
@pytest.mark.parametrize("name", list(everything_in_force()[0]))
def test_each_field_that_the_provenance_denies_is_refused_by_name(route, name):
    fields, _ = everything_in_force()
    body, request = of_route(route, {name: fields[name]})
    found = code_of(body, request)
    assert found.startswith("statement-contradicted")
    assert (name if name != "structured_outputs" else "grammar") in found


def test_all_contradictions_are_reported_at_once():
    fields, _ = everything_in_force()
    body, request = of_route("chat", fields)
    with pytest.raises(ReplyError) as caught:
        turns(body, request)
    assert len(caught.value.findings) == len(fields)


@pytest.mark.parametrize("off", [-1, 0])
def test_both_of_vllms_ways_to_turn_top_k_off_are_neutral(off):
    body, request = of_route("completions", {"top_k": off})
    assert len(turns(body, request)) == 1
    truncated = replace(NEUTRAL, sampling=SamplingParams(temperature=1.0, top_k=5))
    assert f"top_k={off}" in code_of(body, request, truncated)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_words"])
def test_an_empty_value_says_that_it_was_off(name):
    body, request = of_route("completions", {name: []})
    assert len(turns(body, request)) == 1
    on = replace(NEUTRAL, sampling=SamplingParams(temperature=1.0, **{name: True}))
    assert f"left {name} empty" in code_of(body, request, on)


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": {}}},
        {"guided_json": {"type": "object"}},
        {"guided_regex": "a+"},
        {"guided_choice": ["a"]},
        {"guided_grammar": "root ::= x"},
        {"guided_decoding": {"choice": ["a"]}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"response_format": {"type": "structural_tag"}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
)
def test_every_way_to_ask_for_a_grammar_is_seen(fields):
    body, request = of_route("chat", fields)
    assert "asked for a grammar; the provenance says structured_output=False" in code_of(body, request)
    stated = replace(NEUTRAL, sampling=SamplingParams(temperature=1.0, structured_output=True))
    assert len(turns(body, request, stated)) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": [{}]},
    ],
)
def test_what_puts_no_grammar_over_the_sampling_contradicts_nothing(fields):
    body, request = of_route("chat", fields)
    assert len(turns(body, request)) == 1


@pytest.mark.parametrize("value", ["1.0", True, [1.0]])
def test_a_temperature_that_is_no_number_is_not_taken_for_one(value):
    body, request = of_route("completions", {"temperature": value})
    assert code_of(body, request).startswith("statement-contradicted")


def test_fields_in_the_place_of_another_route_are_ignored_as_the_engine_ignores_them():
    body, request = of_route("generate", {"temperature": 1.0})
    assert len(turns(body, {**request, "temperature": 0.2})) == 1
    body, request = of_route("completions", {"temperature": 1.0})
    assert len(turns(body, {**request, "sampling_params": {"temperature": 0.2}})) == 1


def test_beam_search_is_no_sampling():
    body, request = of_route("completions", {"use_beam_search": True})
    assert "use_beam_search" in code_of(body, request)
