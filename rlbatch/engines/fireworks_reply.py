"""What a Fireworks reply says, field by field: /v1/completions, and chat completions with the same lists.

    sampled ids        choice.token_ids, raw_output.completion_token_ids, logprobs.content[].token_id,
                       logprobs.token_ids, raw_output.completion_logprobs.content[].token_id
    raw logprobs       logprobs.content[].logprob, logprobs.token_logprobs, `logprobs` as a bare list,
                       raw_output.completion_logprobs.content[].logprob
    sampled logprobs   logprobs.content[].sampling_logprob, and the same in raw_output
    prompt ids         prompt_token_ids (choice or body), raw_output.prompt_token_ids

Written from the service's API reference and its clients. Fields that are not needed are skipped by the
decoder. Judges nothing.
"""

import msgspec

from rlbatch.engines.body import TokenId
from rlbatch.engines.parts import Message
from rlbatch.engines.usage import Counts


class Top(msgspec.Struct, gc=False):
    """One of the most probable tokens."""

    logprob: float | None = None
    token_id: TokenId | None = None


class Entry(msgspec.Struct, gc=False):
    """One token of `content`."""

    token: str | None = None
    logprob: float | None = None
    """Of the model's own softmax."""
    sampling_logprob: float | None = None
    """Of the distribution that was sampled from."""
    token_id: TokenId | None = None
    top_logprobs: list[Top] | None = None
    routing_matrix: str | None = None
    """Experts of this token, encoded; empty where there are none."""


class Logprobs(msgspec.Struct, gc=False):
    """`content`, or the legacy lists."""

    content: list[Entry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    token_ids: list[TokenId] | None = None


class RawOutput(msgspec.Struct, gc=False):
    """What the model saw and drew; echoed prompt tokens included."""

    prompt_token_ids: list[TokenId] | None = None
    completion_token_ids: list[TokenId] | None = None
    completion_logprobs: Logprobs | None = None


class Choice(msgspec.Struct, gc=False):
    """One completion, or a chunk of one."""

    index: int
    text: str | None = None
    message: Message | None = None
    delta: Message | None = None
    logprobs: Logprobs | list[float | None] | None = None
    finish_reason: str | None = None
    raw_output: RawOutput | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    routing_references: object = None

    @property
    def label(self) -> str:
        """What findings call it."""
        return f"choice {self.index}"


class Body(msgspec.Struct, gc=False):
    """A reply, or one chunk of a stream; `choices` is None where the body is something else."""

    choices: list[Choice] | None = None
    id: str | None = None
    usage: Counts | None = None
    prompt_token_ids: list[TokenId] | None = None
    routing_references: object = None
    error: object = None


def places_of(choice: Choice) -> dict[str, Logprobs]:
    """Where this choice has logprobs, by name."""
    found: dict[str, Logprobs] = {}
    if isinstance(choice.logprobs, list):
        found["logprobs"] = Logprobs(token_logprobs=choice.logprobs)
    elif choice.logprobs is not None:
        found["logprobs"] = choice.logprobs
    if choice.raw_output is not None and choice.raw_output.completion_logprobs is not None:
        found["raw_output.completion_logprobs"] = choice.raw_output.completion_logprobs
    return found
