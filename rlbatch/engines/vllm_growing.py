"""One choice of a vLLM stream while its chunks come in, and what it is when they have all come.

Holds what was said; that it was said rightly is for the stream to judge.
"""

from rlbatch.engines.parts import Message
from rlbatch.engines.refusals import refusal
from rlbatch.engines.request import Route
from rlbatch.engines.vllm_chunk import ChunkChoice
from rlbatch.engines.vllm_reply import Choice, Entry, Logprobs


class Growing:
    """One choice while its chunks come in."""

    __slots__ = (
        "entries",
        "finished",
        "ids",
        "last",
        "next_offset",
        "num_chars",
        "parsed",
        "prompt_ids",
        "texts",
        "tokens",
        "values",
        "without_ids",
        "without_logprobs",
    )

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.values: list[float | None] = []
        self.tokens: list[str] = []
        self.entries: list[Entry] = []
        self.texts: list[str] = []
        self.num_chars = 0
        self.next_offset = 0
        self.prompt_ids: list[int] | None = None
        self.parsed = False
        self.without_ids = False
        self.without_logprobs = False
        self.finished: ChunkChoice | None = None
        self.last: bytes = b""


def whole(index: int, state: Growing, route: Route) -> Choice:
    """The choice as a whole reply would have it."""
    last = state.finished
    if last is None:
        raise refusal(
            "stream-truncated",
            "a finish_reason for every choice",
            f"choice {index}: none, after {len(state.ids)} ids",
        )
    if state.without_ids and state.ids:
        raise refusal("ids-missing", "ids in every chunk", f"choice {index}: some chunks have none")
    if state.without_logprobs and state.values:
        raise refusal("logprobs-missing", "logprobs in every chunk", f"choice {index}: some chunks have none")
    logprobs = None
    if not state.without_logprobs:
        logprobs = Logprobs(content=state.entries)
        if route == "completions":
            logprobs = Logprobs(token_logprobs=state.values, tokens=state.tokens or None)
    text = "".join(state.texts)
    message = None
    if route == "chat":
        message = Message(content=text, tool_calls=[None] if state.parsed else None)
    return Choice(
        index=index,
        token_ids=None if state.without_ids else state.ids,
        prompt_token_ids=state.prompt_ids,
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        text=None if route == "generate" and not state.texts else text,
        message=message,
        weight_versions=last.weight_versions,
        routed_experts=last.routed_experts,
    )
