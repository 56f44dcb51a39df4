"""The header of a shard: safetensors' format, with a schema and checksums in its metadata.

    8 bytes   n, the length of the header: unsigned, little-endian
    n bytes   JSON, padded with spaces:
              {"__metadata__": {text: text}, name: {"dtype": .., "shape": [..], "data_offsets": [..]}, ...}
    the rest  the arrays, back to back, little-endian; `data_offsets` count from the header's end

`__metadata__` holds `schema` and `version`, `crc32` (JSON: array name -> 8 hex digits), `header_crc32` (of
everything else in the header), and what the schema adds. Any safetensors library reads the arrays.

Knows one-dimensional arrays and their checksums; knows nothing of samples, and opens no other file.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import StorageError
from rlbatch.storage.files import refusal

MAX_HEADER_BYTES = 64 << 20
"""A header above this is refused, written or read: it is no shard's, and reading it would cost memory."""

# The header ends at a multiple of this and arrays come by falling itemsize, so each is aligned.
_ALIGNMENT = 8
_LENGTH_BYTES = 8
_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What kind of shard a reader can read."""

    name: str
    versions: tuple[str, ...]
    """Readable ones; the last one is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One array of a shard."""

    name: str
    dtype: np.dtype[Any]
    start: int
    """First byte, counted from the file's first."""
    stop: int
    """One past the last byte."""
    crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A header that has been checked: the entries cover the file from the header's end to its own."""

    metadata: Mapping[str, str]
    entries: tuple[Entry, ...]


def order(arrays: Sequence[tuple[str, NDArray[Any]]]) -> list[tuple[str, NDArray[Any]]]:
    """The arrays in the order of the file."""
    return sorted(arrays, key=lambda named: -named[1].dtype.itemsize)


def render_header(
    path: Path, arrays: Sequence[tuple[str, NDArray[Any]]], *, schema: Schema, documents: Mapping[str, str]
) -> bytes:
    """The bytes in front of the arrays.

    Args:
        path: the file to be, for the error.
        arrays: [n] each, in the order of the file.
        schema: its last version is the one written.
        documents: what the schema adds to the metadata.

    Raises:
        StorageError: write-failed, the header would be over `MAX_HEADER_BYTES`.
    """
    checksums = {name: f"{zlib.crc32(values.data):08x}" for name, values in arrays}
    metadata = {
        "schema": schema.name,
        "version": schema.versions[-1],
        "crc32": json.dumps(checksums),
        **documents,
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, values in arrays:
        header[name] = {
            "dtype": _DTYPE_NAMES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [at, at + values.nbytes],
        }
        at += values.nbytes
    metadata["header_crc32"] = _seal(header)
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise refusal(
            "write-failed",
            path,
            expected=f"a header of at most {MAX_HEADER_BYTES} bytes",
            found=f"{len(text)} bytes",
            likely="almost every sample has a provenance of its own",
            fix="state the provenance once for all samples that share it, or write fewer samples a shard",
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(path: Path, file: BinaryIO, *, schema: Schema) -> Header:
    """Read and check a shard's header.

    Raises:
        StorageError: file-unusable (no safetensors file), schema-unknown (not a shard of a readable version),
            shard-truncated (size and header disagree), shard-altered (the header is not as it was written).
    """
    size = os.fstat(file.fileno()).st_size
    text = _read_text(path, file, size)
    fields = _parse(path, text)
    metadata = fields.pop("__metadata__", None)
    _check_schema(path, metadata, schema)
    _check_seal(path, metadata, fields)
    entries = _entries(path, metadata, fields, body=_LENGTH_BYTES + len(text))
    _check_cover(path, entries, body=_LENGTH_BYTES + len(text), size=size)
    return Header(metadata=metadata, entries=entries)


def load_json(text: str) -> Any:  # noqa: ANN401
    """Decode JSON from a file that nobody vouches for.

    Raises:
        ValueError: not JSON, nested too deep, or an object that names a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deep") from None


def shown(value: object) -> str:
    """A value from a file, short enough for an error's text."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _read_text(path: Path, file: BinaryIO, size: int) -> bytes:
    start = file.read(_LENGTH_BYTES + 1)
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if len(start) <= _LENGTH_BYTES or start[-1:] != b"{" or not 0 < length <= MAX_HEADER_BYTES:
        raise refusal(
            "file-unusable",
            path,
            expected=f"a safetensors file: a header's length up to {MAX_HEADER_BYTES}, then JSON",
            found=f"{size} bytes that do not start so" if start else "an empty file",
        )
    if _LENGTH_BYTES + length > size:
        raise refusal(
            "shard-truncated",
            path,
            expected=f"at least {_LENGTH_BYTES + length} bytes, as the header's length says",
            found=f"{size} bytes",
        )
    return start[_LENGTH_BYTES:] + file.read(length - 1)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        # The first byte is an opening brace, so whatever is decoded is an object.
        return dict(load_json(text.decode("utf-8")))
    except ValueError as error:
        raise refusal(
            "file-unusable",
            path,
            expected="a safetensors file, whose header is JSON",
            found=f"a header that is not JSON: {shown(str(error))}",
            likely="the file is no safetensors file, or its header was altered",
        ) from error


def _check_schema(path: Path, metadata: object, schema: Schema) -> None:
    if isinstance(metadata, dict) and "schema" in metadata:
        name, version = metadata["schema"], metadata.get("version")
        if name == schema.name and version in schema.versions:
            return
        found = f"schema {shown(name)}, version {shown(version)}"
    else:
        found = "a safetensors file whose metadata names no schema"
    raise refusal(
        "schema-unknown",
        path,
        expected=f"schema {schema.name!r}, version {' or '.join(map(repr, schema.versions))}",
        found=found,
    )


def _check_seal(path: Path, metadata: dict[str, Any], fields: dict[str, Any]) -> None:
    stored = metadata.get("header_crc32")
    rest = {key: value for key, value in metadata.items() if key != "header_crc32"}
    computed = _seal({"__metadata__": rest, **fields})
    if stored != computed or not all(isinstance(value, str) for value in rest.values()):
        raise _altered(path, f"header_crc32 {shown(stored)}", f"a header whose crc32 is {computed!r}")


def _seal(header: Mapping[str, Any]) -> str:
    # Of the decoded header in one spelling, so that only what is said counts, not spaces or order.
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode('ascii')):08x}"


def _entries(
    path: Path, metadata: Mapping[str, str], fields: Mapping[str, Any], *, body: int
) -> tuple[Entry, ...]:
    # The seal holds, so what is wrong here was written wrong; it is refused all the same, before it is used.
    entries = []
    try:
        checksums = load_json(metadata["crc32"])
        for name, spec in fields.items():
            dtype = _DTYPES[spec["dtype"]]
            (length,), (start, stop) = spec["shape"], spec["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (length, start, stop)):
                raise ValueError("not a count")
            if stop - start != length * dtype.itemsize:
                raise ValueError("shape and data_offsets disagree")
            crc32 = int(checksums[name], 16)
            entries.append(Entry(name=name, dtype=dtype, start=body + start, stop=body + stop, crc32=crc32))
    except (ValueError, TypeError, LookupError) as error:
        raise _altered(
            path, "arrays of one dimension, with dtype, shape, data_offsets and crc32", shown(error)
        ) from error
    return tuple(sorted(entries, key=lambda entry: (entry.start, entry.stop)))


def _check_cover(path: Path, entries: Sequence[Entry], *, body: int, size: int) -> None:
    at = body
    for entry in entries:
        if entry.start != at:
            raise _altered(path, f"array {entry.name!r} from byte {at}, without gap", f"byte {entry.start}")
        at = entry.stop
    if at != size:
        raise refusal(
            "shard-truncated", path, expected=f"{at} bytes, as the header says", found=f"{size} bytes"
        )


def _altered(path: Path, expected: str, found: str) -> StorageError:
    return refusal("shard-altered", path, expected=expected, found=found)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is named twice")
    return fields
