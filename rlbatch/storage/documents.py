"""The documents of a recorded .json or .jsonl file: found, held against their size, decoded.

Numbers that are not finite are no JSON, yet Python writes them. Rollouts that have some are read all the
same, so that it is told of the very token; of any other document the place of the first is told. What the
documents mean is not known here.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rlbatch.catalogue import finding
from rlbatch.errors import StorageError, Where
from rlbatch.storage.recorded_exchange import EXCHANGE, Exchange
from rlbatch.storage.recorded_row import RecordedRow

MAX_DOCUMENT_BYTES = 1 << 30
"""A larger .json, or line of .jsonl, is refused: it would be decoded in memory, several times its size."""

_WRAP = "wrap the body with what it answers: {endpoint, request, status, response: the body}"
WANTED = f"a recorded rollout {{sampling, rows}} or {EXCHANGE}"


class Document(Exchange):
    """One as decoded: rollouts where it has rows, else an exchange."""

    rows: list[RecordedRow] | None = None
    sampling: dict[str, object] | None = None
    choices: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """Of a reply's body without its wrapper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a document is: its file, its name there, and its line where the file has lines."""

    path: Path
    name: str
    line: int | None
    share_before: float
    share_after: float

    @property
    def where(self) -> Where:
        """The file."""
        return Where(path=str(self.path))

    def entry(self, index: int, number: int) -> Where:
        """Entry `number` of the document, the file's `index`."""
        return Where(path=str(self.path), sample=index, trajectory=f"{self.name}#{number}")

    def share(self, done: float) -> float:
        """Of the file, where so much of the document is done."""
        return self.share_before + done * (self.share_after - self.share_before)


def documents(path: Path) -> Iterator[tuple[Place, Document]]:
    """Every document of the file, decoded, with its place."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if path.suffix != ".jsonl":
                _check_size(path, size)
                place = Place(path=path, name=path.stem, line=None, share_before=0.0, share_after=1.0)
                yield place, _decode(file.read(), place)
                return
            line, before = 0, 0.0
            while data := file.readline(MAX_DOCUMENT_BYTES + 1):
                line += 1
                _check_size(path, len(data))
                after = file.tell() / max(size, 1)
                if data.strip():
                    name = f"{path.stem}:{line}"
                    place = Place(path=path, name=name, line=line, share_before=before, share_after=after)
                    yield place, _decode(data, place)
                before = after
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise unusable(path, "a file that can be read", error.strerror or type(error).__name__) from None


def _check_size(path: Path, size: int) -> None:
    if size > MAX_DOCUMENT_BYTES:
        raise unusable(
            path,
            f"documents of at most {MAX_DOCUMENT_BYTES:,} bytes",
            f"{size:,} or more",
            fix="write the rollouts as .jsonl, a document a line",
        )


def _decode(data: bytes, place: Place) -> Document:
    try:
        document = msgspec.json.decode(data, type=Document)
    except msgspec.ValidationError as error:
        raise _of_other_types(error, place) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        rollouts = _not_finite(data, place)
        if rollouts is None:
            likely = "the file was cut off, or is not JSON" if data.strip() else "the file is empty"
            raise unusable(place.path, "JSON", _at_line(place, str(error)), likely=likely) from None
        return rollouts
    if document.rows is None and document.endpoint is None:
        fix = _WRAP if document.choices is not msgspec.UNSET else None
        raise unusable(place.path, WANTED, _at_line(place, "neither `rows` nor `endpoint`"), fix=fix)
    return document


def _not_finite(data: bytes, place: Place) -> Document | None:
    """Rollouts of which some numbers are NaN or infinite; None where that is not what is wrong with the data.

    Raises:
        StorageError: file-unusable, such a number stands where no check tells of it.
    """
    if b"NaN" not in data and b"Infinity" not in data:
        return None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if isinstance(content, dict) and "rows" in content:
        known = {name: content[name] for name in ("rows", "sampling") if name in content}
        try:
            return msgspec.convert(known, Document)
        except msgspec.ValidationError as error:
            raise _of_other_types(error, place) from None
    raise unusable(
        place.path,
        "JSON, whose numbers are all finite",
        _at_line(place, _first_not_finite(content)),
        likely="a value was not finite, and a writer such as Python's json spelled it NaN or Infinity",
    )


def _first_not_finite(content: object) -> str:
    """The first such number with its place, as far as the names on the way are those of a reply's fields.

    Example:
        {"response": {"choices": [{"logprobs": {"token_logprobs": [-0.5, NaN]}}]}} ->
        nan at response.choices[0].logprobs.token_logprobs[1]
    """
    left: list[tuple[object, str]] = [(content, "")]
    while left:
        value, place = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value} at {place.lstrip('.')}"
        if isinstance(value, dict):
            left += [(value[name], f"{place}.{_field(name)}") for name in reversed(value)]
        if isinstance(value, list):
            left += [(each, f"{place}[{at}]") for at, each in reversed([*enumerate(value)])]
    return "a number that is not finite"


_UNKNOWN_FIELD = "Object contains unknown field"
"""How msgspec's complaint of a field that a struct forbids begins."""

_SHOWN = (
    *("response", "request", "choices", "logprobs", "token_logprobs", "content", "logprob", "meta_info"),
    *("output_token_logprobs", "top_logprobs", "prompt_logprobs", "temperature", "top_p", "min_p"),
)


def _field(name: str) -> str:
    # Alternatives are named by the text of their token, which is not shown.
    return name if name in _SHOWN else "(...)"


def _of_other_types(error: msgspec.ValidationError, place: Place) -> StorageError:
    likely, fix = "a file of another kind, or a field of another type", None
    if str(error).startswith(_UNKNOWN_FIELD):
        # Only rows refuse fields.
        likely = "a row in another library's names, or one with notes of its writer"
        fix = f"name what a row has {', '.join(RecordedRow.__struct_fields__)}; leave anything else out"
    return unusable(place.path, WANTED, _at_line(place, str(error)), likely=likely, fix=fix)


def _at_line(place: Place, text: str) -> str:
    return text if place.line is None else f"line {place.line}: {text}"


def unusable(
    path: Path, expected: str, found: str, *, likely: str | None = None, fix: str | None = None
) -> StorageError:
    """The refusal of a file."""
    where = Where(path=str(path))
    return StorageError.of(
        finding("file-unusable", where=where, expected=expected, found=found, likely=likely, fix=fix)
    )
