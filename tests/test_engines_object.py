"""vLLM's output objects of one process: recorded replies rebuilt as such objects, and damage to them.

The classes below have the attributes that vllm.outputs has in 0.32.0; `tests/vllm` passes real ones.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from test_engines import provenance_of, recorded, refused

from rlbatch.engines import parse_response
from rlbatch.errors import ReplyError
from rlbatch.records import Turn, VersionSpan, identical

GENERATE = "fp32_raw/generate_lp1_t07.json"


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class CompletionOutput:
    index: int
    token_ids: Any
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    text: str = ""
    cumulative_logprob: float | None = None
    routed_experts: Any = None
    weight_versions: list[Span] | None = None


@dataclass
class Output:
    request_id: str
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    prompt_logprobs: Any = None
    finished: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


def output(**changes: Any) -> Output:
    """The recorded reply of generate, as the engine would have given it in process."""
    body, request = recorded(GENERATE)
    (choice,) = body["choices"]
    entries = choice["logprobs"]["content"]
    fields = {
        "index": 0,
        "token_ids": tuple(choice["token_ids"]),
        # The sampled id is not the first key on purpose.
        "logprobs": [
            {9999: Logprob(-20.0), entry["token_id"]: Logprob(entry["logprob"])} for entry in entries
        ],
        "finish_reason": choice["finish_reason"],
        "text": None,
        "cumulative_logprob": sum(entry["logprob"] for entry in entries),
        "weight_versions": [Span(**span) for span in choice["weight_versions"]],
    }
    return Output(body["request_id"], list(request["token_ids"]), [CompletionOutput(**fields | changes)])


def parse(given: Any, **changes: Any) -> list[Turn]:
    request = recorded(GENERATE)[1]
    fields = {"request": request, "provenance": provenance_of(GENERATE, request)} | changes
    return parse_response(given, **fields)


def code_of(given: Any) -> str | None:
    with pytest.raises(ReplyError) as caught:
        parse(given)
    return caught.value.code


def test_an_object_gives_the_turn_of_the_same_reply_over_http():
    (turn,) = parse(output())
    (over_http,) = parse(recorded(GENERATE)[0])
    # Usage is the server's.
    assert identical(turn, replace(over_http, usage=turn.usage))
    assert turn.policy_versions == (VersionSpan(label="default", start=0, stop=8),)


def test_arrays_of_experts_are_taken_as_they_are():
    experts = np.arange(29 * 3 * 2, dtype=np.uint8).reshape(29, 3, 2) % 8
    (turn,) = parse(output(routed_experts=experts))
    assert turn.routed_experts.tolist() == experts.tolist()
    assert code_of(output(routed_experts=experts[:-1])) == "routed-experts-mismatch"
    assert code_of(output(routed_experts=experts.astype(np.float32))) == "routed-experts-malformed"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"finish_reason": None}, "route-unsupported"),
        ({"finish_reason": 7}, "reply-malformed"),
        ({"logprobs": None, "cumulative_logprob": None}, "logprobs-missing"),
        ({"token_ids": (572, True, 331, 448, 368, 18, 428, 426)}, "reply-malformed"),
        ({"token_ids": (-1,)}, "reply-malformed"),
        ({"token_ids": None}, "ids-missing"),
        ({"cumulative_logprob": -3.0}, "statement-contradicted"),
        ({"logprobs": [7] * 8}, "reply-malformed"),
        ({"index": 1}, "reply-malformed"),
        ({"weight_versions": [Span("default", 0, 7)]}, "statement-contradicted"),
    ],
)
def test_objects_that_do_not_say_what_they_should_are_refused(changes, code):
    assert code_of(output(**changes)) == code


def test_counts_and_values_are_the_same_rules_as_over_http():
    whole = output()
    (choice,) = whole.outputs
    assert code_of(output(logprobs=choice.logprobs[:-1], cumulative_logprob=None)) == "length-mismatch"
    for value, code in (
        (float("nan"), "logprob-not-finite"),
        (True, "reply-malformed"),
        ("x", "reply-malformed"),
    ):
        entries = [dict(entry) for entry in choice.logprobs]
        entries[3][choice.token_ids[3]] = Logprob(value)
        assert code_of(output(logprobs=entries)) == code
    entries = [dict(entry) for entry in choice.logprobs]
    del entries[3][choice.token_ids[3]]
    assert code_of(output(logprobs=entries, cumulative_logprob=None)) == "logprob-missing"


def test_prompt_logprobs_of_the_object_are_held_against_its_prompt():
    given = output()
    given.prompt_logprobs = [None, *({token_id: Logprob(-0.5)} for token_id in given.prompt_token_ids[1:])]
    assert len(parse(given)) == 1
    given.prompt_logprobs[4] = {9999: Logprob(-0.5)}
    assert code_of(given) == "statement-contradicted"


def test_a_prompt_of_another_request_is_refused():
    given = output()
    given.prompt_token_ids[2] += 1
    assert code_of(given) == "statement-contradicted"


def test_an_object_of_another_kind_is_malformed():
    assert code_of(object()) == "reply-malformed"
    broken = output()
    broken.outputs = [object()]
    assert code_of(broken) == "reply-malformed"
    assert refused(GENERATE, 7).code == "reply-malformed"
