"""Checks of structure that records share: types, dtypes, lengths. Each names the record and the field."""

import mmap
import re
from collections.abc import Iterable
from types import NoneType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError

_WORD = re.compile(r"[\w.+-]{0,40}")

MAX_SHOWN_BITS = 64
"""A larger integer is named, not shown: its digits fill pages, and Python refuses to write many of them."""

_Scalar = TypeVar("_Scalar", bool, int, float)


def freeze(record: object, name: str, dtype: np.dtype[Any] | type[np.generic]) -> None:
    """Keep the field as a read-only array; nothing is cast."""
    label = f"{type(record).__name__}.{name}"
    value = getattr(record, name)
    if not isinstance(value, np.ndarray):
        raise RecordError(
            f"{label}: expected a numpy array of {np.dtype(dtype)}, found {kind_of(value)}; "
            f"np.array(values, np.{np.dtype(dtype)}) makes one of numbers"
        )
    if value.dtype != dtype:
        raise RecordError(
            f"{label}: expected dtype {np.dtype(dtype)}, found {value.dtype}; "
            f"values.astype(np.{np.dtype(dtype)}) casts, where it loses nothing that you need"
        )
    if value.ndim != 1:
        raise RecordError(f"{label}: expected one dimension, found shape {list(value.shape)}")
    keep(record, name, value)


EXPERT_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.int32))
"""What engines count experts with: the smallest that holds them."""


def freeze_experts(record: object, name: str, num_rows: int) -> None:
    """Keep [num_rows, L, K] routed experts as a read-only array; nothing is cast."""
    label = f"{type(record).__name__}.{name}"
    value = getattr(record, name)
    if not isinstance(value, np.ndarray):
        raise RecordError(f"{label}: expected a numpy array, found {kind_of(value)}")
    if value.dtype not in EXPERT_DTYPES:
        kinds = ", ".join(map(str, EXPERT_DTYPES))
        raise RecordError(f"{label}: expected one of {kinds}, found {value.dtype}")
    if value.ndim != 3 or len(value) != num_rows or 0 in value.shape[1:]:
        raise RecordError(
            f"{label}: expected [{num_rows}, layers, experts a token], found shape {list(value.shape)}"
        )
    if value.dtype.kind == "i" and value.size and int(value.min()) < 0:
        raise RecordError(f"{label}: expected experts >= 0, found {int(value.min())}")
    keep(record, name, value)


_IMMUTABLE = (NoneType, bytes, mmap.mmap)
"""What may lie under an array that is kept uncopied: its own memory, or what nobody writes."""


def _is_writeable(value: NDArray[Any]) -> bool:
    """Whether somebody may write the array, or what it is a view of."""
    base: object = value
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return True
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return not isinstance(base, _IMMUTABLE)


def keep(record: object, name: str, value: NDArray[Any]) -> None:
    """Store the array read-only."""
    # What the caller can still write is copied: it was checked now, and must stay as it was.
    kept = value.copy() if _is_writeable(value) else value.view()
    kept.flags.writeable = False
    object.__setattr__(record, name, kept)


def check_length(record: object, name: str, expected: int) -> None:
    """Refuse a field of another length."""
    found = len(getattr(record, name))
    if found != expected:
        label = f"{type(record).__name__}.{name}"
        raise RecordError(f"{label}: expected {expected} entries, one a token, found {found}")


def check_ids(record: object, name: str) -> None:
    """Refuse negative ids."""
    ids = getattr(record, name)
    if len(ids) and int(ids.min()) < 0:
        at = int(np.argmax(ids < 0))
        label = f"{type(record).__name__}.{name}"
        raise RecordError(f"{label}: expected ids >= 0, found {int(ids[at])} at token {at}")


def scalar(label: str, value: object, kind: type[_Scalar]) -> _Scalar:
    """The value as Python's own bool, int or float, so that equal records are identical; numpy's are taken.

    Raises:
        RecordError: as `check_scalar`, or a float cannot hold it.
    """
    own: Any = value.item() if isinstance(value, np.generic) else value
    check_scalar(label, own, kind)
    try:
        return kind(own)
    except OverflowError:
        raise RecordError(f"{label}: expected a number that a float holds, found one beyond") from None


def keep_scalar(record: object, name: str, kind: type[bool | int | float], *, optional: bool = False) -> None:
    """Store the field as `scalar` gives it; `optional` allows None."""
    value = getattr(record, name)
    if value is not None or not optional:
        object.__setattr__(record, name, scalar(f"{type(record).__name__}.{name}", value, kind))


def keep_tuple(record: object, name: str) -> None:
    """Store the field as a tuple.

    Raises:
        RecordError: it is text, or nothing that has parts.
    """
    value = getattr(record, name)
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise RecordError(f"{type(record).__name__}.{name}: expected a sequence, found {kind_of(value)}")
    object.__setattr__(record, name, tuple(value))


def check_text(record: object, name: str, *, optional: bool = False) -> None:
    """Refuse what is not text that UTF-8 can hold; `optional` allows None and the empty text."""
    value = getattr(record, name)
    if value is None and optional:
        return
    label = f"{type(record).__name__}.{name}"
    if not isinstance(value, str) or not (value or optional):
        expected = "text or None" if optional else "text that is not empty"
        raise RecordError(f"{label}: expected {expected}, found {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{label}: expected text that UTF-8 can hold, found {error.reason}") from None


def check_scalar(label: str, value: object, kind: object) -> None:
    """Refuse a value that is not of this kind; an int is fine as a float, a bool never is a number."""
    allowed = {bool: (bool,), int: (int,), float: (int, float)}[kind]  # type: ignore[index]
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise RecordError(f"{label}: expected {getattr(kind, '__name__', kind)}, found {shown(value)}")


def check_choice(label: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a word that is not one of the choices."""
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        raise RecordError(f"{label}: expected one of {', '.join(known)}, found {shown(value)}")


def shown(value: object) -> str:
    """A number or a word as it is, and of anything else its kind: errors hold no text and no long lists."""
    if isinstance(value, str):
        return repr(value) if _WORD.fullmatch(value) else f"a text of {len(value)} characters"
    is_short = not isinstance(value, int) or value.bit_length() <= MAX_SHOWN_BITS
    return repr(value) if isinstance(value, (NoneType, int, float)) and is_short else kind_of(value)


def kind_of(value: object) -> str:
    """The name of its type, for errors."""
    return type(value).__name__
