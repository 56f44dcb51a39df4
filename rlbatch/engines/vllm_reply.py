"""What a vLLM reply says, field by field: the structs it is decoded into and where each list lies.

    route        prompt ids                   sampled ids        logprobs
    completions  choice.prompt_token_ids      choice.token_ids   logprobs.token_logprobs
    chat         prompt_token_ids             choice.token_ids   logprobs.content[].logprob
    generate     prompt_token_ids, or null    choice.token_ids   logprobs.content[].logprob, .token_id

With return_tokens_as_token_ids the token's strings are `token_id:572`; older generate replies have those in
`content[].token`, and lack usage and weight_versions. Fields that are not needed are skipped by the decoder;
so is `text_offset`, which counts the characters of such strings. Judges nothing. Recorded from vLLM 0.32.0.
"""

from collections.abc import Sequence

import msgspec

from rlbatch.engines.body import TokenId
from rlbatch.engines.parts import Message, Span
from rlbatch.engines.request import Route
from rlbatch.engines.usage import Counts

TOKEN_ID_PREFIX = "token_id:"
"""With return_tokens_as_token_ids a token's string is this and its id."""

MAX_ID_DIGITS = 10
"""No id below 2**31 has more."""


class Ranked(msgspec.Struct, gc=False):
    """One alternative of a token, or the token itself."""

    logprob: float | None = None
    token: str | None = None
    token_id: TokenId | None = None


class Entry(msgspec.Struct, gc=False):
    """One sampled token of chat and generate."""

    logprob: float | None = None
    token: str | None = None
    token_id: TokenId | None = None
    top_logprobs: list[Ranked] | None = None


PromptLogprobs = list[dict[str, Ranked] | None]
"""[P]: null for the first token; else by id, as text, the token's own and the best alternatives."""


TopLogprobs = list[dict[str, float | None] | None]
"""Of completions: by the token's string, the sampled token and the best alternatives; null beside a null."""


class Logprobs(msgspec.Struct, gc=False):
    """`content` is of chat and generate, the others are of completions."""

    token_logprobs: list[float | None] | None = None
    tokens: list[str] | None = None
    content: list[Entry] | None = None
    top_logprobs: TopLogprobs | msgspec.Raw | None = None


class Choice(msgspec.Struct, gc=False):
    """One completion. Choices run prompt-major: with n a prompt, choice i belongs to prompt i // n."""

    index: int
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str | None = None
    message: Message | None = None
    weight_versions: list[Span] | None = None
    routed_experts: object = None
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def label(self) -> str:
        """What findings call it."""
        return f"choice {self.index}"


class UnreadLogprobs(Logprobs, gc=False):
    """Of JSON: `top_logprobs` as it stands there, to be read some at a time; empty where there is none."""

    top_logprobs: msgspec.Raw = msgspec.Raw()


class UnreadChoice(Choice, gc=False):
    """Of JSON."""

    logprobs: UnreadLogprobs | None = None


class Body(msgspec.Struct, gc=False):
    """A reply of any of the three routes; `choices` is None where the body is something else."""

    choices: Sequence[Choice] | None = None
    kind: str | None = msgspec.field(name="object", default=None)
    id: str | None = None
    request_id: str | None = None
    output_mode: str | None = None
    prompt_token_ids: list[TokenId] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    usage: Counts | None = None
    error: object = None


class UnreadBody(Body, gc=False):
    """Of JSON."""

    choices: list[UnreadChoice] | None = None


def route_of(body: Body) -> Route | None:
    """The route that makes bodies of this shape; None where none of the three does."""
    choices = body.choices or []
    if body.kind is not None:
        kinds: dict[str, Route] = {"chat.completion": "chat", "text_completion": "completions"}
        return kinds.get(body.kind)
    if body.request_id is not None or body.output_mode is not None:
        return "generate"
    if any(choice.message is not None for choice in choices):
        return "chat"
    if any(choice.text is not None for choice in choices):
        return "completions"
    return "generate"


def logprobs_of(logprobs: Logprobs | None, route: Route) -> list[float | None] | None:
    """Nats as reported, null where an entry has none; None where there is no list.

    [C], or [P + C] where the prompt was echoed.
    """
    if logprobs is None:
        return None
    if route == "completions":
        return logprobs.token_logprobs
    content = logprobs.content
    return None if content is None else [entry.logprob for entry in content]


def spelt_ids_of(logprobs: Logprobs | None) -> list[int | None]:
    """The ids that stand beside the logprobs, as numbers or as `token_id:572`; empty where none do.

    Example:
        tokens ["token_id:572", "token_id:4"] -> [572, 4]
    """
    if logprobs is None:
        return []
    entries = logprobs.content or []
    if any(entry.token_id is not None for entry in entries):
        return [entry.token_id for entry in entries]
    tokens = logprobs.tokens or [entry.token or "" for entry in entries]
    if not all(token.startswith(TOKEN_ID_PREFIX) for token in tokens):
        return []
    return [_number(token.removeprefix(TOKEN_ID_PREFIX)) for token in tokens]


def _number(digits: str) -> int:
    # -1 is no id: a string that spells none contradicts whatever it is compared with.
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= MAX_ID_DIGITS else -1
