"""SGLang's /generate, streamed: chunks put together into the reply that would have come whole.

A chunk repeats all tokens so far, or has the new ones only (--incremental-streaming-output); its running
count says which, for each list by itself, and a stream that changes its way is refused. Chunks that repeat
tokens must repeat the same ones. What the whole reply says is judged in `rlbatch.engines.sglang`.
"""

from collections.abc import Mapping
from typing import Generic, Literal, TypeVar

import msgspec

from rlbatch.engines.output import EngineOutput
from rlbatch.engines.parts import Span
from rlbatch.engines.refusals import refusal
from rlbatch.engines.sglang import outputs_of
from rlbatch.engines.sglang_reply import Meta, Reply, Row, decode_replies
from rlbatch.errors import ReplyError
from rlbatch.records import Provenance

Item = TypeVar("Item")

Way = Literal["all so far", "the new ones"]


class SglangStream:
    """The chunks of one reply, by completion."""

    def __init__(self, request: Mapping[str, object] | None, provenance: Provenance) -> None:
        self._request = request
        self._provenance = provenance
        self._parts: dict[int, _Part] = {}

    def feed(self, chunk: bytes) -> None:
        """Take the data of one event.

        Raises:
            ReplyError: reply-malformed, reply-error-body, stream-disordered or statement-contradicted.
        """
        if chunk.lstrip().startswith(b"["):
            raise refusal("reply-malformed", "one completion in a chunk", "a list")
        (reply,) = decode_replies(chunk)
        index = 0 if reply.index is None else reply.index
        self._parts.setdefault(index, _Part(f"choice {index}")).add(reply)

    def finish(self) -> list[EngineOutput]:
        """The completions, ordered by index.

        Raises:
            ReplyError: stream-truncated, and all that `rlbatch.engines.sglang.read_reply` raises.
        """
        if not self._parts:
            raise refusal("stream-truncated", "at least one chunk", "none")
        ordered = sorted(self._parts)
        if ordered != list(range(len(ordered))):
            found = f"{len(ordered)} indices, the last {ordered[-1]}"
            raise refusal("stream-disordered", f"completions 0 to {len(ordered) - 1}, each", found)
        return outputs_of([self._parts[index].whole() for index in ordered], self._request, self._provenance)


class _Growing(Generic[Item]):
    """One list of a completion while chunks bring it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.items: list[Item] | None = None
        self.way: Way | None = None

    def take(self, new: list[Item] | None, count: int, *, first: bool) -> None:
        """Add what a chunk brings; `count` is how long the list is then, as the chunk says."""
        if new is None and self.items is None:
            return
        if new is None or (self.items is None and not first):
            raise _disordered("a list in every chunk or in none", f"{self._name} in some chunks only")
        held = self.items or []
        if not held:
            if len(new) != count:
                raise self._other_count(0, len(new), count)
            self.items = list(new)
            return
        way: Way = "all so far" if len(new) == count else "the new ones"
        if way == "the new ones" and len(held) + len(new) != count:
            raise self._other_count(len(held), len(new), count)
        if self.way not in (None, way):
            raise _disordered(f"chunks that go on having {self.way}", f"{self._name} has {way}")
        self.way = way
        if way == "the new ones":
            held.extend(new)
        elif new[: len(held)] == held:
            held.extend(new[len(held) :])
        else:
            raise _disordered(
                "earlier tokens as they were", f"other entries of {self._name} in a later chunk"
            )

    def _other_count(self, held: int, new: int, count: int) -> ReplyError:
        found = f"{self._name}: {held} held, {new} in the chunk, the count is {count}"
        return _disordered("chunks whose running count fits their lists", found)


class _Part:
    """One completion while it grows."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._ids: _Growing[int] = _Growing("output_ids")
        self._rows: _Growing[Row] = _Growing("output_token_logprobs")
        self._tops: _Growing[list[Row] | None] = _Growing("output_top_logprobs")
        self._texts: list[str] = []
        self._spans: list[Span] = []
        self._num_tokens = 0
        self._last: Reply | None = None
        self._prompt_ids: list[int] | None = None
        self._input_rows: list[Row] | None = None
        self._routing: object = None

    def add(self, reply: Reply) -> None:
        """Take one chunk."""
        meta = reply.meta_info
        num_tokens, num_rows = self._counts(meta)
        self._check_order(meta, num_tokens)
        first = self._last is None
        self._ids.take(reply.output_ids, num_tokens, first=first)
        self._rows.take(meta.output_token_logprobs, num_rows, first=first)
        self._tops.take(meta.output_top_logprobs, num_rows, first=first)
        self._prompt_ids = _same("prompt_token_ids", self._prompt_ids, reply.prompt_token_ids)
        self._input_rows = _same("input_token_logprobs", self._input_rows, meta.input_token_logprobs)
        if reply.text is not None:
            self._texts.append(reply.text)
        if meta.weight_version is not None:
            self._note_version(meta.weight_version, num_tokens)
        if meta.routed_experts is not None:
            self._routing = meta.routed_experts
        self._num_tokens = num_tokens
        self._last = reply

    def whole(self) -> Reply:
        """The reply as it would have come whole."""
        last = self._last
        if last is None or last.meta_info.finish_reason is None:
            raise refusal("stream-truncated", "a finish_reason", f"{self._label} ends without one")
        way = self._ids.way or self._rows.way
        # What the last chunk says of the whole is kept as it is; only lists have to be put together.
        meta = msgspec.structs.replace(
            last.meta_info,
            output_token_logprobs=self._rows.items,
            output_top_logprobs=self._tops.items,
            input_token_logprobs=self._input_rows,
            weight_versions=self._versions(last.meta_info.weight_versions),
            routed_experts=self._routing,
        )
        return Reply(
            output_ids=self._ids.items,
            prompt_token_ids=self._prompt_ids,
            text="".join(self._texts) if way == "the new ones" else self._texts[-1] if self._texts else None,
            meta_info=meta,
        )

    def _versions(self, said: list[Span] | None) -> list[Span] | None:
        """The reply's own spans, which hold every version that a chunk names; else those of the chunks."""
        if said is None:
            return self._spans or None
        labels = {str(span.version) for span in said}
        others = [span for span in self._spans if str(span.version) not in labels]
        if others:
            found = (
                f"{self._label}: none of {len(said)} spans has the label of token {others[0].start}'s chunk"
            )
            raise refusal(
                "statement-contradicted", "weight_version of each chunk among the spans' labels", found
            )
        return said

    def _counts(self, meta: Meta) -> tuple[int, int]:
        """Tokens and logprobs so far, as the chunk says; each count serves for both where it is alone."""
        said = [n for n in (meta.completion_tokens, meta.output_token_logprobs_length) if n is not None]
        if not said:
            found = f"{self._label}: neither completion_tokens nor output_token_logprobs_length"
            raise refusal("reply-malformed", "a running count in every chunk", found)
        return said[0], said[-1]

    def _check_order(self, meta: Meta, num_tokens: int) -> None:
        if self._last is None:
            return
        before = self._last.meta_info
        if before.finish_reason is not None:
            raise _disordered("nothing after the end", f"{self._label}: a chunk after its finish_reason")
        if (before.id, before.prompt_tokens) != (meta.id, meta.prompt_tokens):
            raise _disordered("chunks of one request", f"{self._label}: another id or prompt_tokens")
        if num_tokens < self._num_tokens or (num_tokens == self._num_tokens and meta.finish_reason is None):
            found = f"{self._label}: {num_tokens} tokens after {self._num_tokens}"
            raise _disordered("a count that grows with every chunk", found)

    def _note_version(self, version: str | int, num_tokens: int) -> None:
        """The tokens that a chunk brought were drawn by the version that it names."""
        if self._spans and self._spans[-1].version == version:
            self._spans[-1].end = num_tokens
        else:
            self._spans.append(Span(version=version, start=self._num_tokens, end=num_tokens))


def _same(name: str, held: list[Item] | None, new: list[Item] | None) -> list[Item] | None:
    """What is said once or repeated; a repetition says the same."""
    if held is not None and new is not None and held != new:
        raise refusal("statement-contradicted", f"{name} that stay as they were", "others in a later chunk")
    return held if new is None else new


def _disordered(expected: str, found: str) -> ReplyError:
    return refusal("stream-disordered", expected, found)
