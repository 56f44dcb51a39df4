"""vLLM's streams: chunks of completions, chat and generate put together into a whole body.

What a chunk says is kept as it came; ids and logprobs are counted chunk by chunk, because two mistakes in two
chunks may cancel. That each chunk came once and in order is held against what the stream says of it: the
ends, the prompt's ids and chat's role (once a choice), text offsets (each begins where one ended), running
and final counts. Where two chunks in a row are the same and no count proves that they are two, the stream is
refused. The whole body is then judged by the rules of whole replies. Knows nothing of events.
"""

from collections.abc import Mapping

import msgspec

from rlbatch.engines.agreement import refusal as refuse
from rlbatch.engines.body import refusal
from rlbatch.engines.output import EngineOutput
from rlbatch.engines.request import Route, asked_number, asks_for
from rlbatch.engines.vllm import outputs_of
from rlbatch.engines.vllm_alternatives import all_agree, check_drawn
from rlbatch.engines.vllm_chunk import Chunk, ChunkChoice, ChunkLogprobs
from rlbatch.engines.vllm_reply import Body, Choice, Counts, Entry, Logprobs, Message
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance

_ROUTES: Mapping[str | None, Route] = {
    "text_completion": "completions",
    "chat.completion.chunk": "chat",
    None: "generate",
}


_DECODER = msgspec.json.Decoder(Chunk)


class _Growing:
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


class VllmStream:
    """Takes the chunks of one reply."""

    def __init__(self, request: Mapping[str, object] | None, provenance: Provenance) -> None:
        """Begin; a request that asked for an echo, or for no stream, is refused.

        Raises:
            ReplyError: echo-unsupported or statement-contradicted.
        """
        if asks_for(request, "echo"):
            raise refuse("echo-unsupported", "logprobs of the completion alone", "the request set echo=true")
        if request is not None and request.get("stream") is False:
            raise refuse(
                "statement-contradicted", "a request with stream=true", "the request set stream=false"
            )
        self._request = request
        self._num_asked = asked_number(request, "logprobs")
        self._provenance = provenance
        self._route: Route | None = None
        self._id: str | None = None
        self._request_id: str | None = None
        self._kind: str | None = None
        self._prompt_ids: list[int] | None = None
        self._usage: Counts | None = None
        self._choices: dict[int, _Growing] = {}
        self._unproven: str | None = None

    def feed(self, data: bytes) -> None:
        """Take one chunk.

        Raises:
            ReplyError: reply-malformed, reply-error-body, route-unsupported, length-mismatch or
                stream-disordered.
        """
        try:
            chunk = _DECODER.decode(data)
        except msgspec.ValidationError as error:
            raise refusal(data, complaint=str(error), streamed=True) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise refuse("reply-malformed", "a chunk of JSON in every event", str(error)) from None
        if chunk.error is not None:
            raise refusal(data, complaint="a chunk with an error", streamed=True)
        self._check_chunk(chunk)
        if not chunk.choices:
            self._take_usage(chunk)
        for choice in chunk.choices:
            self._take(choice, data)
        if chunk.usage is not None and len(chunk.choices) == 1:
            self._check_running(chunk.usage, chunk.choices[0].index)

    def finish(self) -> list[EngineOutput]:
        """The choices of the whole reply.

        Raises:
            ReplyError: stream-truncated, stream-disordered, or as for a whole reply.
        """
        if self._route is None:
            raise refuse("stream-truncated", "a stream with chunks", "none")
        if self._unproven is not None and self._usage is None:
            raise refuse("stream-disordered", "chunks that came once each", self._unproven)
        body = Body(
            choices=[_whole(index, each, self._route) for index, each in self._choices.items()],
            id=self._id,
            request_id=self._request_id,
            prompt_token_ids=self._prompt_ids,
            usage=self._usage,
        )
        return outputs_of(body, self._route, self._request, self._provenance)

    def _check_chunk(self, chunk: Chunk) -> None:
        """The same reply throughout, and nothing after the counts."""
        if self._route is None:
            route = _ROUTES.get(chunk.kind)
            if route is None or (route == "generate" and chunk.request_id is None):
                raise refuse("route-unsupported", "chunks of completions, chat or generate", "other chunks")
            self._route, self._kind = route, chunk.kind
            self._id, self._request_id = chunk.id, chunk.request_id
        elif chunk.id != self._id or chunk.request_id != self._request_id or chunk.kind != self._kind:
            raise refuse("stream-disordered", "chunks of one reply", "a chunk with another id or object")
        if self._usage is not None:
            raise refuse("stream-disordered", "nothing after the final usage", "another chunk")
        if chunk.prompt_token_ids is not None:
            if self._prompt_ids is not None and self._prompt_ids != chunk.prompt_token_ids:
                raise refuse("statement-contradicted", "one prompt's ids in all chunks", "other ids")
            self._prompt_ids = chunk.prompt_token_ids

    def _take_usage(self, chunk: Chunk) -> None:
        if chunk.usage is None:
            raise refuse("reply-malformed", "choices or usage in every chunk", "a chunk with neither")
        self._usage = chunk.usage

    def _check_running(self, usage: Counts, index: int) -> None:
        counted = len(self._choices[index].ids)
        if usage.completion_tokens is not None and usage.completion_tokens != counted:
            found = f"choice {index}: {usage.completion_tokens} so far, the lists have {counted}"
            raise refuse("usage-mismatch", "running usage equal to the number of ids", found)

    def _take(self, choice: ChunkChoice, data: bytes) -> None:
        state = self._choices.get(choice.index)
        if state is None:
            state = self._choices[choice.index] = _Growing()
        if state.finished is not None:
            raise _disorder(choice, "nothing after a finish_reason", "another chunk")
        if choice.logprobs is not None and choice.logprobs.top_logprobs is not None:
            _check_alternatives(choice, choice.logprobs, self._num_asked)
        if choice.prompt_token_ids is not None or choice.delta is not None:
            _take_prompt(state, choice)
        _take_text(state, choice)
        num_tokens = _take_tokens(state, choice, self._route == "completions")
        if num_tokens and state.last == data:
            self._unproven = f"choice {choice.index}: a chunk like the one before, and no usage to count by"
        state.last = data
        if choice.finish_reason is not None:
            state.finished = choice
        elif choice.routed_experts is not None or choice.weight_versions is not None:
            found = "routed_experts or weight_versions before it"
            raise _disorder(choice, "statements of the whole completion with its finish_reason", found)


def _check_alternatives(choice: ChunkChoice, logprobs: ChunkLogprobs, num_asked: int | None) -> None:
    said, tokens, values = logprobs.top_logprobs or [], logprobs.tokens, logprobs.token_logprobs or []
    if len(said) != len(values):
        found = f"choice {choice.index}: {len(said)} beside {len(values)} logprobs in one chunk"
        raise refuse("length-mismatch", "alternatives for each logprob", found)
    # Of `tokens` the length is compared where they are taken.
    if tokens is not None and len(tokens) == len(values) and not all_agree(said, tokens, values):
        check_drawn(f"choice {choice.index}", said, tokens, values, num_asked=num_asked)


def _take_prompt(state: _Growing, choice: ChunkChoice) -> None:
    if choice.prompt_token_ids is not None:
        if state.last:
            raise _disorder(choice, "the prompt's ids in a choice's first chunk", "them in a later one")
        state.prompt_ids = choice.prompt_token_ids
    if choice.delta is not None and choice.delta.role is not None and state.last:
        raise _disorder(choice, "the role in a choice's first chunk", "it in a later one")


def _take_text(state: _Growing, choice: ChunkChoice) -> None:
    logprobs = choice.logprobs
    if logprobs is not None and logprobs.text_offset:
        # Newer versions count the characters of the tokens, older ones those of the text so far.
        if logprobs.text_offset[0] not in (state.next_offset, state.num_chars):
            found = f"{logprobs.text_offset[0]}: a chunk is missing, was repeated or came too early"
            raise _disorder(choice, f"a text_offset of {state.next_offset}, where the last one ended", found)
        if logprobs.tokens:
            state.next_offset = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
    text = choice.text
    if choice.delta is not None:
        text = choice.delta.content
        state.parsed = state.parsed or choice.delta.parsed
    if text:
        state.texts.append(text)
        state.num_chars += len(text)


def _take_tokens(state: _Growing, choice: ChunkChoice, completions: bool) -> int:
    """Ids and logprobs of one chunk; the number of ids, or of logprobs where it has no ids."""
    ids, logprobs = choice.token_ids, choice.logprobs
    entries = None
    values: list[float | None] | None = None
    if logprobs is not None:
        entries, values = logprobs.content, logprobs.token_logprobs
        if (entries if completions else values) is not None:
            raise refuse(
                "reply-malformed", "logprobs where vLLM has them", f"choice {choice.index}: elsewhere"
            )
    if entries is not None:
        state.entries += entries
        values = [entry.logprob for entry in entries]
    if logprobs is not None and logprobs.tokens is not None:
        if len(logprobs.tokens) != len(values or ()):
            raise _uneven(choice, len(values or ()), len(logprobs.tokens), "tokens")
        state.tokens += logprobs.tokens
    if ids and values:
        if len(ids) != len(values):
            raise _uneven(choice, len(values), len(ids), "ids")
        state.ids += ids
        state.values += values
        return len(ids)
    if ids:
        state.ids += ids
        state.without_logprobs = True
    elif values:
        if ids is not None:
            raise _uneven(choice, len(values), 0, "ids")
        state.values += values
        state.without_ids = True
    return len(ids or values or ())


def _whole(index: int, state: _Growing, route: Route) -> Choice:
    """The choice as a whole reply would have it."""
    last = state.finished
    if last is None:
        raise refuse(
            "stream-truncated",
            "a finish_reason for every choice",
            f"choice {index}: none, after {len(state.ids)} ids",
        )
    if state.without_ids and state.ids:
        raise refuse("ids-missing", "ids in every chunk", f"choice {index}: some chunks have none")
    if state.without_logprobs and state.values:
        raise refuse("logprobs-missing", "logprobs in every chunk", f"choice {index}: some chunks have none")
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


def _uneven(choice: ChunkChoice, num_values: int, num_other: int, other: str) -> ReplyError:
    found = f"choice {choice.index}: {num_values} logprobs for {num_other} {other} in one chunk"
    return refuse("length-mismatch", "one logprob for each sampled id of every chunk", found)


def _disorder(choice: ChunkChoice, expected: str, found: str) -> ReplyError:
    return refuse("stream-disordered", expected, f"choice {choice.index}: {found}")
