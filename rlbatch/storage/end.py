"""Whether a store is whole: its shards against their numbering, and against what `shards.end` says.

A writer numbers its shards from 0, and says at the end how many shards and samples it wrote. Knows names and
counts; nothing of what is in the shards.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from rlbatch.errors import StorageError
from rlbatch.storage.files import END_NAME, SHARD_SUFFIX, refusal, unusable
from rlbatch.storage.format import load_json, shown

_NUMBERED = re.compile(r"([0-9]{6}|[1-9][0-9]{6,})" + re.escape(SHARD_SUFFIX))


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """What `shards.end` holds, as JSON."""

    num_shards: int
    num_samples: int
    """Of all shards."""


def read_end(directory: Path) -> End:
    """What the writer of a store said at its end.

    Raises:
        StorageError: file-unusable, the file cannot be read, or is not what a writer writes.
    """
    path = directory / END_NAME
    try:
        said = load_json(path.read_text())
        counts = [said[name] for name in ("num_shards", "num_samples")]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"found {counts}")
    except OSError as error:
        raise unusable(path, error) from error
    except (ValueError, TypeError, LookupError) as error:
        raise refusal(
            "file-unusable",
            path,
            expected="JSON with num_shards and num_samples, whole numbers of at least 0",
            found=shown(str(error)),
            likely="the file was edited, or was not written by open_writer",
            fix="copy it again from where the store was written",
        ) from error
    return End(num_shards=counts[0], num_samples=counts[1])


def shard_name(number: int) -> str:
    """The name of a writer's shard.

    Example:
        7 -> 000007.safetensors
    """
    return f"{number:06d}{SHARD_SUFFIX}"


def is_numbered(path: Path) -> bool:
    """The name is one that `shard_name` gives."""
    return _NUMBERED.fullmatch(path.name) is not None


def unbroken(shards: Sequence[Path]) -> list[Path]:
    """Those numbered 0, 1, ... up to the first that is not there.

    Example:
        000000, 000001, 000003 -> 000000, 000001
    """
    return [
        path for _, path in takewhile(lambda each: each[1].name == shard_name(each[0]), enumerate(shards))
    ]


def require_no_gap(directory: Path, shards: Sequence[Path]) -> None:
    """Refuse numbered shards of which one before the last is missing; shards of other names are not counted.

    Raises:
        StorageError: store-changed.
    """
    numbered = [path for path in shards if is_numbered(path)]
    there = len(unbroken(numbered))
    if there < len(numbered):
        expected = f"{shard_name(there)} before {numbered[there].name}: shards are numbered from 0"
        raise _not_whole(directory, expected, "none of that name")


def require_shards(directory: Path, shards: Sequence[Path], end: End) -> None:
    """Refuse shards that are not exactly those that the writer wrote.

    Raises:
        StorageError: store-changed.
    """
    there = len(unbroken(shards))
    if there == len(shards) == end.num_shards:
        return
    lacking = f"without {shard_name(there)}"
    found = f"{len(shards)}, {lacking if there < end.num_shards else f'with {shards[end.num_shards].name}'}"
    raise _not_whole(directory, f"{end.num_shards} shards, as {END_NAME} says", found)


def require_samples(directory: Path, num_samples: int, end: End) -> None:
    """Refuse shards that do not hold as many samples as the writer wrote.

    Raises:
        StorageError: store-changed.
    """
    if num_samples != end.num_samples:
        expected = f"{end.num_samples} samples, as {END_NAME} says"
        raise _not_whole(directory, expected, f"{num_samples} in {end.num_shards} shards")


def _not_whole(directory: Path, expected: str, found: str) -> StorageError:
    return refusal(
        "store-changed",
        directory,
        expected=expected,
        found=found,
        likely="shards were deleted, left out of a copy, or put there from another store",
        fix="copy the whole store again from where it was written; to use what is left, read its shards one "
        "by one and write their samples to a store of their own with open_writer",
    )
