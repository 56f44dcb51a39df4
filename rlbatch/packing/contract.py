"""What a plan may be made of: lengths, kinds and units that say one thing about each sample."""

from collections.abc import Hashable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError

Unit: TypeAlias = Sequence[int]
"""Indices of samples that stay together."""


def checked_lengths(lengths: Sequence[int]) -> NDArray[np.int64]:
    """[N] the lengths as integers.

    Raises:
        RecordError: what is no integer, or below 1.
    """
    values = np.asarray(lengths)
    if len(values) and (values.dtype.kind not in "iu" or values.ndim != 1):
        raise RecordError(f"lengths: expected integers, one a sample, found {values.dtype} {values.shape}")
    if len(values) and int(values.min()) < 1:
        at = int(values.argmin())
        raise RecordError(f"lengths: expected at least 1, found {values[at]} for sample {at}")
    return values.astype(np.int64)


def check_partition(num_samples: int, kinds: Sequence[Hashable] | None, units: Sequence[Unit] | None) -> None:
    """Refuse kinds that are not one a sample, and units that are not each sample once.

    Raises:
        RecordError: another number of kinds; an empty unit; an index of no sample; a sample in no unit or in
            two.
    """
    if kinds is not None and len(kinds) != num_samples:
        raise RecordError(f"kinds: expected one for each of {num_samples} samples, found {len(kinds)}")
    if units is None:
        return
    for at, unit in enumerate(units):
        if not len(unit):
            raise RecordError(f"units: expected samples in each, found none in unit {at}")
    flat = np.asarray([index for unit in units for index in unit])
    if len(flat) and flat.dtype.kind not in "iu":
        raise RecordError(f"units: expected integers, found {flat.dtype}")
    foreign = flat[(flat < 0) | (flat >= num_samples)]
    if len(foreign):
        raise RecordError(f"units: expected indices of {num_samples} samples, found {foreign[0]}")
    counts = np.bincount(flat.astype(np.int64), minlength=num_samples)
    wrong = np.flatnonzero(counts != 1)
    if len(wrong):
        at = int(wrong[0])
        raise RecordError(
            f"units: expected every sample in one unit, found sample {at} in {counts[at]} ({len(wrong)} such)"
        )
