"""From a payload to a typed struct, or to the finding that says what the payload is instead.

The decoding is one pass of msgspec in strict mode: an id that is a boolean or a float is refused, not read as
a number. Only a payload that fails is looked at again, to name the mistake: an error body, a stream, another
route, a recording's wrapper. Knows bodies by their keys; what is in a reply is for each engine's module. No
finding shows text of a body: it may hold the prompt.
"""

import re
from collections.abc import Mapping
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, ReplyError

MAX_REPLY_BYTES = 256 * 2**20
"""A larger body is refused undecoded: 32,768 tokens with 20 alternatives each take about a third of it."""

TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""An id as it is decoded: a true int that an int32 holds."""

Struct = TypeVar("Struct", bound=msgspec.Struct)

WANTED = "a reply of /v1/completions, /v1/chat/completions or /inference/v1/generate, not streamed"

_BINARY = (bytes, bytearray, memoryview)

_STREAM_START = re.compile(rb"\s*(data|event|id|retry)?:")
"""Server-sent events start with a field's name, or with the colon of a comment; JSON never does."""

_PLAIN_WORD = re.compile(r"[A-Za-z0-9_.\- \[\]]{1,60}")
"""What an error's type, code or parameter looks like; anything else could be text and is not shown."""

_OTHER_ROUTES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"type", "role", "content"}), "/v1/messages, which reports neither ids nor logprobs"),
    (frozenset({"output", "instructions"}), "/v1/responses, which reports no ids"),
    (frozenset({"tokens", "count"}), "/tokenize, which samples nothing"),
    (
        frozenset({"token_ids", "sampling_params"}),
        "a render route or a request, which hold no sampled tokens",
    ),
    (frozenset({"meta_info"}), "SGLang's /generate"),
    (frozenset({"object", "data"}), "a list of models, embeddings or scores"),
)
"""Keys that a body of another route has, and what it is."""


def decode(payload: object, struct: type[Struct]) -> Struct:
    """The payload as a struct of this type, whose fields are what is needed of a reply.

    Args:
        payload: bytes, text or the decoded object.
        struct: with a field `choices`, None where the body has none.

    Raises:
        ReplyError: reply-malformed, reply-error-body or route-unsupported.
    """
    if isinstance(payload, str):
        payload = _encode(payload)
    try:
        if isinstance(payload, _BINARY):
            _check_bytes(payload)
            return msgspec.json.decode(payload, type=struct)
        return msgspec.convert(payload, struct)
    except msgspec.ValidationError as error:
        raise no_reply(payload, complaint=str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ReplyError.of(_malformed(str(error))) from None


def no_reply(payload: object, *, complaint: str, streamed: bool = False) -> ReplyError:
    """Why this payload, which is JSON or an object, is no reply: what it is, else the complaint.

    Of a stream only an error body is told apart: that it is a chunk is as it should be.
    """
    explained = _explain(_decoded(payload))
    if streamed and explained is not None and explained.code != "reply-error-body":
        explained = None
    return ReplyError.of(explained or _malformed(complaint))


def error_in(payload: object) -> ReplyError | None:
    """The refusal of an error body; None where the payload is none."""
    body = _decoded(payload)
    return ReplyError.of(_error_body(body)) if isinstance(body, Mapping) and _has_error(body) else None


def _decoded(payload: object) -> object:
    """What JSON makes of it; None where it makes nothing, such as of a number that no double can hold."""
    try:
        return msgspec.json.decode(payload) if isinstance(payload, (*_BINARY, str)) else payload
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None


def _has_error(body: Mapping[object, object]) -> bool:
    return body.get("error") is not None or body.get("object") == "error"


def _encode(text: str) -> bytes:
    _check_size(len(text))
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ReplyError.of(_malformed("text with lone surrogates, which is not UTF-8")) from None


def _check_bytes(payload: bytes | bytearray | memoryview) -> None:
    _check_size(len(payload))
    # The start of an event stream is within its first line; blanks before it are few.
    if _STREAM_START.match(bytes(payload[:64])):
        raise ReplyError.of(_stream("server-sent events"))


def _check_size(size: int) -> None:
    if size > MAX_REPLY_BYTES:
        raise ReplyError.of(
            finding(
                "reply-malformed",
                expected=f"a body of at most {MAX_REPLY_BYTES:,} bytes",
                found=f"{size:,}",
                likely="something else than one reply, or far too many alternatives a token",
                fix="ask for fewer choices or alternatives (logprobs, prompt_logprobs) in one request",
            )
        )


def _explain(body: object) -> Finding | None:
    """What a decoded body is, where that is known and it is no reply."""
    if isinstance(body, list) and body:
        # Several prompts rendered make a list of bodies, all of one kind.
        body = body[0]
    if not isinstance(body, Mapping):
        return None
    if "endpoint" in body and body.keys() & {"response", "response_text", "sse", "turns"}:
        return _wrapper()
    whole = body.get("choices") is not None
    if _has_error(body) or ("detail" in body and not whole):
        return _error_body(body)
    if body.get("object") == "chat.completion.chunk":
        return _stream("one chunk of a chat stream")
    if body.keys() == {"prompt"}:
        return _other_route("/detokenize, which samples nothing")
    if not whole:
        for keys, name in _OTHER_ROUTES:
            if keys <= body.keys():
                return _other_route(name)
    return None


def _error_body(body: Mapping[str, object]) -> Finding:
    nested = body.get("error")
    error = nested if isinstance(nested, Mapping) else body
    said = [
        f"{name} {error[name]}"
        for name in ("type", "code", "param")
        if _PLAIN_WORD.fullmatch(_word(error, name))
    ]
    key = next(name for name in ("error", "detail", "object") if name in body)
    return finding(
        "reply-error-body",
        expected="a reply with choices",
        found=f"an error body (`{key}`)" + (f": {', '.join(said)}" if said else ""),
    )


def _word(error: Mapping[str, object], name: str) -> str:
    value = error.get(name)
    return str(value) if isinstance(value, (int, str)) else ""


def _wrapper() -> Finding:
    return finding(
        "reply-malformed",
        expected="the body of a reply",
        found="a recording: a wrapper with the endpoint and the request around the reply",
        likely="a recorded file was passed whole",
        fix="pass what the file has under `response`, and its `request` as request=",
    )


def _stream(what: str) -> Finding:
    return finding(
        "route-unsupported",
        expected=WANTED,
        found=f"a stream: {what}",
        fix="feed the whole stream to rlbatch.engines.ResponseAssembler, or send the request without stream",
    )


def _other_route(name: str) -> Finding:
    return finding("route-unsupported", expected=WANTED, found=f"a body of {name}")


def _malformed(complaint: str) -> Finding:
    # msgspec names the one float field by its path; a JSON number that no double can hold is not finite.
    code = (
        "logprob-not-finite" if "out of range" in complaint and "logprob" in complaint else "reply-malformed"
    )
    return finding(code, expected=WANTED, found=complaint)


def error_refusal(data: bytes) -> ReplyError:
    """A stream's event of its own kind for errors, whatever it holds."""
    body = _decoded(data)
    if isinstance(body, Mapping) and (_has_error(body) or body.keys() & {"error", "detail"}):
        return ReplyError.of(_error_body(body))
    return ReplyError.of(_error_body({"error": None}))


def chunk_refusal(what: str) -> ReplyError:
    """A body that is one chunk of a stream: its tokens are only some of the completion's."""
    return ReplyError.of(_stream(what))
