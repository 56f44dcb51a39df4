"""`identical`: equality of records bit for bit, for which arrays and NaN leave `==` no use."""

import math
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def identical(a: object, b: object) -> bool:
    """Whether two records, or two values of their fields, are the same.

    Bit for bit, so 0.0 is not -0.0, but that every NaN equals every other.
    """
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and _same_bits(a, b)
    if type(a) is not type(b):
        return False
    if is_dataclass(a) and not isinstance(a, type):
        return all(identical(getattr(a, spec.name), getattr(b, spec.name)) for spec in fields(a))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        both_nan = math.isnan(a) and math.isnan(b)
        return both_nan or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return bool(a == b)


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if a.tobytes() == b.tobytes():
        return True
    if not np.issubdtype(a.dtype, np.floating):
        return False
    bits = np.dtype(f"u{a.dtype.itemsize}")
    same = np.ascontiguousarray(a).view(bits) == np.ascontiguousarray(b).view(bits)
    return bool((same | (np.isnan(a) & np.isnan(b))).all())
