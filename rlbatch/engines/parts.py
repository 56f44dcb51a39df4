"""Parts of a reply that several engines have in one form. Judges nothing."""

from collections.abc import Sequence

import msgspec

from rlbatch.records import VersionSpan


class Message(msgspec.Struct, gc=False):
    """What chat's parsers made of the decoded text; whole, or what a chunk adds."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[object] | None = None

    @property
    def parsed(self) -> bool:
        """A parser took something out of the text."""
        return bool(self.tool_calls) or self.reasoning is not None or self.reasoning_content is not None


class Span(msgspec.Struct, gc=False):
    """Half-open span of sampled tokens drawn by one version of the weights."""

    version: str | int
    start: int
    end: int


def text_of(text: str | None, message: Message | None) -> str | None:
    """The whole decoded text; None where a parser took tool calls or reasoning out of it."""
    if message is None:
        return text
    return None if message.parsed else message.content


def version_spans(spans: Sequence[Span] | None) -> tuple[VersionSpan, ...]:
    """The versions of the weights, as the engine labels them; empty where it says nothing."""
    return tuple(
        VersionSpan(label=str(span.version), start=span.start, stop=span.end) for span in spans or ()
    )
