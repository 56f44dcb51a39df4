"""Completions' `top_logprobs` against the drawn tokens: what is no contradiction, and what is one."""

import copy
import json
from typing import Any

import numpy as np
import pytest

from rlbatch.engines import ResponseAssembler, parse_response
from rlbatch.engines.vllm_alternatives import PIECE_BYTES
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance, SamplingParams, Turn

PROVENANCE = Provenance(engine="vllm", logprobs_mode="processed", sampling=SamplingParams(temperature=1.0))
NUM_ASKED = 2
TOKENS = [" a", " b", " c"]
VALUES = [-0.5, -2.0, -3.0]
# Two were asked for. " a" is the best one; " b" is none of the two best, so there are three keys; " c" is
# none either, and shares its text with the second best, whose -1.5 came later and stands in its place.
TOPS: list[dict[str, float | None]] = [
    {" a": -0.5, " x": -1.5},
    {" b": -2.0, " x": -0.75, " y": -1.0},
    {" c": -1.5, " x": -0.75},
]


def request(**changes: Any) -> dict[str, Any]:
    return {"prompt": [1, 5], "temperature": 1.0, "logprobs": NUM_ASKED, "return_token_ids": True} | changes


def body(num_times: int = 1) -> dict[str, Any]:
    """The three tokens, as often as asked for."""
    num = 3 * num_times
    logprobs = {
        "tokens": TOKENS * num_times,
        "token_logprobs": VALUES * num_times,
        "top_logprobs": [dict(each) for each in TOPS * num_times],
    }
    choice = {"index": 0, "text": " a b c" * num_times, "logprobs": logprobs, "finish_reason": "length"}
    choice |= {"token_ids": [7, 8, 9] * num_times, "prompt_token_ids": [1, 5]}
    usage = {"prompt_tokens": 2, "completion_tokens": num, "total_tokens": 2 + num}
    return {"object": "text_completion", "choices": [choice], "usage": usage}


def parsed(reply: dict[str, Any], **changes: Any) -> Turn:
    """From JSON, as compact as a server's; the object must give the same."""
    asked = request(**changes)
    text = json.dumps(reply, separators=(",", ":"))
    (turn,) = parse_response(text, request=asked, provenance=PROVENANCE)
    (again,) = parse_response(copy.deepcopy(reply), request=asked, provenance=PROVENANCE)
    assert np.array_equal(turn.inference_logprobs, again.inference_logprobs)
    return turn


def refused(reply: dict[str, Any], **changes: Any) -> ReplyError:
    asked = request(**changes)
    with pytest.raises(ReplyError) as caught:
        parse_response(json.dumps(reply), request=asked, provenance=PROVENANCE)
    with pytest.raises(ReplyError) as again:
        parse_response(reply, request=asked, provenance=PROVENANCE)
    assert again.value.code == caught.value.code
    return caught.value


def tops(reply: dict[str, Any]) -> list[Any]:
    return reply["choices"][0]["logprobs"]["top_logprobs"]


def test_alternatives_that_agree_or_share_a_text_are_read():
    assert parsed(body()).inference_logprobs.tolist() == VALUES


def test_a_token_that_was_not_drawn_may_have_any_logprob():
    reply = body()
    tops(reply)[0][" x"] = -9999.0
    tops(reply)[1][" x"] = None
    assert parsed(reply).inference_logprobs.tolist() == VALUES


@pytest.mark.parametrize(
    ("at", "alternatives", "why"),
    [
        (0, {" x": -0.5, " y": -1.5}, "the drawn token is not there"),
        (0, None, "nothing is there"),
        (0, {" a": None, " x": -1.5}, "it has no logprob there"),
        (0, {" a": -0.75, " x": -1.5}, "two keys, and a worse one cannot come later than one of the best"),
        (1, {" b": -1.0, " x": -0.75, " y": -1.0}, "three keys are of three tokens"),
        (2, {" c": -3.5, " x": -0.75}, "a better one was left out"),
    ],
)
def test_another_logprob_than_a_shared_text_explains_is_refused(at, alternatives, why):
    reply = body()
    tops(reply)[at] = alternatives
    error = refused(reply)
    assert error.code == "statement-contradicted", why
    assert f"choice 0: it differs, or is not there, at sampled token {at}" in str(error)


def test_the_drawn_token_alone_was_asked_for_and_has_its_own_logprob():
    reply = body()
    tops(reply)[:] = [{" a": -0.5}, {" b": -2.0}, {" c": -3.0}]
    assert len(parsed(reply, logprobs=0).completion_token_ids) == 3
    tops(reply)[2][" c"] = -1.5
    assert refused(reply, logprobs=0).code == "statement-contradicted"


def test_ids_as_keys_never_fall_together():
    reply = body()
    reply["choices"][0]["logprobs"]["tokens"] = ["token_id:7", "token_id:8", "token_id:9"]
    tops(reply)[:] = [{"token_id:7": -0.5}, {"token_id:8": -2.0}, {"token_id:9": -3.0}]
    assert len(parsed(reply).completion_token_ids) == 3
    tops(reply)[2]["token_id:9"] = -1.5
    assert refused(reply).code == "statement-contradicted"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda each: each.pop(), "length-mismatch"),
        (lambda each: each.append({" a": -0.5}), "length-mismatch"),
        (lambda each: each.clear(), "length-mismatch"),
        (lambda each: each.__setitem__(1, 7), "reply-malformed"),
        (lambda each: each.__setitem__(1, {" b": True}), "reply-malformed"),
        (lambda each: each.insert(0, each.pop()), "statement-contradicted"),
    ],
)
def test_a_list_of_other_length_kind_or_order_is_refused(change, code):
    reply = body()
    change(tops(reply))
    assert refused(reply).code == code


def long_body() -> dict[str, Any]:
    reply = body(PIECE_BYTES // 20)
    # 63 bytes for each three tokens: several pieces.
    assert len(json.dumps(tops(reply), separators=(",", ":"))) > 3 * PIECE_BYTES
    return reply


@pytest.mark.parametrize("at", [0, 1, 1_000, 2_001, -3, -2])
def test_every_piece_of_a_long_list_is_compared(at):
    reply = long_body()
    turn = parsed(reply)
    assert turn.inference_logprobs.tolist() == VALUES * (PIECE_BYTES // 20)
    place = at % len(turn.inference_logprobs)
    drawn = TOKENS[place % 3]
    tops(reply)[place] = {drawn: -8.0, " x": -0.75}
    text = json.dumps(reply, separators=(",", ":"))
    with pytest.raises(ReplyError) as caught:
        parse_response(text, request=request(), provenance=PROVENANCE)
    assert f"at sampled token {place}\n" in str(caught.value)


def test_a_text_that_looks_like_the_end_of_alternatives_cuts_no_piece():
    reply = long_body()
    for alternatives in tops(reply):
        alternatives['},{"'] = alternatives["},{"] = -20.0
    assert len(parsed(reply, logprobs=4).completion_token_ids) == len(tops(reply))
    tops(reply)[-1][" c"] = -8.0
    text = json.dumps(reply, separators=(",", ":"))
    with pytest.raises(ReplyError) as caught:
        parse_response(text, request=request(logprobs=3), provenance=PROVENANCE)
    assert caught.value.code == "statement-contradicted"


def chunk(at: int, alternatives: object) -> bytes:
    logprobs = {"tokens": [TOKENS[at]], "token_logprobs": [VALUES[at]], "top_logprobs": alternatives}
    choice = {"index": 0, "text": TOKENS[at], "logprobs": logprobs, "token_ids": [7 + at]}
    choice |= {"finish_reason": "length" if at == 2 else None, "prompt_token_ids": None if at else [1, 5]}
    return b"data: " + json.dumps({"object": "text_completion", "choices": [choice]}).encode() + b"\n\n"


def streamed(*alternatives: object) -> Turn:
    assembler = ResponseAssembler(request=request(stream=True), provenance=PROVENANCE)
    for at, each in enumerate(alternatives):
        assembler.feed(chunk(at, each))
    assembler.feed(b"data: [DONE]\n\n")
    return assembler.finish()[0]


def test_each_chunk_of_a_stream_is_held_to_the_same():
    assert streamed(*([each] for each in TOPS)).inference_logprobs.tolist() == VALUES
    for wrong, code in (
        ([{" b": -1.0, " x": -0.75, " y": -1.0}], "statement-contradicted"),
        ([TOPS[1], TOPS[1]], "length-mismatch"),
        ([], "length-mismatch"),
        ([7], "reply-malformed"),
    ):
        with pytest.raises(ReplyError) as caught:
            streamed([TOPS[0]], wrong, [TOPS[2]])
        assert caught.value.code == code


def test_an_echo_of_the_prompt_alone_is_held_to_the_same():
    """No token was asked for: the rows are the prompt's, and the one id that comes all the same has none."""
    reply = body()
    choice = reply["choices"][0]
    choice["logprobs"]["token_logprobs"] = [None, *VALUES[1:]]
    choice["logprobs"]["top_logprobs"] = [None, *TOPS[1:]]
    choice |= {"prompt_token_ids": [7, 8, 9], "token_ids": [5], "text": " a b c"}
    reply["usage"] = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    asked = {"prompt": [7, 8, 9], "echo": True, "max_tokens": 0}
    assert len(parsed(reply, **asked).completion_token_ids) == 0
    longer = copy.deepcopy(reply)
    longer["choices"][0]["logprobs"]["tokens"].append(" d")
    assert refused(longer, **asked).code == "length-mismatch"
    tops(reply)[1][" b"] = -8.0
    assert refused(reply, **asked).code == "statement-contradicted"
