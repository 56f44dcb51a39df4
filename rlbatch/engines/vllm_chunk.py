"""What one chunk of a vLLM stream says: the structs it is decoded into. Judges nothing.

    route        object                   prompt ids, in the first chunk   text
    completions  text_completion          choice.prompt_token_ids          choice.text
    chat         chat.completion.chunk    prompt_token_ids                 choice.delta.content
    generate     none, but request_id     the request's                    choice.text, or none

Ids and logprobs lie where a whole reply has them, and are of some tokens of one choice. A last chunk without
choices may have the usage. weight_versions and routed_experts (generate) come with the finish_reason and are
of the whole completion. Recorded from vLLM 0.32.0.
"""

from typing import Literal

import msgspec

from rlbatch.engines.body import TokenId
from rlbatch.engines.parts import Message, Span
from rlbatch.engines.usage import Counts
from rlbatch.engines.vllm_reply import Logprobs, TopLogprobs


class ChunkLogprobs(Logprobs, gc=False):
    """With the one thing that only a stream needs; alternatives are few enough to be read at once."""

    text_offset: list[int] | None = None
    top_logprobs: TopLogprobs | None = None


class ChunkChoice(msgspec.Struct, gc=False):
    """What a chunk adds to one choice."""

    index: int
    token_ids: list[TokenId] | None = None
    logprobs: ChunkLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str | None = None
    delta: Message | None = None
    prompt_token_ids: list[TokenId] | None = None
    weight_versions: list[Span] | None = None
    routed_experts: object = None


class Chunk(msgspec.Struct, gc=False):
    """The data of one event."""

    choices: list[ChunkChoice]
    kind: str | None = msgspec.field(name="object", default=None)
    id: str | None = None
    request_id: str | None = None
    prompt_token_ids: list[TokenId] | None = None
    usage: Counts | None = None
    error: object = None


class PlainLogprobs(msgspec.Struct, gc=False):
    """Of one token, with its alternatives."""

    tokens: tuple[str]
    token_logprobs: tuple[float]
    text_offset: tuple[int]
    top_logprobs: tuple[dict[str, float | None]]
    content: None = None


class PlainChoice(msgspec.Struct, gc=False):
    """One token, and nothing about the prompt or the end."""

    index: int
    token_ids: tuple[TokenId]
    logprobs: PlainLogprobs
    text: str
    finish_reason: None = None
    stop_reason: None = None
    delta: None = None
    prompt_token_ids: None = None
    weight_versions: None = None
    routed_experts: None = None


class PlainChunk(msgspec.Struct, gc=False):
    """What almost every chunk of completions is: one token of one choice, with all that is said of it.

    The types are the test: what has more, less or other than this is decoded again, as a `Chunk`.
    """

    choices: tuple[PlainChoice]
    kind: Literal["text_completion"] = msgspec.field(name="object")
    id: str | None = None
    request_id: str | None = None
    prompt_token_ids: None = None
    usage: None = None
    error: None = None
