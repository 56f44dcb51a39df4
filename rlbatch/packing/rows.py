"""How long a row becomes once it is padded: the one rule, for those who plan and those who lay out."""

import math
from collections.abc import Iterable
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

_Count = TypeVar("_Count", int, NDArray[np.int64])


def rounded(count: _Count, multiple: int) -> _Count:
    """The next multiple at or above the count."""
    return -(-count // multiple) * multiple


def row_unit(sequence_multiple: int, row_multiple: int) -> int:
    """What every row is a multiple of: the padding behind a row is cut into sequences' parts too."""
    return math.lcm(sequence_multiple, row_multiple)


def row_tokens(
    lengths: Iterable[int],
    layout: Literal["padded", "packed"],
    *,
    sequence_multiple: int,
    row_multiple: int,
) -> int:
    """Tokens of a row of a batch of these lengths, padding included.

    Example:
        lengths [3, 6], sequence_multiple 4, row_multiple 6: packed 4 + 8 -> 12; padded 8 -> 12
    """
    sizes = [rounded(length, sequence_multiple) for length in lengths]
    width = sum(sizes) if layout == "packed" else max(sizes, default=0)
    return rounded(width, row_unit(sequence_multiple, row_multiple))
