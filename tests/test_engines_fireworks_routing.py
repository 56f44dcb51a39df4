"""Fireworks' routing matrices, by hand: which passes they are of, and what is refused.

No recording exists. That a token's matrix is of the pass that drew it follows from how its trainer takes
them: one a drawn token, behind as many empty ones as the prompt has tokens less one.
"""

import base64
import copy
import json
from typing import Any

import numpy as np
import pytest
from replies_by_hand import (
    IDS,
    PROMPT,
    ROUTING_SHAPE,
    fireworks_chunks,
    fireworks_matrix,
    fireworks_reply,
    fireworks_request,
    fireworks_routed,
)

from rlbatch.assemble import to_samples
from rlbatch.engines import ResponseAssembler, parse_response
from rlbatch.errors import RecordError, ReplyError
from rlbatch.records import Provenance, SamplingParams, Trajectory, Turn


def provenance(shape: tuple[int, int] | None) -> Provenance:
    sampling = SamplingParams(temperature=1.0)
    return Provenance(engine="fireworks", logprobs_mode="processed", sampling=sampling, routing_shape=shape)


def parse(body: Any, request: Any = None, routing_shape: tuple[int, int] | None = None) -> list[Turn]:
    return parse_response(body, engine="fireworks", request=request, provenance=provenance(routing_shape))


def refused(body: Any, request: Any = None, routing_shape: tuple[int, int] | None = None) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        parse(body, request, routing_shape)
    return caught.value


def choice_of(body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = body["choices"][0]
    return choice


REFERENCES = {
    "length": 8,
    "files": [{"format": "parquet_v1"}],
    "spans": [{"input_token_start": 0, "count": 8}],
}


def assert_rows(turn: Turn, start: int) -> None:
    assert turn.routed_experts_start == start
    assert turn.routed_experts is not None
    # The row of the pass over token t is what drew token t + 1.
    wanted = [list(range(10 * t + 10, 10 * t + 16)) for t in range(start, len(PROMPT) + len(IDS) - 1)]
    assert turn.routed_experts.reshape(-1, 6).tolist() == wanted
    assert turn.routed_experts.shape[1:] == ROUTING_SHAPE


@pytest.mark.parametrize("dtype", ["|u1", "<u2", "<i4"])
@pytest.mark.parametrize(("num_echoed", "start"), [(None, 3), (2, 1), (4, 0)])
def test_matrices_are_the_rows_of_the_passes_that_drew_the_tokens(dtype, num_echoed, start):
    asked = {None: {}, 2: {"echo": True, "echo_last": 2}, 4: {"echo": True}}[num_echoed]
    body = fireworks_routed(num_echoed, dtype)
    (turn,) = parse(body, fireworks_request(**asked), routing_shape=ROUTING_SHAPE)
    assert turn.completion_token_ids.tolist() == IDS
    assert_rows(turn, start)
    assert turn.routed_experts is not None
    assert turn.routed_experts.dtype == np.dtype(dtype)


def test_matrices_of_cached_prompt_tokens_may_be_absent_in_front():
    body = fireworks_routed(4)
    for row in choice_of(body)["logprobs"]["content"][:3]:
        row["routing_matrix"] = ""
    (turn,) = parse(body, fireworks_request(echo=True), routing_shape=ROUTING_SHAPE)
    assert_rows(turn, 2)


def test_matrices_of_an_echo_reach_the_sample_and_those_of_a_completion_alone_are_no_whole_record():
    (turn,) = parse(fireworks_routed(4), fireworks_request(echo=True), routing_shape=ROUTING_SHAPE)
    (made,) = to_samples(Trajectory(trajectory_id="a", turns=(turn,)))
    assert made.routed_experts is not None
    assert made.routed_experts.shape == (len(PROMPT) + len(IDS) - 1, *ROUTING_SHAPE)
    (turn,) = parse(fireworks_routed(), routing_shape=ROUTING_SHAPE)
    with pytest.raises(RecordError, match="from token 0 on"):
        to_samples(Trajectory(trajectory_id="a", turns=(turn,)))


def test_matrices_without_a_stated_shape_are_refused_by_name_and_never_dropped():
    error = refused(fireworks_routed())
    assert error.code == "routing-unreadable"
    assert "choice 0: 5 of them, and a provenance without routing_shape" in str(error)


@pytest.mark.parametrize(
    ("at", "matrix", "code"),
    [
        (2, "", "routed-experts-mismatch"),
        (4, "", "routed-experts-mismatch"),
        (0, "", "routed-experts-mismatch"),
        (1, "AAEC", "routed-experts-malformed"),
        (1, "????", "routed-experts-malformed"),
        (1, fireworks_matrix(0, "<u2"), "routed-experts-malformed"),
        (1, 7, "reply-malformed"),
    ],
)
def test_a_matrix_that_is_missing_or_of_another_size_is_refused(at, matrix, code):
    body = fireworks_routed()
    choice_of(body)["logprobs"]["content"][at]["routing_matrix"] = matrix
    assert refused(body, routing_shape=ROUTING_SHAPE).code == code


def test_another_shape_than_the_matrices_have_is_refused():
    assert refused(fireworks_routed(), routing_shape=(5, 2)).code == "routed-experts-malformed"
    negative = fireworks_routed(dtype="<i4")
    text = base64.b64encode(np.array([-1] + 5 * [0], "<i4").tobytes()).decode()
    choice_of(negative)["logprobs"]["content"][1]["routing_matrix"] = text
    assert "a negative expert" in str(refused(negative, routing_shape=ROUTING_SHAPE))


def test_a_matrix_before_the_first_token_of_all_is_refused():
    body = fireworks_routed(4)
    choice_of(body)["logprobs"]["content"][0]["routing_matrix"] = fireworks_matrix(0)
    error = refused(body, fireworks_request(echo=True), routing_shape=ROUTING_SHAPE)
    assert error.code == "routed-experts-mismatch"


def test_matrices_in_two_places_must_agree():
    body = fireworks_routed()
    again = copy.deepcopy(choice_of(body)["logprobs"])
    choice_of(body)["raw_output"]["completion_logprobs"] = again
    assert_rows(parse(body, routing_shape=ROUTING_SHAPE)[0], 3)
    again["content"][2]["routing_matrix"] = fireworks_matrix(0)
    assert refused(body, routing_shape=ROUTING_SHAPE).code == "statement-contradicted"


def test_matrices_of_a_stream_are_those_of_the_whole_reply():
    events = fireworks_chunks()
    token = len(PROMPT)
    for event in events:
        for row in choice_of(event)["logprobs"]["content"]:
            row["routing_matrix"] = fireworks_matrix(token)
            token += 1
    asked = fireworks_request(stream=True)
    assembler = ResponseAssembler(engine="fireworks", request=asked, provenance=provenance(ROUTING_SHAPE))
    for event in events:
        assembler.feed(f"data: {json.dumps(event)}\n\n")
    assembler.feed("data: [DONE]\n\n")
    assert_rows(assembler.finish()[0], 3)


def test_references_to_files_are_refused_and_never_fetched():
    for place in ("choice", "body"):
        referred = fireworks_reply()
        (choice_of(referred) if place == "choice" else referred)["routing_references"] = REFERENCES
        assert refused(referred).code == "routing-unreadable"
        # The shape is not what is missing.
        assert refused(referred, routing_shape=ROUTING_SHAPE).code == "routing-unreadable"
    inline = fireworks_routed()
    inline["routing_references"] = REFERENCES
    assert refused(inline, routing_shape=ROUTING_SHAPE).code == "statement-contradicted"
