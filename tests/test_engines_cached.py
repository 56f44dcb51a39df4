"""`cached_tokens`: a part of the prompt, wherever an engine counts it."""

import json
from typing import Any

import pytest
from replies_by_hand import fireworks_reply, fireworks_request, sglang_reply, sglang_request

from rlbatch.engines import parse_response
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance, SamplingParams


def vllm_reply() -> dict[str, Any]:
    choice = {"index": 0, "token_ids": [5, 2], "prompt_token_ids": [1, 7, 8, 9], "finish_reason": "length"}
    choice |= {"text": "a", "logprobs": {"token_logprobs": [-0.5, -0.25]}}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    return {"object": "text_completion", "choices": [choice], "usage": usage}


def in_usage(body: dict[str, Any], num: int) -> None:
    body["usage"]["prompt_tokens_details"] = {"cached_tokens": num}


def in_meta_info(body: dict[str, Any], num: int) -> None:
    body["meta_info"]["cached_tokens"] = num


CASES = {
    "vllm": (vllm_reply, {"prompt": [1, 7, 8, 9]}, in_usage),
    "fireworks": (fireworks_reply, fireworks_request(), in_usage),
    "sglang": (sglang_reply, sglang_request(), in_meta_info),
}


def parse(engine: str, body: dict[str, Any], request: dict[str, Any]) -> int:
    sampling = SamplingParams(temperature=1.0)
    provenance = Provenance(engine=engine, logprobs_mode="processed", sampling=sampling)
    (turn,) = parse_response(json.dumps(body), engine=engine, request=request, provenance=provenance)
    return len(turn.prompt_token_ids)


@pytest.mark.parametrize("engine", CASES)
@pytest.mark.parametrize("num", [0, 3, 4])
def test_some_or_all_of_the_prompt_may_come_from_a_cache(engine: str, num: int) -> None:
    make, request, put = CASES[engine]
    body = make()
    put(body, num)
    assert parse(engine, body, request) == 4


@pytest.mark.parametrize("engine", CASES)
@pytest.mark.parametrize(
    ("num", "code"),
    [(5, "statement-contradicted"), (-1, "statement-contradicted"), (True, "reply-malformed")],
)
def test_more_than_the_prompt_or_no_count_is_refused(engine: str, num: int, code: str) -> None:
    make, request, put = CASES[engine]
    body = make()
    put(body, num)
    with pytest.raises(ReplyError) as caught:
        parse(engine, body, request)
    assert caught.value.code == code
