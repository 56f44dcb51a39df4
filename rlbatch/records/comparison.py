"""`identical`: equality of records bit for bit, for which arrays and NaN leave `==` no use."""

from dataclasses import fields, is_dataclass

import numpy as np


def identical(a: object, b: object) -> bool:
    """Whether two records, or two values of their fields, are the same, bit for bit; NaN equals NaN."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if is_dataclass(a) and not isinstance(a, type):
        return all(identical(getattr(a, spec.name), getattr(b, spec.name)) for spec in fields(a))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)
