"""Fireworks' completions, streamed: chunks put together into the body that would have come whole.

Ids and logprobs of the chunks are new ones each time; `raw_output` holds all so far, or all at the end. A
stream in which nothing counts the whole (neither usage nor raw_output) is refused: a lost or repeated chunk
would not show. What the whole body says is judged in `rlbatch.engines.fireworks`.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rlbatch.engines.body import decode, no_reply
from rlbatch.engines.fireworks import outputs_of
from rlbatch.engines.fireworks_reply import Body, Choice, Logprobs, RawOutput
from rlbatch.engines.output import EngineOutput
from rlbatch.engines.parts import Message
from rlbatch.engines.refusals import refusal
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance

Item = TypeVar("Item")


class FireworksStream:
    """The chunks of one reply."""

    def __init__(self, request: Mapping[str, object] | None, provenance: Provenance) -> None:
        self._request = request
        self._provenance = provenance
        self._body = Body(choices=[])
        self._choices: dict[int, Choice] = {}
        self._started = False

    def feed(self, chunk: bytes) -> None:
        """Take the data of one event.

        Raises:
            ReplyError: reply-malformed, reply-error-body, stream-disordered or statement-contradicted.
        """
        new = decode(chunk, Body)
        if new.choices is None or new.error is not None:
            raise no_reply(chunk, complaint="a chunk that has no `choices`")
        body = self._body
        if self._started and new.id != body.id:
            raise _disordered("chunks of one reply", "a chunk with another id")
        self._started = True
        body.id = new.id
        body.prompt_token_ids = _same("prompt_token_ids", body.prompt_token_ids, new.prompt_token_ids)
        body.usage = new.usage if body.usage is None or new.usage is not None else body.usage
        body.routing_references = body.routing_references or new.routing_references
        for part in new.choices:
            held = self._choices.get(part.index)
            if held is None:
                self._choices[part.index] = _begun(part)
            elif held.finish_reason is not None:
                raise _disordered("nothing after the end", f"{part.label}: a chunk after its finish_reason")
            else:
                _extend(held, part)

    def finish(self) -> list[EngineOutput]:
        """The choices, ordered by index.

        Raises:
            ReplyError: stream-truncated, and all that `rlbatch.engines.fireworks.read_reply` raises.
        """
        choices = list(self._choices.values())
        for choice in choices:
            if choice.finish_reason is None:
                raise refusal("stream-truncated", "a finish_reason", f"{choice.label} ends without one")
        counted = self._body.usage is not None and self._body.usage.completion_tokens is not None
        whole = all(
            choice.raw_output is not None and choice.raw_output.completion_token_ids is not None
            for choice in choices
        )
        if not choices or not (counted or whole):
            raise refusal(
                "stream-truncated",
                "usage or raw_output, which count the whole",
                f"{len(choices)} choices and neither",
                likely="the request asked for neither, so a lost or repeated chunk would not show",
                fix="set raw_output=true, or stream_options.include_usage=true",
            )
        self._body.choices = choices
        return outputs_of(self._body, self._request, self._provenance)


def _begun(part: Choice) -> Choice:
    """A choice that holds what its first chunk brought; the chunk's delta is the start of a message."""
    part.message, part.delta = part.delta, None
    return part


def _extend(held: Choice, part: Choice) -> None:
    label = held.label
    held.token_ids = _joined(held.token_ids, part.token_ids)
    held.logprobs = _joined_logprobs(label, held.logprobs, part.logprobs)
    held.prompt_token_ids = _same("prompt_token_ids", held.prompt_token_ids, part.prompt_token_ids)
    held.raw_output = _newer(label, held.raw_output, part.raw_output)
    held.text = _joined_text(held.text, part.text)
    held.message = _joined_message(held.message, part.delta)
    held.routing_references = held.routing_references or part.routing_references
    held.finish_reason = part.finish_reason


def _joined(held: list[Item] | None, new: list[Item] | None) -> list[Item] | None:
    # A chunk without tokens (the first, the last) may lack the list; what is lost is missed in the counts.
    if held is None or new is None:
        return new if held is None else held
    held.extend(new)
    return held


Reported = Logprobs | list[float | None] | None


def _joined_logprobs(label: str, held: Reported, new: Reported) -> Reported:
    if held is None or new is None:
        return new if held is None else held
    if isinstance(held, list) and isinstance(new, list):
        return _joined(held, new)
    if isinstance(held, list) or isinstance(new, list):
        raise _disordered("logprobs in one form", f"{label}: another form in a later chunk")
    held.content = _joined(held.content, new.content)
    held.tokens = _joined(held.tokens, new.tokens)
    held.token_logprobs = _joined(held.token_logprobs, new.token_logprobs)
    held.token_ids = _joined(held.token_ids, new.token_ids)
    return held


def _newer(label: str, held: RawOutput | None, new: RawOutput | None) -> RawOutput | None:
    """The later raw_output, which goes on from the earlier one."""
    if held is None or new is None:
        return new if held is None else held
    before, after = held.completion_token_ids or [], new.completion_token_ids or []
    if after[: len(before)] != before:
        raise _disordered("raw_output that goes on from what it was", f"{label}: other ids in a later chunk")
    _same("raw_output.prompt_token_ids", held.prompt_token_ids, new.prompt_token_ids)
    return new


def _joined_message(held: Message | None, new: Message | None) -> Message | None:
    if held is None or new is None:
        return new if held is None else held
    return Message(
        content=_joined_text(held.content, new.content),
        reasoning_content=_joined_text(held.reasoning_content, new.reasoning_content),
        tool_calls=[*(held.tool_calls or ()), *(new.tool_calls or ())] or None,
    )


def _joined_text(held: str | None, new: str | None) -> str | None:
    return held if new is None else (held or "") + new


def _same(name: str, held: Sequence[Item] | None, new: list[Item] | None) -> list[Item] | None:
    """What is said once or repeated; a repetition says the same."""
    if held is not None and new is not None and list(held) != new:
        raise refusal("statement-contradicted", f"{name} that stay as they were", "others in a later chunk")
    return new if held is None else list(held)


def _disordered(expected: str, found: str) -> ReplyError:
    return refusal("stream-disordered", expected, found)
