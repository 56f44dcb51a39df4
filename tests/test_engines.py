"""Recorded replies of a real vLLM against a table, and each kind of damage to a reply or its request."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from engines_expected import EXPECTED, Choice, Refused
from replies_by_hand import IDS, fireworks_chunks, fireworks_reply, sglang_chunks, sglang_reply

import rlbatch.engines
from rlbatch.engines import MAX_REPLY_BYTES, ResponseAssembler, parse_response
from rlbatch.errors import RecordError, ReplyError
from rlbatch.records import Provenance, SamplingParams, Turn, VersionSpan, identical

REPLIES = Path(__file__).parent / "data" / "vllm-0.32.0" / "replies"
STREAMED = ("_stream.json", "_stream_ids_lp.json", "_stream_ids_lp0.json", "_stream_ids_lp1.json")
STREAMED += ("_stream_lp0.json", "_stream_noids_lp0_usage.json", "_stream_unicode_ids.json")


def recorded(key: str) -> tuple[Any, Any]:
    """The body and the request under a key of the table."""
    name, _, part = key.partition("#")
    recording = json.loads((REPLIES / name).read_text(encoding="utf-8"))
    if part:
        pair, turn = part.split(".")
        recording = recording["turns"][int(pair)][turn]
    body = next(recording[field] for field in ("response", "sse", "response_text") if field in recording)
    # A request that was not JSON is no request object.
    return body, recording["request"] if isinstance(recording["request"], dict) else None


def provenance_of(key: str, request: dict[str, Any] | None) -> Provenance:
    """As the server was started and the request was sent; unnamed fields were neutral on these servers."""
    fields = (request or {}).get("sampling_params") or request or {}
    modes = {"processed": "processed", "raw": "raw", "hermes": "raw", "rawlogits": "unknown"}
    server = key.split("/")[0].split("_")[1]
    sampling = SamplingParams(
        # An error body's request may hold a temperature that no SamplingParams can.
        temperature=max(fields.get("temperature", 1.0), 0),
        top_p=fields.get("top_p", 1.0),
        top_k=max(fields.get("top_k", 0), 0),
        min_p=fields.get("min_p", 0.0),
        repetition_penalty=fields.get("repetition_penalty", 1.0),
        logit_bias="logit_bias" in fields,
        allowed_token_ids="allowed_token_ids" in fields,
        bad_words="bad_words" in fields,
        min_tokens=fields.get("min_tokens", 0),
        structured_output=fields.get("tool_choice") == "required",
    )
    return Provenance(engine="vllm", logprobs_mode=modes[server], sampling=sampling)


def parse(key: str) -> list[Turn]:
    body, request = recorded(key)
    provenance = provenance_of(key, request)
    if not key.endswith(STREAMED):
        return parse_response(body, request=request, provenance=provenance)
    assembler = ResponseAssembler(request=request, provenance=provenance)
    assembler.feed(body)
    return assembler.finish()


def reported(turn: Turn) -> np.ndarray:
    """The engine's values, under whichever name they are kept."""
    return turn.inference_logprobs if turn.raw_inference_logprobs is None else turn.raw_inference_logprobs


def summary(turn: Turn) -> Choice:
    values = reported(turn)
    return Choice(
        num_prompt=len(turn.prompt_token_ids),
        num_completion=len(turn.completion_token_ids),
        finish_reason=turn.finish_reason or "",
        stop_reason=turn.stop_reason,
        sum_logprobs=round(math.fsum(values.tolist()), 6),
        first_id=int(turn.completion_token_ids[0]),
        last_id=int(turn.completion_token_ids[-1]),
    )


def walk(body: dict[str, Any], request: dict[str, Any]) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Prompt ids, ids and logprobs of each choice, straight from the JSON."""
    for choice in body["choices"]:
        logprobs = choice["logprobs"]
        values = (
            logprobs["token_logprobs"]
            if "token_logprobs" in logprobs
            else [entry["logprob"] for entry in logprobs["content"]]
        )
        prompt = choice.get("prompt_token_ids") or body.get("prompt_token_ids") or request["token_ids"]
        # An echo has the prompt's rows in front.
        yield prompt, choice["token_ids"], values[-len(choice["token_ids"]) :]


READ = [key for key, outcome in EXPECTED.items() if not isinstance(outcome, Refused)]
PARSED = [key for key in READ if not key.endswith(STREAMED)]
STREAMS = [key for key in EXPECTED if key.endswith(STREAMED)]
REFUSED = [key for key, outcome in EXPECTED.items() if isinstance(outcome, Refused)]


# -- every recorded reply ---------------------------------------------------------------------------------


def test_table_names_every_recorded_reply_and_nothing_else():
    files = {path.relative_to(REPLIES).as_posix() for path in REPLIES.rglob("*") if path.is_file()}
    assert {key.partition("#")[0] for key in EXPECTED} == files
    pairs = json.loads((REPLIES / "fp32_raw/chat_multi_turn_t0.json").read_text())["turns"]
    assert len([key for key in EXPECTED if "#" in key]) == 2 * len(pairs)


@pytest.mark.parametrize("key", PARSED)
def test_recorded_reply_parses_to_the_numbers_of_the_table(key):
    turns = parse(key)
    body, request = recorded(key)
    assert [summary(turn) for turn in turns] == EXPECTED[key]
    for turn, (prompt, ids, values) in zip(turns, walk(body, request), strict=True):
        assert turn.prompt_token_ids.tolist() == prompt
        assert turn.completion_token_ids.tolist() == ids
        # vLLM prints float32 values as doubles: nothing is rounded on the way back.
        assert reported(turn).tolist() == values


@pytest.mark.parametrize("key", REFUSED)
def test_recorded_reply_is_refused_for_the_reason_of_the_table(key):
    expected = EXPECTED[key]
    with pytest.raises(ReplyError) as caught:
        parse(key)
    assert caught.value.code == expected.code
    assert expected.says in str(caught.value)


@pytest.mark.parametrize(
    ("key", "counted"),
    [
        # Read off the printed files; logprobs cut out with grep and added up with awk, by no reader of JSON.
        ("bf16_raw/completions_ids_lp1_t13.json", Choice(22, 5, "stop", 4, -8.951838, 569, 4)),
        ("fp32_hermes/chat_tool_required.json", Choice(23, 22, "tool_calls", 4, -3.759345, 1532, 4)),
        ("fp32_processed/chat_abort.json", Choice(15, 121, "abort", None, -105.621034, 539, 319)),
        (
            "fp32_processed/chat_ids_lp_top5_t1_topk2.json",
            Choice(15, 3, "length", None, -0.457465, 1532, 361),
        ),
        ("fp32_processed/generate_lp5_t1_topk2.json", Choice(22, 3, "length", None, -0.650208, 572, 331)),
        ("fp32_raw/chat_double_bos.json", Choice(30, 3, "length", None, -2.071512, 1534, 595)),
        ("fp32_raw/chat_two_turns.json", Choice(60, 6, "stop", 4, -4.587143, 454, 4)),
        ("fp32_raw/completions_allowed_tokens_t1.json", Choice(22, 4, "length", None, -39.073483, 268, 268)),
        ("fp32_raw/completions_asids_ids_lp2.json", Choice(22, 4, "length", None, -2.644695, 572, 448)),
        ("fp32_raw/completions_empty_after_stop.json", Choice(23, 1, "stop", 572, -2.601981, 572, 572)),
        ("fp32_raw/completions_eos.json", Choice(22, 21, "stop", None, -6.13065, 572, 2)),
        ("fp32_raw/completions_stop_str_midtoken.json", Choice(22, 7, "stop", "ter", -2.798615, 572, 428)),
        ("fp32_raw/generate_text_mode.json", Choice(22, 4, "length", None, -2.644695, 572, 448)),
        ("fp32_rawlogits/generate_lp1_t07.json", Choice(22, 8, "length", None, 111.515905, 569, 426)),
    ],
)
def test_pinned_replies_have_the_numbers_read_off_the_files(key, counted):
    (turn,) = parse(key)
    assert summary(turn) == counted


@pytest.mark.parametrize("key", PARSED)
def test_bytes_text_and_object_give_identical_turns_and_the_object_is_unchanged(key):
    body, request = recorded(key)
    before = copy.deepcopy((body, request))
    provenance = provenance_of(key, request)
    text = json.dumps(body, ensure_ascii=False)
    payloads = [body, MappingProxyType(body), text, text.encode(), bytearray(text.encode())]
    first, *others = [parse_response(payload, request=request, provenance=provenance) for payload in payloads]
    assert (body, request) == before
    for turns in others:
        assert all(identical(a, b) for a, b in zip(first, turns, strict=True))


@pytest.mark.parametrize("key", PARSED)
def test_every_field_that_the_turn_carries_is_the_replys_own(key):
    body, _ = recorded(key)
    for turn, choice in zip(parse(key), body["choices"], strict=True):
        assert turn.request_id == body.get("id", body.get("request_id"))
        spans = choice.get("weight_versions") or []
        assert turn.policy_versions == tuple(
            VersionSpan(label=span["version"], start=span["start"], stop=span["end"]) for span in spans
        )
        if len(body["choices"]) == 1:
            assert turn.usage.num_prompt_tokens == body["usage"]["prompt_tokens"]
            assert turn.usage.num_completion_tokens == body["usage"]["completion_tokens"]
        if "message" not in choice:
            assert turn.text == choice.get("text")
        elif not choice["message"].get("tool_calls"):
            assert turn.text == choice["message"]["content"]
        else:
            assert turn.text is None


# -- the provenance decides where the values go -----------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "in_force"),
    [
        ("fp32_processed/completions_ids_lp1_t07_topp08.json", True),
        # Raw values at temperature 1 with nothing else are those of the sampled distribution.
        ("fp32_raw/completions_n2_t1.json", True),
        ("fp32_raw/completions_ids_lp1_t07.json", False),
        ("fp32_raw/completions_ids_lp1_t1_topk5.json", False),
        ("fp32_raw/completions_ids_lp1_t1_badwords.json", False),
        ("fp32_rawlogits/completions_ids_lp1_t07.json", False),
    ],
)
def test_values_are_inference_logprobs_only_where_they_are_of_the_sampled_distribution(key, in_force):
    for turn in parse(key):
        if in_force:
            assert turn.raw_inference_logprobs is None
            assert np.isfinite(turn.inference_logprobs).all()
        else:
            assert np.isnan(turn.inference_logprobs).all()
            assert np.isfinite(turn.raw_inference_logprobs).all()


# -- damage to a reply ------------------------------------------------------------------------------------

COMPLETIONS = "fp32_processed/completions_ids_lp1_t07.json"
CHAT = "fp32_processed/chat_ids_lp_top2_t07.json"
GENERATE = "fp32_processed/generate_lp1_t07.json"
ROUTES = [COMPLETIONS, CHAT, GENERATE]


def refused(key: str, body: Any, *, request: Any = None, provenance: Provenance | None = None) -> ReplyError:
    """The refusal of a changed body: the same of the object and, where JSON can say it, of bytes."""
    own = recorded(key)[1]
    provenance = provenance or provenance_of(key, own)
    with pytest.raises(ReplyError) as caught:
        parse_response(body, request=request or own, provenance=provenance)
    if not isinstance(body, (bytes, str)) and caught.value.code != "logprob-not-finite":
        with pytest.raises(ReplyError) as again:
            parse_response(json.dumps(body).encode(), request=request or own, provenance=provenance)
        assert str(again.value) == str(caught.value)
    return caught.value


def logprobs_of(body: dict[str, Any]) -> list[Any]:
    """The list that holds the logprobs: numbers for completions, entries for the others."""
    logprobs = body["choices"][0]["logprobs"]
    return logprobs["token_logprobs"] if "token_logprobs" in logprobs else logprobs["content"]


def set_logprob(body: dict[str, Any], at: int, value: Any) -> None:
    """Wherever the reply says it: the sampled token comes first among its alternatives."""
    values = logprobs_of(body)
    if isinstance(values[at], dict):
        values[at]["logprob"] = value
        for own in values[at].get("top_logprobs", [])[:1]:
            own["logprob"] = value
    else:
        values[at] = value
        logprobs = body["choices"][0]["logprobs"]
        logprobs["top_logprobs"][at][logprobs["tokens"][at]] = value


@pytest.mark.parametrize("key", ROUTES)
def test_one_logprob_dropped_is_a_length_mismatch(key):
    body, _ = recorded(key)
    num_ids = len(body["choices"][0]["token_ids"])
    del logprobs_of(body)[0]
    error = refused(key, body)
    assert error.code == "length-mismatch"
    assert f"choice 0: {num_ids - 1} logprobs for {num_ids} ids: 1 ids too many" in str(error)


@pytest.mark.parametrize("key", ROUTES)
def test_one_id_dropped_is_a_length_mismatch(key):
    body, _ = recorded(key)
    num_values = len(logprobs_of(body))
    del body["choices"][0]["token_ids"][-1]
    error = refused(key, body)
    assert error.code == "length-mismatch"
    assert f"choice 0: {num_values} logprobs for {num_values - 1} ids: 1 logprobs too many" in str(error)


@pytest.mark.parametrize("key", ROUTES)
def test_nulls_are_counted_and_located_and_never_become_nan(key):
    body, _ = recorded(key)
    for at in (1, 2, 3, 4, 5, 6):
        set_logprob(body, at, None)
    error = refused(key, body)
    assert error.code == "logprob-missing"
    num_ids = len(body["choices"][0]["token_ids"])
    assert f"choice 0: 6 of {num_ids} are null, at sampled token 1, 2, 3, 4, 5, ..." in str(error)


@pytest.mark.parametrize("key", [CHAT, GENERATE])
def test_an_entry_without_a_logprob_is_missing_not_zero(key):
    body, _ = recorded(key)
    del logprobs_of(body)[2]["logprob"]
    error = refused(key, body)
    assert error.code == "logprob-missing"
    assert "at sampled token 2" in str(error)


# 3.5e38 is above the largest float32, 3.4028e38.
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.5e38, -3.5e38])
@pytest.mark.parametrize("key", ROUTES)
def test_values_that_no_float32_holds_are_refused(key, value):
    body, _ = recorded(key)
    set_logprob(body, 3, value)
    error = refused(key, body)
    assert error.code == "logprob-not-finite"
    assert "choice 0: 1 of" in str(error)
    assert "at sampled token 3" in str(error)


@pytest.mark.parametrize("digits", ["1e400", "1" + "0" * 400, "-1e39"])
@pytest.mark.parametrize("key", ROUTES)
def test_json_numbers_that_overflow_are_not_finite(key, digits):
    body, request = recorded(key)
    set_logprob(body, 3, "HERE")
    text = json.dumps(body).replace('"HERE"', digits)
    with pytest.raises(ReplyError) as caught:
        parse_response(text, request=request, provenance=provenance_of(key, request))
    assert caught.value.code == "logprob-not-finite"


def test_an_integer_too_large_for_a_double_is_not_finite_in_an_object():
    body, request = recorded(COMPLETIONS)
    set_logprob(body, 3, 10**400)
    with pytest.raises(ReplyError) as caught:
        parse_response(body, request=request, provenance=provenance_of(COMPLETIONS, request))
    assert caught.value.code == "logprob-not-finite"


@pytest.mark.parametrize("value", [0, 0.0, -9999.0, -1.17549e-38, 2.5])
@pytest.mark.parametrize("key", ROUTES)
def test_finite_values_are_kept_as_they_are_for_the_checks_to_judge(key, value):
    body, request = recorded(key)
    set_logprob(body, 0, value)
    (turn,) = parse_response(body, request=request, provenance=provenance_of(key, request))
    assert turn.inference_logprobs[0] == np.float32(value)


@pytest.mark.parametrize("value", [True, "-0.5", [-0.5]])
@pytest.mark.parametrize("key", ROUTES)
def test_logprobs_that_are_no_numbers_are_malformed(key, value):
    body, _ = recorded(key)
    set_logprob(body, 0, value)
    assert refused(key, body).code == "reply-malformed"


@pytest.mark.parametrize("value", [-1, True, 5.0, "5", None, 2**31, [5]])
@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids"])
@pytest.mark.parametrize("key", ROUTES)
def test_ids_are_true_integers_that_int32_holds(key, field, value):
    body, _ = recorded(key)
    holder = body if field == "prompt_token_ids" and key != COMPLETIONS else body["choices"][0]
    holder[field] = [*(holder[field] or [1, 5])[:-1], value]
    error = refused(key, body)
    assert error.code == "reply-malformed"
    assert f"{field}[{len(holder[field]) - 1}]" in str(error)


def test_the_largest_int32_is_an_id():
    body, request = recorded(COMPLETIONS)
    body["choices"][0]["token_ids"][0] = 2**31 - 1
    (turn,) = parse_response(body, request=request, provenance=provenance_of(COMPLETIONS, request))
    assert turn.completion_token_ids[0] == 2**31 - 1


@pytest.mark.parametrize("key", ROUTES)
def test_usage_off_by_one_contradicts_the_ids(key):
    for field in ("completion_tokens", "prompt_tokens"):
        for step in (1, -1):
            body, _ = recorded(key)
            body["usage"][field] += step
            error = refused(key, body)
            assert error.code == "usage-mismatch"
            assert field in str(error)


def test_usage_of_several_choices_is_their_sum():
    key = "fp32_raw/completions_n2_t1.json"
    body, _ = recorded(key)
    assert body["usage"]["completion_tokens"] == 16  # 8 and 8
    assert [turn.usage.num_completion_tokens for turn in parse(key)] == [None, None]
    body["usage"]["completion_tokens"] = 8
    assert refused(key, body).code == "usage-mismatch"


def test_choices_come_back_in_the_order_of_their_index():
    key = "fp32_raw/completions_n2_t1.json"
    body, request = recorded(key)
    body["choices"].reverse()
    turns = parse_response(body, request=request, provenance=provenance_of(key, request))
    assert all(identical(a, b) for a, b in zip(turns, parse(key), strict=True))


@pytest.mark.parametrize("indices", [(0, 0), (1, 2), (0, 2), (-1, 0)])
def test_indices_that_repeat_or_leave_one_out_are_refused(indices):
    key = "fp32_raw/completions_n2_t1.json"
    body, _ = recorded(key)
    for choice, index in zip(body["choices"], indices, strict=True):
        choice["index"] = index
    error = refused(key, body)
    assert error.code == "reply-malformed"
    assert f"indices {indices[0]}, {indices[1]}" in str(error)


def test_a_choice_without_index_and_a_reply_without_choices_are_malformed():
    body, _ = recorded(COMPLETIONS)
    del body["choices"][0]["index"]
    assert refused(COMPLETIONS, body).code == "reply-malformed"
    for choices in ([], None):
        body, _ = recorded(COMPLETIONS)
        body["choices"] = choices
        assert refused(COMPLETIONS, body).code == "reply-malformed"


def test_ids_beside_the_logprobs_must_be_those_of_token_ids():
    body, _ = recorded(GENERATE)
    logprobs_of(body)[4]["token_id"] += 1
    error = refused(GENERATE, body)
    assert error.code == "statement-contradicted"
    assert "choice 0: 1 of 8 differ, first at sampled token 4" in str(error)


@pytest.mark.parametrize("spelt", ["token_id:424", "token_id:", "token_id:x", "token_id:" + "9" * 5000])
def test_ids_spelt_as_strings_must_be_those_of_token_ids(spelt):
    key = "fp32_raw/completions_asids_ids_lp2.json"
    body, _ = recorded(key)
    assert body["choices"][0]["logprobs"]["tokens"][1] == "token_id:423"
    body["choices"][0]["logprobs"]["tokens"][1] = spelt
    error = refused(key, body)
    assert error.code == "statement-contradicted"
    assert "first at sampled token 1" in str(error)


@pytest.mark.parametrize("reason", ["error", "repetition", "STOP"])
def test_finish_reasons_that_are_not_known_are_refused(reason):
    body, _ = recorded(COMPLETIONS)
    body["choices"][0]["finish_reason"] = reason
    error = refused(COMPLETIONS, body)
    assert error.code == "reply-malformed"
    assert f"choice 0: {reason!r}" in str(error)


@pytest.mark.parametrize("key", ROUTES)
@pytest.mark.parametrize("logprobs", [None, {}, {"content": None}, {"token_logprobs": None}])
def test_ids_without_any_logprobs_are_refused(key, logprobs):
    body, _ = recorded(key)
    body["choices"][0]["logprobs"] = logprobs
    assert refused(key, body).code == "logprobs-missing"


def empty(key: str) -> Any:
    body, _ = recorded(key)
    body["choices"][0].update(token_ids=[], logprobs=None, finish_reason="abort")
    if "weight_versions" in body["choices"][0]:
        body["choices"][0]["weight_versions"] = []
    body["usage"].update(completion_tokens=0, total_tokens=body["usage"]["prompt_tokens"])
    return body


@pytest.mark.parametrize("key", ROUTES)
@pytest.mark.parametrize("absent", [None, {}, [], "null list"])
def test_an_empty_completion_is_a_turn_without_tokens(key, absent):
    body = empty(key)
    field = "token_logprobs" if key == COMPLETIONS else "content"
    forms = {"null list": {field: None}}
    if absent != []:
        body["choices"][0]["logprobs"] = forms.get(absent, absent) if isinstance(absent, str) else absent
    else:
        body["choices"][0]["logprobs"] = {field: []}
    request = recorded(key)[1]
    (turn,) = parse_response(body, request=request, provenance=provenance_of(key, request))
    assert len(turn.completion_token_ids) == len(turn.inference_logprobs) == 0
    assert turn.finish_reason == "abort"


@pytest.mark.parametrize("key", ROUTES)
def test_a_logprob_without_an_id_is_a_length_mismatch(key):
    body = empty(key)
    entry = {"token_logprobs": [-0.5]} if key == COMPLETIONS else {"content": [{"logprob": -0.5}]}
    body["choices"][0]["logprobs"] = entry
    error = refused(key, body)
    assert error.code == "length-mismatch"
    assert "choice 0: 1 logprobs for 0 ids" in str(error)


def test_logprobs_in_the_place_of_another_engine_are_refused():
    for key, other in ((COMPLETIONS, {"content": []}), (CHAT, {"token_logprobs": []})):
        body, _ = recorded(key)
        body["choices"][0]["logprobs"].update(other)
        assert refused(key, body).code == "reply-malformed"


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a decoded body."""
    if path:
        yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield from places(child, (*path, key))


DELETE = object()
REPLACEMENTS = [DELETE, None, True, -1, 2**70, 1.5, math.nan, "", "x", [], [None], {}, {"x": 1}]


@pytest.mark.parametrize(
    "key", ["fp32_raw/completions_ids_lp1.json", "fp32_raw/generate_text_mode.json", CHAT]
)
def test_whatever_is_wrong_with_one_value_only_a_reply_error_comes_out(key):
    whole, request = recorded(key)
    provenance = provenance_of(key, request)
    ids = whole["choices"][0]["token_ids"]
    for path in list(places(whole)):
        for value in REPLACEMENTS:
            body, _ = recorded(key)
            holder = body
            for step in path[:-1]:
                holder = holder[step]
            if value is DELETE:
                del holder[path[-1]]
            else:
                holder[path[-1]] = value
            try:
                (turn,) = parse_response(body, request=request, provenance=provenance)
            except ReplyError:
                continue
            # What still passes has lost no token and no logprob, and has made none up.
            assert turn.completion_token_ids.tolist() == ids or path[-1] in ("token_ids", "choices")
            assert len(reported(turn)) == len(turn.completion_token_ids)
            assert np.isfinite(reported(turn)).all()


# -- versions of the weights ------------------------------------------------------------------------------


def with_spans(*spans: tuple[str, int, int]) -> Any:
    body, _ = recorded(GENERATE)
    body["choices"][0]["weight_versions"] = [
        {"version": label, "start": start, "end": end} for label, start, end in spans
    ]
    return body


def test_versions_that_changed_midway_become_spans():
    body = with_spans(("default", 0, 0), ("step-1", 0, 3), ("step-2", 3, 8))
    request = recorded(GENERATE)[1]
    (turn,) = parse_response(body, request=request, provenance=provenance_of(GENERATE, request))
    assert turn.policy_versions == (
        VersionSpan(label="step-1", start=0, stop=3),
        VersionSpan(label="step-2", start=3, stop=8),
    )


@pytest.mark.parametrize(
    "spans",
    [
        [("a", 0, 7)],  # one token short of the 8
        [("a", 0, 9)],
        [("a", 1, 8)],
        [("a", 0, 3), ("b", 4, 8)],
        [("a", 0, 5), ("b", 4, 8)],
        [("a", 0, 8), ("b", 8, 7)],
    ],
)
def test_spans_that_do_not_cover_each_token_once_are_refused(spans):
    error = refused(GENERATE, with_spans(*spans))
    assert error.code == "statement-contradicted"
    assert "0:8" in str(error)


# -- what the payload is instead --------------------------------------------------------------------------


def test_a_recordings_wrapper_is_refused_by_name():
    for key in (COMPLETIONS, "fp32_raw/generate_stream_lp0.json", "fp32_raw/chat_multi_turn_t0.json"):
        text = (REPLIES / key).read_text(encoding="utf-8")
        for payload in (text, text.encode(), json.loads(text)):
            with pytest.raises(ReplyError) as caught:
                parse_response(payload, provenance=provenance_of(key, None))
            assert caught.value.code == "reply-malformed"
            assert "a wrapper" in str(caught.value)
            assert "`response`" in str(caught.value)


@pytest.mark.parametrize(
    "payload",
    [b"", "", b"null", b"[]", b"7", b'"text"', b"<html>502</html>", b"\xff\xfe", "\ud800", None, 7, object()],
)
def test_what_is_no_json_object_is_malformed(payload):
    with pytest.raises(ReplyError) as caught:
        parse_response(payload, provenance=provenance_of(COMPLETIONS, None))
    assert caught.value.code == "reply-malformed"


@pytest.mark.parametrize("key", ROUTES)
def test_a_reply_cut_off_anywhere_is_malformed(key):
    body, request = recorded(key)
    whole = json.dumps(body).encode()
    for stop in range(1, len(whole), 37):
        with pytest.raises(ReplyError) as caught:
            parse_response(whole[:stop], request=request, provenance=provenance_of(key, request))
        assert caught.value.code == "reply-malformed"


def test_json_nested_beyond_reason_is_malformed():
    for opening in (b"[", b'{"choices":', b'{"x":'):
        with pytest.raises(ReplyError) as caught:
            parse_response(opening * 200_000, provenance=provenance_of(COMPLETIONS, None))
        assert caught.value.code == "reply-malformed"


def test_a_body_above_the_cap_is_refused_undecoded():
    body, request = recorded(COMPLETIONS)
    whole = json.dumps(body).encode()
    padding = b" " * (MAX_REPLY_BYTES - len(whole))
    provenance = provenance_of(COMPLETIONS, request)
    assert len(parse_response(whole + padding, request=request, provenance=provenance)) == 1
    with pytest.raises(ReplyError, match=f"{MAX_REPLY_BYTES + 1:,}"):
        parse_response(whole + padding + b" ", request=request, provenance=provenance)


def chunks(key: str) -> list[Any]:
    body, _ = recorded(key)
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]


def test_a_stream_passed_as_a_reply_is_refused_by_name():
    for key in STREAMS:
        body, request = recorded(key)
        for payload in (body, body.encode()):
            with pytest.raises(ReplyError, match="feed the whole stream") as caught:
                parse_response(payload, request=request, provenance=provenance_of(key, request))
            assert caught.value.code == "route-unsupported"


@pytest.mark.parametrize("key", STREAMS)
def test_no_chunk_of_a_stream_passes_for_a_reply(key):
    _, request = recorded(key)
    request_unsaid = {name: value for name, value in request.items() if name != "stream"}
    for chunk in chunks(key):
        for sent in (request, request_unsaid, None):
            with pytest.raises(ReplyError) as caught:
                parse_response(chunk, request=sent, provenance=provenance_of(key, request))
            # A closing chunk of generate looks whole but for its spans and its missing choices.
            assert caught.value.code in {
                "route-unsupported",
                "reply-malformed",
                "statement-contradicted",
                "prompt-ids-missing",
            }


def test_a_request_that_asked_for_a_stream_has_no_whole_reply():
    body, request = recorded(COMPLETIONS)
    assert refused(COMPLETIONS, body, request={**request, "stream": True}).code == "route-unsupported"


def test_every_form_of_error_body_is_named_without_its_message():
    secret = "the prompt was: attack at dawn"
    bodies = [
        {"error": {"message": secret, "type": "BadRequestError", "param": None, "code": 400}},
        {"object": "error", "message": secret, "type": "BadRequestError", "param": None, "code": 400},
        {"error": secret},
        {"detail": [{"loc": ["body", "prompt"], "msg": secret, "input": secret}]},
        {"error": {"message": secret, "type": secret + "!", "code": secret + "!"}, "choices": []},
    ]
    for body in bodies:
        for payload in (body, json.dumps(body)):
            with pytest.raises(ReplyError) as caught:
                parse_response(payload, provenance=provenance_of(COMPLETIONS, None))
            assert caught.value.code == "reply-error-body"
            assert "dawn" not in str(caught.value)
    assert "type BadRequestError, code 400" in str(_error(bodies[1]))


def _error(body: Any) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        parse_response(body, provenance=provenance_of(COMPLETIONS, None))
    return caught.value


def test_sglangs_reply_is_not_taken_for_vllms():
    error = _error(
        {"text": "x", "output_ids": [5], "meta_info": {"output_token_logprobs": [[-0.5, 5, None]]}}
    )
    assert error.code == "route-unsupported"
    assert "SGLang" in str(error)


def test_an_unknown_engine_is_refused_and_the_known_are_listed():
    body, request = recorded(COMPLETIONS)
    with pytest.raises(ReplyError, match="reads: fireworks, sglang, vllm"):
        parse_response(body, engine="vlm", request=request, provenance=provenance_of(COMPLETIONS, request))


def test_a_provenance_of_another_engine_is_contradicted_where_an_engine_is_stated():
    body, request = recorded(COMPLETIONS)
    other = replace(provenance_of(COMPLETIONS, request), engine="sglang")
    with pytest.raises(ReplyError) as caught:
        parse_response(body, engine="vllm", request=request, provenance=other)
    assert caught.value.code == "statement-contradicted"
    # Unstated it is the provenance's, whose replies look otherwise.
    assert refused(COMPLETIONS, body, provenance=other).code == "reply-malformed"


def test_the_engine_need_not_be_said_beside_its_provenance():
    sampling = SamplingParams(temperature=1.0)
    for engine, reply, events in (
        ("sglang", sglang_reply(), sglang_chunks(incremental=True)),
        ("Fireworks", fireworks_reply(), fireworks_chunks()),
    ):
        provenance = Provenance(engine=engine, logprobs_mode="processed", sampling=sampling)
        (turn,) = parse_response(reply, provenance=provenance)
        assert turn.completion_token_ids.tolist() == IDS
        assembler = ResponseAssembler(provenance=provenance)
        assembler.feed("".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n")
        (turn,) = assembler.finish()
        assert turn.completion_token_ids.tolist() == IDS
    unknown = Provenance(engine="tgi", logprobs_mode="processed", sampling=sampling)
    for call in (
        lambda: parse_response(sglang_reply(), provenance=unknown),
        lambda: ResponseAssembler(provenance=unknown),
    ):
        with pytest.raises(ReplyError, match="engine 'tgi'"):
            call()


def test_provenance_and_request_of_other_types_are_record_errors():
    body, request = recorded(COMPLETIONS)
    with pytest.raises(RecordError, match="expected a Provenance, found dict"):
        parse_response(body, request=request, provenance={"engine": "vllm"})
    with pytest.raises(RecordError, match="expected the request's object, found str"):
        parse_response(body, request="{}", provenance=provenance_of(COMPLETIONS, request))


def test_refusals_show_neither_prompt_nor_text():
    for key in REFUSED:
        body, request = recorded(key)
        with pytest.raises(ReplyError) as caught:
            parse_response(body, request=request, provenance=provenance_of(key, request))
        for word in ("Anna", "apples", "Goro", "calc", "<think>", "<|bos|>"):
            assert word not in str(caught.value)


def test_an_end_that_is_no_word_is_counted_and_not_shown():
    body, _ = recorded(COMPLETIONS)
    body["choices"][0]["finish_reason"] = "the patient John Doe was told"
    error = refused(COMPLETIONS, body)
    assert "choice 0: text of 29 characters" in str(error)
    assert "John" not in str(error)


# -- modules ----------------------------------------------------------------------------------------------


def test_engines_import_without_torch():
    code = "import sys, rlbatch.engines; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_exported_names_are_sorted_and_there():
    assert rlbatch.engines.__all__ == sorted(rlbatch.engines.__all__)
    assert all(hasattr(rlbatch.engines, name) for name in rlbatch.engines.__all__)
