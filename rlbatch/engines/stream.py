"""`ResponseAssembler`: a streamed reply, piece by piece, to the turns that the whole reply would have given.

Holds the rules of every engine's streams: events in any slicing, an error event is an error, `[DONE]` comes
last and must come, and after a refusal nothing is believed any more. What a chunk says is for the engine's
stream. Knows nothing of HTTP.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from rlbatch.engines.body import error_refusal
from rlbatch.engines.fireworks_stream import FireworksStream
from rlbatch.engines.output import EngineOutput, to_turn
from rlbatch.engines.refusals import refusal
from rlbatch.engines.sglang_stream import SglangStream
from rlbatch.engines.sse import Event, EventSplitter
from rlbatch.engines.stated import stated_engine, with_request_id
from rlbatch.engines.vllm_stream import VllmStream
from rlbatch.errors import RecordError, ReplyError
from rlbatch.records import Provenance, Turn

DONE = b"[DONE]"
"""The data of the last event."""

_HEARTBEATS = frozenset({"ping", "heartbeat", "keepalive", "keep-alive"})


class Stream(Protocol):
    """One engine's streams: chunks in, choices out."""

    def feed(self, chunk: bytes) -> None:
        """Take the data of one event, which is JSON."""

    def finish(self) -> list[EngineOutput]:
        """The choices, once the stream has ended; refuses one that is not whole."""


StreamMaker = Callable[[Mapping[str, object] | None, Provenance], Stream]

STREAMS: Mapping[str, StreamMaker] = MappingProxyType(
    {"fireworks": FireworksStream, "sglang": SglangStream, "vllm": VllmStream}
)
"""What assembles each engine's streams."""


class ResponseAssembler:
    """Puts one streamed reply together; a new one for every reply.

    That every chunk came, once and in order, is proven as far as the stream says something of its chunks.
    vLLM's completions have offsets, SGLang's chunks running counts; Fireworks' streams are refused without a
    count of the whole. vLLM's chat and generate streams have none unless it is asked for: without one the
    loss of a chunk passes, except in a choice that ends by its length. Ask for
    `stream_options={"include_usage": True, "continuous_usage_stats": True}`: the first shows a loss, the
    second an exchange of two chunks too.
    """

    def __init__(
        self,
        *,
        engine: str | None = None,
        request: Mapping[str, object] | None = None,
        provenance: Provenance,
        request_id: str | None = None,
    ) -> None:
        """Begin.

        Args:
            engine: a name in `STREAMS`; None takes the provenance's.
            request: the body of the request that was sent, where it is at hand. Without it the provenance is
                taken at its word.
            provenance: how the logprobs came to be, which no reply says.
            request_id: the caller's own name for the request, which errors then show.

        Raises:
            ReplyError: route-unsupported (an engine without streams here), statement-contradicted.
            RecordError: `provenance` or `request` is of another type.
        """
        named = stated_engine("ResponseAssembler", engine, STREAMS.keys(), request, provenance)
        self._stream = STREAMS[named](request, provenance)
        self._provenance = provenance
        self._request_id = request_id
        self._events = EventSplitter()
        self._done = False
        self._refused: ReplyError | None = None
        self._turns: list[Turn] | None = None

    def feed(self, piece: bytes | str) -> None:
        """Take the next piece of the body, cut anywhere.

        Raises:
            ReplyError: what has come so far cannot become exact tokens with exact logprobs. The reply is
                lost: every later call raises the same.
            RecordError: the piece is neither bytes nor text, or comes after `finish`.
        """
        self._require_open()
        with with_request_id(self._request_id, self._refuse):
            for event in self._events.feed(piece):
                if event[0] or event[1] == DONE or self._done:
                    self._take(event)
                else:
                    # A chunk, as almost every event is.
                    self._stream.feed(event[1])

    def finish(self) -> list[Turn]:
        """The turns, one a choice, ordered by the choices' index; to be called when the body has ended.

        Raises:
            ReplyError: stream-truncated where the end is missing; else as `parse_response`.
            RecordError: as `parse_response`.
        """
        if self._turns is not None:
            return list(self._turns)
        self._require_open()
        with with_request_id(self._request_id, self._refuse):
            rest = self._events.rest()
            if rest == DONE:
                self._take(("", DONE))
            elif rest is not None:
                raise _truncated("it ends within an event")
            if not self._done:
                raise _truncated("no `[DONE]` at its end")
            self._turns = [to_turn(output, self._provenance) for output in self._stream.finish()]
        return list(self._turns)

    def _take(self, event: Event) -> None:
        name, data = event
        if name in _HEARTBEATS:
            return
        if name == "error":
            raise error_refusal(data)
        if self._done:
            raise refusal("stream-disordered", "nothing after `[DONE]`", "another event")
        if data == DONE:
            self._done = True
        else:
            self._stream.feed(data)

    def _require_open(self) -> None:
        if self._refused is not None:
            raise self._refused
        if self._turns is not None:
            raise RecordError("ResponseAssembler: expected no piece after finish(), found one")

    def _refuse(self, error: ReplyError) -> None:
        self._refused = error


def _truncated(found: str) -> ReplyError:
    return refusal("stream-truncated", "a stream with its end", found)
