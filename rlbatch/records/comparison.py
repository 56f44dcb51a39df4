"""`identical`: equality of records bit for bit, for which arrays and NaN leave `==` no use."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError


def identical(a: object, b: object) -> bool:
    """Whether two records, values of their fields, or sequences and mappings of them are the same.

    Bit for bit, so 0.0 is not -0.0, but that every NaN equals every other.

    Raises:
        RecordError: values that `==` does not compare, such as tensors.
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and _same_bits(a, b)
    if type(a) is not type(b):
        return False
    if is_dataclass(a) and not isinstance(a, type):
        return all(identical(getattr(a, spec.name), getattr(b, spec.name)) for spec in fields(a))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, (str, bytes)):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or (a == b and math.copysign(1, a) == math.copysign(1, b))
    same = a == b
    if not isinstance(same, (bool, np.bool_)):
        raise RecordError(f"identical: expected records, arrays and plain values, found {type(a).__name__}")
    return bool(same)


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if a.tobytes() == b.tobytes():
        return True
    if not np.issubdtype(a.dtype, np.floating):
        return False
    bits = np.dtype(f"u{a.dtype.itemsize}")
    same = np.ascontiguousarray(a).view(bits) == np.ascontiguousarray(b).view(bits)
    return bool((same | (np.isnan(a) & np.isnan(b))).all())
