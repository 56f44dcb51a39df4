"""What a reply of SGLang's /generate says, field by field: the structs it is decoded into.

    sampled ids   output_ids, and meta_info.output_token_logprobs[][1]
    logprobs      meta_info.output_token_logprobs[][0], rows of [logprob, id, text]
    prompt ids    prompt_token_ids where asked for, and meta_info.input_token_logprobs[][1]
    the end       meta_info.finish_reason, an object; null in a chunk of a stream

A reply is one such object, or a list of them for several prompts or choices. /generate writes NaN and
infinity as null. Fields that are not needed are skipped by the decoder. Judges nothing but the types.
"""

import msgspec

from rlbatch.engines.body import MAX_REPLY_BYTES, TokenId, error_in
from rlbatch.engines.parts import Span
from rlbatch.engines.refusals import refusal
from rlbatch.errors import ReplyError

WANTED = "a reply of SGLang's /generate: an object with meta_info, or a list of them"


class Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """One token: [logprob, id, text]; text is null unless it was asked for."""

    logprob: float | None
    token_id: TokenId | None = None
    text: str | None = None


class Finish(msgspec.Struct, gc=False):
    """How the completion ended."""

    type: str
    matched: int | str | None = None
    """The stop token's id, or the stop string."""


class Meta(msgspec.Struct, gc=False):
    """`meta_info`: counts and lists of one completion."""

    id: str | None = None
    finish_reason: Finish | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt's, those that came from a cache."""
    output_token_logprobs: list[Row] | None = None
    output_token_logprobs_length: int | None = None
    output_top_logprobs: list[list[Row] | None] | None = None
    input_token_logprobs: list[Row] | None = None
    weight_version: str | int | None = None
    weight_versions: list[Span] | None = None
    routed_experts: object = None


class Reply(msgspec.Struct, gc=False):
    """One completion, or one chunk of it."""

    meta_info: Meta
    output_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    text: str | None = None
    index: int | None = None
    """In a stream, which completion of the request this is."""


# Made once: the type is looked through every time a decoder is made.
_DECODER = msgspec.json.Decoder(Reply | list[Reply])


def decode_replies(payload: object) -> list[Reply]:
    """The completions of a body: one, or as many as its list holds.

    Raises:
        ReplyError: reply-malformed, reply-error-body, or logprob-not-finite (a number that no double holds).
    """
    try:
        if isinstance(payload, (bytes, bytearray, memoryview, str)):
            _check_size(len(payload))
            decoded = _DECODER.decode(payload)
        else:
            decoded = msgspec.convert(payload, Reply | list[Reply])
    except msgspec.ValidationError as error:
        raise error_in(payload) or _malformed(str(error)) from None
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        # What is not UTF-8 is shown by its reason only: the text around it may be of the prompt.
        raise _malformed(error.reason if isinstance(error, UnicodeEncodeError) else str(error)) from None
    return decoded if isinstance(decoded, list) else [decoded]


def _check_size(size: int) -> None:
    if size > MAX_REPLY_BYTES:
        raise _malformed(f"{size:,} bytes; at most {MAX_REPLY_BYTES:,} are read")


def _malformed(complaint: str) -> ReplyError:
    # The decoder names the place of a JSON number that no double can hold; logprobs are the only floats.
    code = (
        "logprob-not-finite" if "out of range" in complaint and "logprobs" in complaint else "reply-malformed"
    )
    return refusal(code, WANTED, complaint)
