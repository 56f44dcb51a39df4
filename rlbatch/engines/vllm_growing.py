"""One choice of a vLLM stream while its chunks come in, and what it is when they have all come.

Holds what was said; that it was said rightly is for the stream to judge, but for what shows at the end alone.
"""

from rlbatch.engines.parts import Message
from rlbatch.engines.refusals import refusal
from rlbatch.engines.repeats import first_repeat
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
        "marks",
        "next_offset",
        "num_chars",
        "parsed",
        "prompt_ids",
        "texts",
        "tokens",
        "twice",
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
        # Of each chunk with tokens and no offset, which are alike where the chunks are.
        self.marks: list[int] = []
        self.twice = False


def require_once_each(index: int, state: Growing, *, limit: int | None) -> None:
    """Refuse what a chunk that was sent twice, or was lost, would look like; for streams that count nothing.

    A model that loops may send equal chunks, and a full context or a limit of the server's ends a choice
    early: without a count nobody knows.

    Args:
        index: the choice's.
        state: all its chunks.
        limit: the most tokens that the request asked for; None where it does not say, or where the chunks'
            offsets show every loss.

    Raises:
        ReplyError: stream-disordered.
    """
    last = state.finished
    if last is None or last.weight_versions is not None:
        # Spans of versions cover every id, once each.
        return
    repeat = first_repeat(state.marks)
    if state.twice or repeat is not None:
        size = 1 if state.twice or repeat is None else repeat.size
        found = f"choice {index}: {size} chunk(s) like the {size} just before, and no usage to count by"
        raise refusal("stream-disordered", "chunks that came once each", found)
    num_ids = max(len(state.ids), len(state.values))
    if last.finish_reason == "length" and limit is not None and num_ids < limit:
        raise refusal(
            "stream-disordered",
            f"{limit} ids of a choice that ended by its length, or usage that counts fewer",
            f"choice {index}: {num_ids} ids, and no usage to count by",
            likely="a chunk was lost; or the context or a limit of the server's ended it: only a count tells",
        )


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
