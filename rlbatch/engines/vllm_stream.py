"""vLLM's streams: chunks of completions, chat and generate put together into a whole body.

What a chunk says is kept as it came; ids and logprobs are counted chunk by chunk, because two mistakes in two
chunks may cancel. That each chunk came once and in order is held against what the stream says of it: the
ends, the prompt's ids and chat's role (once a choice), text offsets (each begins where one ended), running
and final counts. Without a final count a stream is refused that repeats chunks, or ends by its length before
it is that long.

Chat and generate have no offsets. Without a count the loss of a chunk does not show in a stream that ends
with a stop token; with one, two chunks that changed places do not, unless every chunk has its own count
(stream_options with include_usage and continuous_usage_stats).

The whole body is then judged by the rules of whole replies. Knows nothing of events.
"""

from collections.abc import Mapping

import msgspec

from rlbatch.engines.body import no_reply
from rlbatch.engines.output import EngineOutput
from rlbatch.engines.refusals import refusal
from rlbatch.engines.request import Route, asked_max_tokens, asked_number, asks_for
from rlbatch.engines.usage import Counts
from rlbatch.engines.vllm import outputs_of
from rlbatch.engines.vllm_alternatives import all_agree, check_drawn
from rlbatch.engines.vllm_chunk import Chunk, ChunkChoice, ChunkLogprobs, PlainChunk
from rlbatch.engines.vllm_growing import Growing, require_once_each, whole
from rlbatch.engines.vllm_reply import Body
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance

_ROUTES: Mapping[str | None, Route] = {
    "text_completion": "completions",
    "chat.completion.chunk": "chat",
    None: "generate",
}

_DECODER = msgspec.json.Decoder(Chunk)

_PLAIN_DECODER = msgspec.json.Decoder(PlainChunk)


class VllmStream:
    """Takes the chunks of one reply."""

    def __init__(self, request: Mapping[str, object] | None, provenance: Provenance) -> None:
        """Begin; a request that asked for an echo, or for no stream, is refused.

        Raises:
            ReplyError: echo-unsupported or statement-contradicted.
        """
        if asks_for(request, "echo"):
            raise refusal("echo-unsupported", "logprobs of the completion alone", "the request set echo=true")
        if request is not None and request.get("stream") is False:
            raise refusal(
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
        self._choices: dict[int, Growing] = {}
        self._expects_plain = False

    def feed(self, data: bytes) -> None:
        """Take one chunk.

        Raises:
            ReplyError: reply-malformed, reply-error-body, route-unsupported, length-mismatch or
                stream-disordered.
        """
        # Whatever is not plain, and whatever is wrong, is for the rules below.
        if self._expects_plain and self._took_plain(data):
            return
        try:
            chunk = _DECODER.decode(data)
        except msgspec.ValidationError as error:
            raise no_reply(data, complaint=str(error), streamed=True) from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise refusal("reply-malformed", "a chunk of JSON in every event", str(error)) from None
        if chunk.error is not None:
            raise no_reply(data, complaint="a chunk with an error", streamed=True)
        self._check_chunk(chunk)
        if not chunk.choices:
            self._take_usage(chunk)
        for choice in chunk.choices:
            self._take(choice, data)
        if chunk.usage is not None and len(chunk.choices) == 1:
            self._check_running(chunk.usage, chunk.choices[0].index)
        self._expects_plain = self._route == "completions" and _is_like_plain(chunk)

    def _took_plain(self, data: bytes) -> bool:
        """Take a chunk of one token in which everything is as it should be; else leave all as it was."""
        try:
            chunk = _PLAIN_DECODER.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return False
        choice = chunk.choices[0]
        logprobs = choice.logprobs
        state = self._choices.get(choice.index)
        token, value, offset = logprobs.tokens[0], logprobs.token_logprobs[0], logprobs.text_offset[0]
        if (
            state is None
            or state.finished is not None
            or state.last == data
            or self._usage is not None
            or chunk.id != self._id
            or chunk.request_id != self._request_id
            or (offset != state.next_offset and offset != state.num_chars)
            or logprobs.top_logprobs[0].get(token) != value
        ):
            return False
        state.ids.append(choice.token_ids[0])
        state.values.append(value)
        state.tokens.append(token)
        state.next_offset = offset + len(token)
        if choice.text:
            state.texts.append(choice.text)
            state.num_chars += len(choice.text)
        state.last = data
        return True

    def finish(self) -> list[EngineOutput]:
        """The choices of the whole reply.

        Raises:
            ReplyError: stream-truncated, stream-disordered, or as for a whole reply.
        """
        if self._route is None:
            raise refusal("stream-truncated", "a stream with chunks", "none")
        if self._usage is None or self._usage.completion_tokens is None:
            # Where every offset was compared, a loss has shown.
            limit = None if self._route == "completions" else asked_max_tokens(self._request, self._route)
            for index, each in self._choices.items():
                require_once_each(index, each, limit=limit)
        body = Body(
            choices=[whole(index, each, self._route) for index, each in self._choices.items()],
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
                raise refusal("route-unsupported", "chunks of completions, chat or generate", "other chunks")
            self._route, self._kind = route, chunk.kind
            self._id, self._request_id = chunk.id, chunk.request_id
        elif chunk.id != self._id or chunk.request_id != self._request_id or chunk.kind != self._kind:
            raise refusal("stream-disordered", "chunks of one reply", "a chunk with another id or object")
        if self._usage is not None:
            raise refusal("stream-disordered", "nothing after the final usage", "another chunk")
        if chunk.prompt_token_ids is not None:
            if self._prompt_ids is not None and self._prompt_ids != chunk.prompt_token_ids:
                raise refusal("statement-contradicted", "one prompt's ids in all chunks", "other ids")
            self._prompt_ids = chunk.prompt_token_ids

    def _take_usage(self, chunk: Chunk) -> None:
        if chunk.usage is None:
            raise refusal("reply-malformed", "choices or usage in every chunk", "a chunk with neither")
        self._usage = chunk.usage

    def _check_running(self, usage: Counts, index: int) -> None:
        counted = len(self._choices[index].ids)
        if usage.completion_tokens is not None and usage.completion_tokens != counted:
            found = f"choice {index}: {usage.completion_tokens} so far, the lists have {counted}"
            raise refusal("usage-mismatch", "running usage equal to the number of ids", found)

    def _take(self, choice: ChunkChoice, data: bytes) -> None:
        state = self._choices.get(choice.index)
        if state is None:
            state = self._choices[choice.index] = Growing()
        if state.finished is not None:
            raise _disorder(choice, "nothing after a finish_reason", "another chunk")
        if choice.logprobs is not None and choice.logprobs.top_logprobs is not None:
            _check_alternatives(choice, choice.logprobs, self._num_asked)
        if choice.prompt_token_ids is not None or choice.delta is not None:
            _take_prompt(state, choice)
        _take_text(state, choice)
        num_tokens = _take_tokens(state, choice, self._route == "completions")
        if num_tokens:
            state.twice = state.twice or state.last == data
            if self._route != "completions":
                state.marks.append(hash(data))
        state.last = data
        if choice.finish_reason is not None:
            state.finished = choice
        elif choice.routed_experts is not None or choice.weight_versions is not None:
            found = "routed_experts or weight_versions before it"
            raise _disorder(choice, "statements of the whole completion with its finish_reason", found)


def _is_like_plain(chunk: Chunk) -> bool:
    """Whether the next one may well be plain; where not, trying costs more than it can save."""
    if len(chunk.choices) != 1 or chunk.usage is not None:
        return False
    logprobs = chunk.choices[0].logprobs
    whole = logprobs is not None and logprobs.top_logprobs is not None and logprobs.text_offset is not None
    return whole and len(chunk.choices[0].token_ids or ()) == 1


def _check_alternatives(choice: ChunkChoice, logprobs: ChunkLogprobs, num_asked: int | None) -> None:
    said, tokens, values = logprobs.top_logprobs or [], logprobs.tokens, logprobs.token_logprobs or []
    if len(said) != len(values):
        found = f"choice {choice.index}: {len(said)} beside {len(values)} logprobs in one chunk"
        raise refusal("length-mismatch", "alternatives for each logprob", found)
    # Of `tokens` the length is compared where they are taken.
    if tokens is not None and len(tokens) == len(values) and not all_agree(said, tokens, values):
        check_drawn(f"choice {choice.index}", said, tokens, values, num_asked=num_asked)


def _take_prompt(state: Growing, choice: ChunkChoice) -> None:
    if choice.prompt_token_ids is not None:
        if state.last:
            raise _disorder(choice, "the prompt's ids in a choice's first chunk", "them in a later one")
        state.prompt_ids = choice.prompt_token_ids
    if choice.delta is not None and choice.delta.role is not None and state.last:
        raise _disorder(choice, "the role in a choice's first chunk", "it in a later one")


def _take_text(state: Growing, choice: ChunkChoice) -> None:
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


def _take_tokens(state: Growing, choice: ChunkChoice, completions: bool) -> int:
    """Ids and logprobs of one chunk; the number of ids, or of logprobs where it has no ids."""
    ids, logprobs = choice.token_ids, choice.logprobs
    entries = None
    values: list[float | None] | None = None
    if logprobs is not None:
        entries, values = logprobs.content, logprobs.token_logprobs
        if (entries if completions else values) is not None:
            raise refusal(
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


def _uneven(choice: ChunkChoice, num_values: int, num_other: int, other: str) -> ReplyError:
    found = f"choice {choice.index}: {num_values} logprobs for {num_other} {other} in one chunk"
    return refusal("length-mismatch", "one logprob for each sampled id of every chunk", found)


def _disorder(choice: ChunkChoice, expected: str, found: str) -> ReplyError:
    return refusal("stream-disordered", expected, f"choice {choice.index}: {found}")
