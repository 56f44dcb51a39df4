"""Lengths -> bins: which samples share a batch, under a hard budget of tokens. Integers only.

Order is kept: a bin is closed when the next sample does not fit. Knows nothing of what a sample is.
"""

from collections.abc import Hashable, Sequence
from typing import Literal

from rlbatch.errors import RecordError
from rlbatch.records.structure import check_choice


def too_long(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Indices of the samples that no bin can hold."""
    return [index for index, length in enumerate(lengths) if length > max_tokens]


def plan_batches(
    lengths: Sequence[int],
    *,
    layout: Literal["padded", "packed"],
    max_tokens: int,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Bins of sample indices, in order, none above `max_tokens`.

    Args:
        lengths: tokens of each sample, >= 1.
        layout: packed bins cost the sum of their lengths; padded ones rows times the longest.
        max_tokens: the budget of one bin, padding included.
        kinds: one a sample; samples of different kinds never share a bin.

    Raises:
        RecordError: a sample is longer than the budget, or the budget is not positive.

    Example:
        lengths [3, 4, 2], max_tokens 8: packed [[0, 1], [2]], padded [[0, 1], [2]]
    """
    check_choice("layout", layout, ("padded", "packed"))
    if max_tokens < 1:
        raise RecordError(f"max_tokens: expected at least 1, found {max_tokens}")
    excess = too_long(lengths, max_tokens)
    if excess:
        raise RecordError(
            f"max_tokens: expected room for every sample, found {max_tokens} and sample {excess[0]} of "
            f"{lengths[excess[0]]} tokens ({len(excess)} such samples)"
        )
    bins: list[list[int]] = []
    longest = total = 0
    for index, length in enumerate(lengths):
        cost = (
            total + length
            if layout == "packed"
            else max(longest, length) * (len(bins[-1]) + 1 if bins else 1)
        )
        same_kind = kinds is None or not bins or kinds[bins[-1][0]] == kinds[index]
        if bins and same_kind and cost <= max_tokens:
            bins[-1].append(index)
            longest, total = max(longest, length), total + length
        else:
            bins.append([index])
            longest = total = length
    return bins
