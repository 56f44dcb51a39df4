"""Server-sent events out of a byte stream that arrives in pieces of any size.

Splits, and nothing else: a piece may end within a character, a line or an event. Comments and the fields `id`
and `retry` are dropped, as the format says, and so is a byte order mark at the start. A body that is JSON, as
a server answers a request that it refuses, is named for what it is. Knows nothing of what the events hold.
"""

from itertools import repeat
from typing import TypeAlias

from rlbatch.engines.body import MAX_REPLY_BYTES, no_reply
from rlbatch.engines.refusals import refusal
from rlbatch.errors import RecordError, ReplyError

_END = b"\n\n"
_DATA = b"data: "
_NEXT_DATA = _END + _DATA
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_JSON_STARTS = (b"{", b"[")
"""No line of a stream begins with these."""


Event: TypeAlias = tuple[str, bytes]
"""Name and data of one event; the name is empty where it has none, which is the rule."""


class EventSplitter:
    """Takes pieces, gives whole events in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._size = 0
        self._ends_in_return = False
        self._started = False

    def feed(self, piece: bytes | str) -> list[Event]:
        """The events that this piece completes.

        Raises:
            ReplyError: reply-malformed: a body of JSON, text that is not UTF-8, or more than
                `MAX_REPLY_BYTES`; reply-error-body.
            RecordError: the piece is neither bytes nor text.
        """
        raw = _raw(piece)
        self._size += len(raw)
        if self._size > MAX_REPLY_BYTES:
            raise _malformed(f"a stream of at most {MAX_REPLY_BYTES:,} bytes", "a longer one")
        raw = self._one_kind_of_line_end(raw)
        # An end that began in the last piece may be completed by this one.
        start = max(0, len(self._buffer) - len(_END) + 1)
        self._buffer += raw
        end = self._buffer.rfind(_END, start)
        if end < 0:
            return []
        blocks = bytes(self._buffer[:end])
        del self._buffer[: end + len(_END)]
        if not self._started:
            self._started = True
            blocks = blocks.removeprefix(_BYTE_ORDER_MARK)
        return _events(blocks)

    def rest(self) -> bytes | None:
        """The data of the last event, where only its line ends are missing; None where nothing is left.

        Of part of an event it is part of the data, or empty.

        Raises:
            ReplyError: reply-malformed or reply-error-body, a body of JSON.
        """
        left = bytes(self._buffer).strip(b"\n")
        if not self._started:
            left = left.removeprefix(_BYTE_ORDER_MARK)
        if left.lstrip().startswith(_JSON_STARTS):
            raise _json_body(left)
        name, _, data = left.partition(b":")
        return (data.removeprefix(b" ") if name == b"data" else b"") if left else None

    def _one_kind_of_line_end(self, raw: bytes) -> bytes:
        if self._ends_in_return and raw.startswith(b"\n"):
            # The other half of a line end that was cut in two.
            raw = raw[1:]
            self._ends_in_return = False
        if raw:
            self._ends_in_return = raw.endswith(b"\r")
        # JSON has neither sign unescaped, so whole events are not touched.
        return raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in raw else raw


def _events(blocks: bytes) -> list[Event]:
    if blocks.startswith(_DATA):
        data = blocks[len(_DATA) :].split(_NEXT_DATA)
        if blocks.count(b"\n") == 2 * (len(data) - 1):
            # No line ends but those between them: each event is one line of data, as almost all are.
            return list(zip(repeat(""), data, strict=False))
    return [event for block in blocks.split(_END) if (event := _event(block)) is not None]


def _event(block: bytes) -> Event | None:
    name, data = b"", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
        elif block.lstrip().startswith(_JSON_STARTS):
            raise _json_body(block)
        elif field not in (b"", b"id", b"retry"):
            raise _malformed("lines that begin with data, event, id, retry or a colon", "another line")
    return (name.decode("utf-8", "replace"), b"\n".join(data)) if data or name else None


def _raw(piece: object) -> bytes:
    if isinstance(piece, (bytes, bytearray, memoryview)):
        return bytes(piece)
    if not isinstance(piece, str):
        raise RecordError(f"piece: expected bytes or text of the stream, found {type(piece).__name__}")
    try:
        return piece.encode()
    except UnicodeEncodeError:
        raise _malformed("text that UTF-8 can hold", "text with lone surrogates") from None


def _json_body(raw: bytes) -> ReplyError:
    complaint = "a body of JSON: a reply that came whole is for parse_response"
    return no_reply(raw, complaint=complaint, streamed=True)


def _malformed(expected: str, found: str) -> ReplyError:
    return refusal("reply-malformed", expected, found)
