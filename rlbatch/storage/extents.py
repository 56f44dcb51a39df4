"""Which arrays a shard must have, and how long each: checked before a sample is made of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from rlbatch.storage.columns import ARRAYS, EXPERT_COLUMNS, EXPERTS, PER_BOUNDARY, PER_SAMPLE, STOP_REASONS
from rlbatch.storage.files import refusal
from rlbatch.storage.format import Entry, shown
from rlbatch.storage.media import MEDIA, MEDIA_KINDS

_TOGETHER = (
    frozenset({EXPERTS, f"{EXPERTS}.offsets", *EXPERT_COLUMNS}),
    frozenset({STOP_REASONS, f"{STOP_REASONS}.offsets"}),
    frozenset({MEDIA, f"{MEDIA}.offsets", MEDIA_KINDS, f"{MEDIA_KINDS}.offsets"}),
)
"""Arrays that come all or not at all."""


def check_names(path: Path, entries: Mapping[str, Entry]) -> None:
    """Every array that a shard needs is there, of its dtype, and no other.

    Raises:
        StorageError: schema-unknown or shard-altered.
    """
    unknown = sorted(entries.keys() - ARRAYS.keys())
    if unknown:
        raise refusal(
            "schema-unknown", path, expected="arrays that this release knows", found=shown(", ".join(unknown))
        )
    for name, spec in ARRAYS.items():
        # An optional field and its `.present` come together, and so do the parts of experts and of media.
        needed = not spec.optional or name.removesuffix(".present") in entries or f"{name}.present" in entries
        needed |= any(name in parts and not parts.isdisjoint(entries) for parts in _TOGETHER)
        if needed and name not in entries:
            raise refusal("shard-altered", path, expected=f"an array {name!r}", found="none")
        if name in entries and entries[name].dtype != spec.dtype:
            raise refusal(
                "shard-altered", path, expected=f"{name!r} of {spec.dtype}", found=str(entries[name].dtype)
            )


def check_extents(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Every array is as long as the boundaries say, and the boundaries rise from 0.

    Raises:
        StorageError: shard-altered.
    """
    num_samples = len(arrays["offsets"]) - 1
    if num_samples < 1:
        raise refusal("shard-altered", path, expected="at least one sample", found="no offsets of one")
    for name, values in arrays.items():
        extent = ARRAYS[name].extent
        expected = {PER_SAMPLE: num_samples, PER_BOUNDARY: num_samples + 1}.get(extent)
        if expected is None:
            expected = int(arrays[extent][-1]) if len(arrays[extent]) else 0
        if len(values) != expected:
            raise refusal(
                "shard-altered", path, expected=f"{expected} entries in {name!r}", found=str(len(values))
            )
        if extent == PER_BOUNDARY and (values[0] != 0 or (values[1:] < values[:-1]).any()):
            raise refusal(
                "shard-altered",
                path,
                expected=f"{name!r} that rise from 0",
                found=f"{int(values[0])} first, and {int((values[1:] < values[:-1]).sum())} that fall",
            )
