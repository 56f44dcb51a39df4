"""What a trainer's dict holds, read as arrays of the right kind and shape. Nothing is cast that would change.

Knows no dialect: keys, shapes and kinds are those that the caller names.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.errors import RecordError
from rlbatch.records.structure import kind_of

Kind: TypeAlias = Literal["ids", "mask", "values"]
"""Integers; True and False, or 1 and 0; any numbers."""

_EXPECTED: Mapping[Kind, str] = {"ids": "integers", "mask": "bool or 0 and 1", "values": "numbers"}
_NUMPY_KINDS: Mapping[Kind, str] = {"ids": "iu", "mask": "biuf", "values": "iuf"}


def tensor(form: Mapping[str, Any], key: str, shape: tuple[int, ...], kind: Kind) -> NDArray[Any]:
    """A tensor of the form, on the host: a mask as bool, ids and values in a dtype that holds them.

    Raises:
        RecordError: it is none, of another shape, or of another kind; it is sparse, or without values.
    """
    value = form[key]
    if not isinstance(value, Tensor):
        raise RecordError(f"from_dict: expected {key} as a tensor, found {kind_of(value)}")
    if tuple(value.shape) != shape:
        raise RecordError(f"from_dict: expected {key} of shape {list(shape)}, found {list(value.shape)}")
    if value.is_meta or value.layout is not torch.strided:
        found = "one without values (meta)" if value.is_meta else str(value.layout).removeprefix("torch.")
        raise RecordError(f"from_dict: expected {key} as a dense tensor, found {found}")
    # numpy knows no bfloat16; float32 holds all that is narrower.
    narrow = value.is_floating_point() and value.itemsize < torch.float32.itemsize
    own = value.detach().to("cpu", torch.float32 if narrow else value.dtype)
    return _of_kind(own.numpy(), key, kind)


def numbers(form: Mapping[str, Any], key: str, length: int, kind: Kind) -> NDArray[Any]:
    """[length] a list of the form, as `tensor` gives it.

    Raises:
        RecordError: it is none, of another length, or of another kind.
    """
    expected = f"from_dict: expected {key} of {length} numbers"
    try:
        values = np.array(form[key])
    except (TypeError, ValueError, RuntimeError) as error:
        raise RecordError(f"{expected}, found what is none ({error})") from error
    if values.shape != (length,):
        raise RecordError(f"{expected}, found shape {list(values.shape)}")
    return _of_kind(values, key, kind)


def parts(form: Mapping[str, Any], key: str) -> Sequence[Any]:
    """A list of the form.

    Raises:
        RecordError: it is none.
    """
    value = form[key]
    if not isinstance(value, (list, tuple)):
        raise RecordError(f"from_dict: expected {key} as a list, found {kind_of(value)}")
    return value


def mapping(value: object, label: str) -> Mapping[str, Any]:
    """The same object.

    Raises:
        RecordError: it has no keys.
    """
    if not isinstance(value, Mapping):
        raise RecordError(f"from_dict: expected {label} as a dict, found {kind_of(value)}")
    return value


def width(form: Mapping[str, Any], key: str, num_rows: int) -> int:
    """W of a tensor [B, W] of the form.

    Raises:
        RecordError: it is none, or not of that many rows.
    """
    value = form[key]
    if not isinstance(value, Tensor) or value.ndim != 2 or len(value) != num_rows:
        found = list(value.shape) if isinstance(value, Tensor) else kind_of(value)
        raise RecordError(f"from_dict: expected {key} of shape [{num_rows}, any], found {found}")
    return int(value.shape[1])


def require_same(key: str, found: NDArray[Any], expected: NDArray[Any], source: str) -> None:
    """Refuse what the form says twice and differently.

    Raises:
        RecordError: `found`, under the key, is not `expected`, which `source` says.
    """
    differs = np.flatnonzero(np.ravel(found != expected))
    if len(differs):
        at = int(differs[0])
        raise RecordError(
            f"from_dict: expected {key} as {source} has it, {np.ravel(expected)[at]} at place {at}, "
            f"found {np.ravel(found)[at]} ({len(differs)} such)"
        )


def as_int32(key: str, values: NDArray[Any]) -> NDArray[np.int32]:
    """Integers from 0 on.

    Raises:
        RecordError: int32 does not hold one, or it is negative.
    """
    _refuse(key, values, (values < 0) | (values > np.iinfo(np.int32).max), "from 0 to 2**31 - 1")
    return values.astype(np.int32)


def as_float32(key: str, values: NDArray[Any]) -> NDArray[np.float32]:
    """Numbers, rounded to float32.

    Raises:
        RecordError: one is finite, and too large for it.
    """
    too_large = np.isfinite(values) & (np.abs(values) > np.finfo(np.float32).max)
    _refuse(key, values, too_large, "that float32 holds")
    return values.astype(np.float32)


def _refuse(key: str, values: NDArray[Any], wrong: NDArray[np.bool_], expected: str) -> None:
    if wrong.any():
        raise RecordError(f"from_dict: expected {key} {expected}, found {values[wrong][0]}")


def _of_kind(values: NDArray[Any], key: str, kind: Kind) -> NDArray[Any]:
    if values.dtype.kind not in _NUMPY_KINDS[kind]:
        raise RecordError(f"from_dict: expected {key} of {_EXPECTED[kind]}, found {values.dtype}")
    if kind != "mask":
        return values
    wrong = values[(values != 0) & (values != 1)]
    if len(wrong):
        raise RecordError(f"from_dict: expected {key} of {_EXPECTED[kind]}, found {wrong[0]}")
    ones: NDArray[np.bool_] = values == 1
    return ones
