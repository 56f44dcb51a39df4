"""Recorded vLLM streams in every slicing, and each kind of damage to the order and number of their chunks."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from engines_expected import EXPECTED
from test_engines import READ, STREAMS, parse, provenance_of, recorded, reported, summary

from rlbatch.engines import ResponseAssembler
from rlbatch.errors import RecordError, ReplyError
from rlbatch.records import Provenance, SamplingParams, Turn, identical

WHOLE = [key for key in STREAMS if key in READ]
COMPLETIONS = "fp32_raw/completions_stream_ids_lp1.json"
CHAT = "fp32_raw/chat_stream_ids_lp.json"
GENERATE = "fp32_raw/generate_stream_lp0.json"
ROUTES = [COMPLETIONS, CHAT, GENERATE]


def assemble(key: str, pieces: list[Any], **changes: Any) -> list[Turn]:
    _, request = recorded(key)
    fields = {"request": request, "provenance": provenance_of(key, request)} | changes
    assembler = ResponseAssembler(**fields)
    for piece in pieces:
        assembler.feed(piece)
    return assembler.finish()


def refusal(key: str, chunks: list[Any], **changes: Any) -> ReplyError:
    with pytest.raises(ReplyError) as caught:
        assemble(key, [sse(chunks)], **changes)
    return caught.value


def chunks_of(key: str) -> list[Any]:
    body, _ = recorded(key)
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]


def sse(chunks: list[Any]) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


# -- whole streams ----------------------------------------------------------------------------------------


def test_every_recorded_stream_is_in_the_table():
    assert len(STREAMS) == 8
    assert [key for key in EXPECTED if "stream" in key and "error" not in key] == STREAMS


@pytest.mark.parametrize("key", WHOLE)
def test_recorded_stream_gives_the_numbers_of_the_table(key):
    turns = parse(key)
    assert [summary(turn) for turn in turns] == EXPECTED[key]
    (turn,) = turns
    said = [choice for chunk in chunks_of(key) for choice in chunk["choices"]]
    assert turn.completion_token_ids.tolist() == [
        token_id for choice in said for token_id in choice.get("token_ids") or []
    ]
    assert reported(turn).tolist() == [
        value
        for choice in said
        if choice["logprobs"]
        for value in choice["logprobs"].get("token_logprobs")
        or [entry["logprob"] for entry in choice["logprobs"]["content"]]
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 1 << 20])
@pytest.mark.parametrize("key", WHOLE)
def test_slicing_changes_nothing(key, size):
    body, _ = recorded(key)
    raw = body.encode()
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    text = [body[at : at + size] for at in range(0, len(body), size)]
    for given in (pieces, text):
        for a, b in zip(assemble(key, given), parse(key), strict=True):
            assert identical(a, b)


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_other_line_ends_comments_and_heartbeats_change_nothing(size):
    body, _ = recorded(COMPLETIONS)
    noisy = ": a comment\n\nid: 7\nretry: 10\n\nevent: ping\ndata: {}\n\n" + body.replace(
        "data: {", ": x\ndata: {"
    )
    for form in (noisy, noisy.replace("\n", "\r\n"), noisy.replace("\n", "\r"), body.rstrip("\n")):
        pieces = [form[at : at + size] for at in range(0, len(form), size)]
        assert identical(assemble(COMPLETIONS, pieces)[0], parse(COMPLETIONS)[0])


def test_a_stream_gives_what_the_whole_reply_gives():
    # The same prompt, seed and temperature, recorded once streamed and once whole, with one token less.
    (streamed,), (whole,) = parse(COMPLETIONS), parse("fp32_raw/completions_ids_lp1.json")
    assert streamed.prompt_token_ids.tolist() == whole.prompt_token_ids.tolist()
    assert streamed.completion_token_ids.tolist()[:4] == whole.completion_token_ids.tolist()
    assert reported(streamed).tolist()[:4] == reported(whole).tolist()


def interleaved(n: int = 2) -> tuple[list[Any], dict[str, Any]]:
    """The recorded stream as n choices that take turns, choice i with its logprobs i nats lower."""
    _, request = recorded(COMPLETIONS)
    chunks = []
    for chunk in chunks_of(COMPLETIONS):
        for index in range(n):
            copy = json.loads(json.dumps(chunk))
            copy["choices"][0]["index"] = index
            logprobs = copy["choices"][0]["logprobs"]
            logprobs["token_logprobs"] = [value - index for value in logprobs["token_logprobs"]]
            chunks.append(copy)
    return chunks, {**request, "n": n}


def test_choices_that_interleave_come_apart():
    chunks, request = interleaved()
    turns = assemble(COMPLETIONS, [sse(chunks)], request=request)
    (single,) = parse(COMPLETIONS)
    assert [turn.completion_token_ids.tolist() for turn in turns] == [
        single.completion_token_ids.tolist()
    ] * 2
    sums = [math.fsum(reported(turn).tolist()) for turn in turns]
    assert sums[0] - sums[1] == pytest.approx(5, abs=1e-5)


def test_a_choice_that_the_request_asked_for_and_that_never_came_is_refused():
    chunks, request = interleaved()
    only = [chunk for chunk in chunks if chunk["choices"][0]["index"] == 0]
    assert refusal(COMPLETIONS, only, request=request).code == "statement-contradicted"
    other = [chunk for chunk in chunks if chunk["choices"][0]["index"] == 1]
    assert refusal(COMPLETIONS, other, request=None).code == "reply-malformed"


def test_a_choice_that_takes_anothers_chunk_is_refused():
    chunks, request = interleaved()
    chunks[2]["choices"][0]["index"], chunks[5]["choices"][0]["index"] = 1, 0
    assert refusal(COMPLETIONS, chunks, request=request).code == "stream-disordered"


def test_usage_in_its_own_chunk_is_held_against_the_ids():
    chunks = chunks_of(GENERATE)
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    (turn,) = parse(GENERATE)
    assert turn.usage.num_completion_tokens == 4
    chunks[-1]["usage"]["completion_tokens"] = 5
    assert refusal(GENERATE, chunks).code == "usage-mismatch"


def test_running_usage_is_held_against_the_ids_so_far():
    chunks = chunks_of(COMPLETIONS)
    for at, chunk in enumerate(chunks):
        chunk["usage"] = {"prompt_tokens": 22, "completion_tokens": at + 1, "total_tokens": 23 + at}
    assert len(assemble(COMPLETIONS, [sse(chunks)])) == 1
    del chunks[2]
    assert refusal(COMPLETIONS, chunks).code in ("statement-contradicted", "stream-disordered")


# -- damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ROUTES)
def test_a_stream_that_ends_early_is_truncated_wherever_it_is_cut(key):
    body, request = recorded(key)
    raw = body.encode()
    # The last cut that is no cut is after `[DONE]`, whose line end adds nothing.
    for stop in range(0, len(raw) - len(b"\n\n"), 11):
        with pytest.raises(ReplyError) as caught:
            assemble(key, [raw[:stop]], request=request)
        assert caught.value.code == "stream-truncated"


@pytest.mark.parametrize("key", ROUTES)
def test_a_stream_without_a_finish_reason_is_truncated(key):
    chunks = chunks_of(key)
    for chunk in chunks:
        for choice in chunk["choices"]:
            choice["finish_reason"] = None
            choice["weight_versions"] = None
    error = refusal(key, chunks)
    assert error.code == "stream-truncated"
    assert "choice 0: none" in str(error)


@pytest.mark.parametrize("key", ROUTES)
def test_each_chunk_repeated_is_refused(key):
    for at in range(len(chunks_of(key))):
        chunks = chunks_of(key)
        chunks.insert(at, chunks[at])
        assert refusal(key, chunks).code in ("stream-disordered", "usage-mismatch")


@pytest.mark.parametrize("key", [COMPLETIONS, GENERATE])
def test_each_chunk_of_tokens_lost_is_refused(key):
    """Chat says neither offsets nor counts: there the loss of a chunk does not show."""
    for at in range(len(chunks_of(key)) - (key == GENERATE)):
        chunks = chunks_of(key)
        del chunks[at]
        code = refusal(key, chunks).code
        assert code in (
            "stream-disordered",
            "stream-truncated",
            "usage-mismatch",
            "prompt-ids-missing",
        )


def test_two_chunks_of_completions_swapped_are_refused():
    for at in range(len(chunks_of(COMPLETIONS)) - 1):
        chunks = chunks_of(COMPLETIONS)
        chunks[at : at + 2] = reversed(chunks[at : at + 2])
        assert refusal(COMPLETIONS, chunks).code == "stream-disordered"


def test_equal_chunks_in_a_row_pass_where_the_usage_counts_them():
    """A model that loops can send them; without a count nobody knows."""
    chunks = chunks_of(GENERATE)
    for chunk in chunks[:3]:
        chunk["choices"] = json.loads(json.dumps(chunks[0]["choices"]))
    (turn,) = assemble(GENERATE, [sse(chunks)])
    assert turn.completion_token_ids.tolist() == [572, 572, 572, 448]
    # The spans of versions count the ids as well.
    usage = chunks.pop()
    assert len(assemble(GENERATE, [sse(chunks)])) == 1
    chunks[-1]["choices"][0]["weight_versions"] = None
    assert refusal(GENERATE, chunks).code == "stream-disordered"
    # Usage that counts nothing proves nothing.
    usage["usage"] = {"prompt_tokens": 22}
    assert refusal(GENERATE, [*chunks, usage]).code == "stream-disordered"


def chat(*ids: int, finish_reason: str = "stop", step: float = 0.25) -> list[Any]:
    """Chat's chunks, one a token: the first with the prompt, the last with the end, and none with a count."""
    head = {"id": "c", "object": "chat.completion.chunk"}
    chunks: list[Any] = [
        {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        | {"prompt_token_ids": [1, 5]}
    ]
    for at, token_id in enumerate(ids):
        choice = {"index": 0, "delta": {"content": f" {token_id}"}, "token_ids": [token_id]}
        choice["logprobs"] = {"content": [{"token": f" {token_id}", "logprob": -step * (at + 1)}]}
        choice["finish_reason"] = finish_reason if at == len(ids) - 1 else None
        chunks.append({**head, "choices": [choice]})
    return chunks


def read_chat(chunks: list[Any], request: Any = None) -> list[int]:
    provenance = Provenance(
        engine="vllm", logprobs_mode="processed", sampling=SamplingParams(temperature=1.0)
    )
    assembler = ResponseAssembler(request=request, provenance=provenance)
    assembler.feed(sse(chunks))
    (turn,) = assembler.finish()
    return turn.completion_token_ids.tolist()


def counted(chunks: list[Any], num: int) -> list[Any]:
    usage = {"prompt_tokens": 2, "completion_tokens": num, "total_tokens": 2 + num}
    return [*chunks, {"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": usage}]


@pytest.mark.parametrize(("start", "size"), [(1, 1), (1, 2), (1, 3), (2, 2), (3, 1), (2, 1)])
def test_a_run_of_chunks_that_comes_twice_is_refused_where_nothing_counts_it(start, size):
    """A retry that sends the last few chunks again: each is like one before, if not the one just before."""
    chunks = chat(7, 8, 9, 2)
    assert read_chat(chunks) == [7, 8, 9, 2]
    again = chunks[: start + size] + chunks[start : start + size] + chunks[start + size :]
    with pytest.raises(ReplyError) as caught:
        read_chat(again)
    assert caught.value.code == "stream-disordered"
    assert f"{size} chunk(s) like the {size} just before" in str(caught.value)
    # Counted, it is a model that loops: its logprobs can be the same when they are at their limit.
    assert len(read_chat(counted(again, 4 + size))) == 4 + size
    with pytest.raises(ReplyError) as caught:
        read_chat(counted(again, 4))
    assert caught.value.code == "usage-mismatch"


def test_tokens_that_come_again_with_other_logprobs_or_elsewhere_are_no_repeat():
    assert read_chat(chat(7, 8, 7, 8, 2)) == [7, 8, 7, 8, 2]
    assert read_chat(chat(7, 8, 9, 7, 2, step=0.0)) == [7, 8, 9, 7, 2]
    with pytest.raises(ReplyError):
        read_chat(chat(7, 8, 7, 8, 2, step=0.0))


def test_choices_that_interleave_are_no_repeats_of_one_another():
    both = []
    for chunk in chat(7, 8, 2):
        other = json.loads(json.dumps(chunk))
        other["choices"][0]["index"] = 1
        both += [chunk, other]
    provenance = Provenance(
        engine="vllm", logprobs_mode="processed", sampling=SamplingParams(temperature=1.0)
    )
    assembler = ResponseAssembler(provenance=provenance)
    assembler.feed(sse(both))
    assert [turn.completion_token_ids.tolist() for turn in assembler.finish()] == [[7, 8, 2]] * 2


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_choice_that_ends_by_its_length_before_it_is_that_long_lost_a_chunk_unless_usage_counts_it(lost):
    request = {"messages": [], "max_tokens": 4}
    chunks = chat(7, 8, 9, 5, finish_reason="length")
    assert read_chat(chunks, request) == [7, 8, 9, 5]
    del chunks[lost]
    with pytest.raises(ReplyError, match="choice 0: 3 ids, and no usage to count by") as caught:
        read_chat(chunks, request)
    assert caught.value.code == "stream-disordered"
    # The context was full: the engine counts as many.
    assert len(read_chat(counted(chunks, 3), request)) == 3
    with pytest.raises(ReplyError) as caught:
        read_chat(counted(chunks, 4), request)
    assert caught.value.code == "usage-mismatch"


def test_what_no_count_shows_is_known():
    """Not wished for: where the stream says nothing of its chunks, these pass, as the documents say."""
    chunks = chat(7, 8, 9, 2)
    assert read_chat(chunks[:2] + chunks[3:]) == [7, 9, 2]
    swapped = [chunks[0], chunks[2], chunks[1], *chunks[3:]]
    assert read_chat(counted(swapped, 4)) == [8, 7, 9, 2]
    # A count in every chunk shows both.
    for at, chunk in enumerate(chunks[1:], 1):
        chunk["usage"] = {"prompt_tokens": 2, "completion_tokens": at, "total_tokens": 2 + at}
    assert read_chat(counted(chunks, 4)) == [7, 8, 9, 2]
    for damaged in (chunks[:2] + chunks[3:], swapped):
        with pytest.raises(ReplyError) as caught:
            read_chat(counted(damaged, 4))
        assert caught.value.code == "usage-mismatch"


@pytest.mark.parametrize("key", ROUTES)
def test_ids_and_logprobs_are_counted_in_every_chunk(key):
    """One id too many here and one too few there would cancel over the whole."""
    chunks = chunks_of(key)
    first, second = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0].get("token_ids")][:2]
    first["token_ids"], second["token_ids"] = first["token_ids"] + second["token_ids"], []
    error = refusal(key, chunks)
    assert error.code == "length-mismatch"
    assert "1 logprobs for 2 ids in one chunk" in str(error)


@pytest.mark.parametrize(
    "change",
    [
        lambda chunk: chunk.update(id="another", request_id="another"),
        lambda chunk: chunk.update(object="chat.completion"),
        lambda chunk: chunk["choices"][0].update(prompt_token_ids=[1, 5]),
        lambda chunk: chunk["choices"][0].update(delta={"role": "assistant"}),
    ],
)
def test_a_chunk_of_another_reply_is_refused(change: Callable[[Any], Any]):
    for key in ROUTES:
        chunks = chunks_of(key)
        change(chunks[2])
        assert refusal(key, chunks).code == "stream-disordered"


def test_nothing_comes_after_a_finish_reason_or_the_usage_or_done():
    chunks = chunks_of(COMPLETIONS)
    chunks[2]["choices"][0]["finish_reason"] = "stop"
    assert refusal(COMPLETIONS, chunks).code == "stream-disordered"
    chunks = chunks_of(GENERATE)
    chunks[2], chunks[4] = chunks[4], chunks[2]
    assert refusal(GENERATE, chunks).code == "stream-disordered"
    with pytest.raises(ReplyError) as caught:
        assemble(COMPLETIONS, [sse(chunks_of(COMPLETIONS)), "data: {}\n\n"])
    assert caught.value.code == "stream-disordered"


def test_errors_in_a_stream_are_errors_and_show_no_message():
    secret = "attack at dawn"
    body = {"error": {"message": secret, "type": "InternalServerError", "code": 500}}
    whole = sse(chunks_of(COMPLETIONS)[:2])
    for event in (f"data: {json.dumps(body)}\n\n", f"event: error\ndata: {json.dumps(body)}\n\n"):
        with pytest.raises(ReplyError) as caught:
            assemble(COMPLETIONS, [event + whole])
        assert caught.value.code == "reply-error-body"
        assert "InternalServerError" in str(caught.value)
        assert secret not in str(caught.value)
    with pytest.raises(ReplyError) as caught:
        assemble(COMPLETIONS, [f"event: error\ndata: {secret}\n\n"])
    assert caught.value.code == "reply-error-body"


@pytest.mark.parametrize("end", ["", "\n", "\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_json_body_where_a_stream_should_be_is_named_for_what_it_is(end, size):
    """What a server answers a request that it refuses; asking again would fail again."""
    secret = "attack at dawn"
    body = {"error": {"message": secret, "type": "BadRequestError", "code": 400}}
    for form in (json.dumps(body), "\n " + json.dumps(body, indent=2)):
        text = form + end
        with pytest.raises(ReplyError) as caught:
            assemble(COMPLETIONS, [text[at : at + size] for at in range(0, len(text), size)])
        assert caught.value.code == "reply-error-body"
        assert "BadRequestError" in str(caught.value)
        assert secret not in str(caught.value)
    whole, _ = recorded("fp32_raw/completions_ids_lp1.json")
    with pytest.raises(ReplyError) as caught:
        assemble(COMPLETIONS, [json.dumps(whole) + end])
    assert caught.value.code == "reply-malformed"
    assert "parse_response" in str(caught.value)


@pytest.mark.parametrize("size", [1, 2, 5, 1 << 20])
def test_blanks_that_the_format_leaves_open_and_a_byte_order_mark_change_nothing(size):
    body, _ = recorded(COMPLETIONS)
    for form in ("\ufeff" + body, body.replace("data: ", "data:"), body.replace("data: ", "data:").rstrip()):
        raw = form.encode()
        pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
        assert identical(assemble(COMPLETIONS, pieces)[0], parse(COMPLETIONS)[0])
    with pytest.raises(ReplyError) as caught:
        assemble(COMPLETIONS, ["\ufeff" + json.dumps({"error": {"type": "BadRequestError"}})])
    assert caught.value.code == "reply-error-body"
    # Elsewhere the mark is no part of the format.
    with pytest.raises(ReplyError):
        assemble(COMPLETIONS, [body.replace("\n\n", "\n\n\ufeff", 1)])


@pytest.mark.parametrize("piece", [None, 5, [b"data: {}"], 0.5])
def test_a_piece_that_is_neither_bytes_nor_text_is_a_record_error(piece):
    with pytest.raises(
        RecordError, match=f"expected bytes or text of the stream, found {type(piece).__name__}"
    ):
        assemble(COMPLETIONS, [piece])


@pytest.mark.parametrize(
    "data", ["", "{", "null", "[]", "7", '{"choices": 7}', '{"choices": [{}]}', "<html>"]
)
def test_events_that_hold_no_chunk_are_malformed(data):
    with pytest.raises(ReplyError) as caught:
        assemble(COMPLETIONS, [f"data: {data}\n\ndata: [DONE]\n\n"])
    assert caught.value.code in ("reply-malformed", "stream-truncated")


@pytest.mark.parametrize("value", [-1, True, 5.0, "5", 2**31])
@pytest.mark.parametrize("key", ROUTES)
def test_ids_of_a_chunk_are_true_integers(key, value):
    chunks = chunks_of(key)
    chunks[1]["choices"][0]["token_ids"] = [value]
    assert refusal(key, chunks).code == "reply-malformed"


def test_a_stream_of_an_echo_and_a_request_that_denies_the_stream_are_refused():
    _, request = recorded(COMPLETIONS)
    for change, code in (({"echo": True}, "echo-unsupported"), ({"stream": False}, "statement-contradicted")):
        with pytest.raises(ReplyError) as caught:
            assemble(COMPLETIONS, [], request={**request, **change})
        assert caught.value.code == code


def test_ids_that_only_some_chunks_have_are_refused():
    chunks = chunks_of(COMPLETIONS)
    chunks[2]["choices"][0]["token_ids"] = None
    assert refusal(COMPLETIONS, chunks).code == "ids-missing"
    chunks = chunks_of(COMPLETIONS)
    chunks[2]["choices"][0]["logprobs"] = None
    assert refusal(COMPLETIONS, chunks).code in ("logprobs-missing", "stream-disordered")


def test_ids_spelt_in_a_stream_are_read():
    chunks = chunks_of(COMPLETIONS)
    offset = 0
    for chunk in chunks:
        choice = chunk["choices"][0]
        choice["logprobs"]["tokens"] = [f"token_id:{token_id}" for token_id in choice["token_ids"]]
        (said,) = choice["logprobs"]["top_logprobs"]
        choice["logprobs"]["top_logprobs"] = [
            dict(zip(choice["logprobs"]["tokens"], said.values(), strict=True))
        ]
        # The characters of the strings are counted, as recorded from the whole reply.
        choice["logprobs"]["text_offset"] = [offset]
        offset += len(choice["logprobs"]["tokens"][0])
        choice["token_ids"] = None
    (turn,) = assemble(COMPLETIONS, [sse(chunks)])
    assert turn.completion_token_ids.tolist() == parse(COMPLETIONS)[0].completion_token_ids.tolist()


# -- the assembler ----------------------------------------------------------------------------------------


def test_after_a_refusal_every_call_raises_the_same():
    _, request = recorded(COMPLETIONS)
    assembler = ResponseAssembler(request=request, provenance=provenance_of(COMPLETIONS, request))
    with pytest.raises(ReplyError) as first:
        assembler.feed("data: {\n\n")
    whole = sse(chunks_of(COMPLETIONS))
    for call in (lambda: assembler.feed(whole), assembler.finish):
        with pytest.raises(ReplyError) as again:
            call()
        assert again.value is first.value


def test_finish_can_be_asked_twice_and_takes_no_more_pieces():
    body, request = recorded(COMPLETIONS)
    assembler = ResponseAssembler(request=request, provenance=provenance_of(COMPLETIONS, request))
    assembler.feed(body)
    assert assembler.finish() == assembler.finish()
    with pytest.raises(RecordError, match="after finish"):
        assembler.feed(body)


def test_the_callers_name_for_the_request_is_in_the_refusal_and_survives_pickling():
    import pickle

    with pytest.raises(ReplyError) as caught:
        assemble(COMPLETIONS, ["data: {\n\n"], request_id="step 3/17")
    assert str(caught.value).startswith("[reply-malformed] request 'step 3/17'\n")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.findings[0].where.request == "step 3/17"


def plain_chunk(at: int, **changes: Any) -> bytes:
    """One token of completions with all that vLLM says of it; the first has the prompt, the third the end."""
    said = {
        "tokens": [" a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{" a": -0.5}],
        "text_offset": [2 * at],
    }
    choice = {"index": 0, "text": " a", "token_ids": [7], "logprobs": said | changes}
    choice |= {"prompt_token_ids": None if at else [1, 5], "finish_reason": "length" if at == 2 else None}
    return b"data: " + json.dumps({"object": "text_completion", "choices": [choice]}).encode() + b"\n\n"


def assembled(*chunks: bytes) -> Turn:
    provenance = Provenance(
        engine="vllm", logprobs_mode="processed", sampling=SamplingParams(temperature=1.0)
    )
    assembler = ResponseAssembler(request={"logprobs": 1}, provenance=provenance)
    assembler.feed(b"".join(chunks) + b"data: [DONE]\n\n")
    return assembler.finish()[0]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"top_logprobs": [{" a": -0.75}]}, "statement-contradicted"),
        ({"top_logprobs": [{" b": -0.5}]}, "statement-contradicted"),
        ({"top_logprobs": []}, "length-mismatch"),
        ({"token_logprobs": [-0.5, -0.5]}, "length-mismatch"),
        ({"tokens": [" a", " a"]}, "length-mismatch"),
        ({"token_logprobs": [True]}, "reply-malformed"),
        ({"text_offset": [4]}, "stream-disordered"),
        ({"text_offset": [0]}, "stream-disordered"),
    ],
)
def test_a_chunk_in_the_middle_that_is_almost_like_the_others_is_refused(changes, code):
    turn = assembled(plain_chunk(0), plain_chunk(1), plain_chunk(2))
    assert turn.completion_token_ids.tolist() == [7, 7, 7]
    assert turn.inference_logprobs.tolist() == [-0.5, -0.5, -0.5]
    with pytest.raises(ReplyError) as caught:
        assembled(plain_chunk(0), plain_chunk(1, **changes), plain_chunk(2))
    assert caught.value.code == code
