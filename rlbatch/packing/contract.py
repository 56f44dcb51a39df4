"""What a plan may be made of: lengths, costs, kinds and units that say one thing about each sample."""

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError
from rlbatch.records.structure import kind_of

Unit: TypeAlias = Sequence[int]
"""Indices of samples that stay together."""


def checked_lengths(lengths: Sequence[int]) -> NDArray[np.int64]:
    """[N] the lengths as integers.

    Raises:
        RecordError: what is no integer, or below 1.
    """
    values = _numbers("lengths", lengths, "iu", "integers")
    if len(values) and int(values.min()) < 1:
        at = int(values.argmin())
        raise RecordError(f"lengths: expected at least 1, found {values[at]} for sample {at}")
    return values.astype(np.int64)


def checked_costs(costs: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """[N] the costs.

    Raises:
        RecordError: what is no number, negative or not finite.
    """
    values = _numbers("costs", costs, "iuf", "numbers").astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        at = int(wrong[0])
        raise RecordError(f"costs: expected finite numbers >= 0, found {values[at]} for item {at}")
    return values


def check_partition(num_samples: int, kinds: Sequence[Hashable] | None, units: Sequence[Unit] | None) -> None:
    """Refuse kinds that are not one a sample, and units that are not each sample once.

    Raises:
        RecordError: another number of kinds, or kinds without a hash; an empty unit; an index of no sample; a
            sample in no unit or in two.
    """
    if kinds is not None:
        _check_kinds(num_samples, kinds)
    if units is None:
        return
    _check_sequence("units", units)
    try:
        empty = next((at for at, unit in enumerate(units) if not len(unit)), None)
        indices = [index for unit in units for index in unit]
    except TypeError as error:
        raise RecordError(f"units: expected sequences of indices, found what is none ({error})") from None
    if empty is not None:
        raise RecordError(f"units: expected samples in each, found none in unit {empty}")
    flat = _numbers("units", indices, "iu", "integers")
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


def _numbers(name: str, values: object, kinds: str, expected: str) -> NDArray[Any]:
    """[N] the values as an array of one of numpy's kinds; of any kind where there are none."""
    _check_sequence(name, values)
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise RecordError(f"{name}: expected {expected}, found what is none ({error})") from None
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        raise RecordError(f"{name}: expected {expected}, found {array.dtype} {list(array.shape)}")
    return array


def _check_kinds(num_samples: int, kinds: Sequence[Hashable]) -> None:
    _check_sequence("kinds", kinds)
    if len(kinds) != num_samples:
        raise RecordError(f"kinds: expected one for each of {num_samples} samples, found {len(kinds)}")
    try:
        set(kinds)
    except TypeError as error:
        raise RecordError(f"kinds: expected what has a hash, found what has none ({error})") from None


def _check_sequence(name: str, values: object) -> None:
    if not isinstance(values, (Sequence, np.ndarray)) or isinstance(values, str):
        raise RecordError(f"{name}: expected a sequence, found {kind_of(values)}")
