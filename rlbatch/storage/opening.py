"""`open_reader`: which shards a path stands for, and whether they are all there.

A directory is read in the order of the names, and not its sub-directories. Temporary files of killed writers
are ignored and listed.
"""

from pathlib import Path

from rlbatch.errors import StorageError
from rlbatch.storage.end import read_end, require_no_gap, require_samples, require_shards
from rlbatch.storage.files import END_NAME, Listing, list_directory, refusal, unusable
from rlbatch.storage.reader import ShardReader


def open_reader(path: str | Path) -> ShardReader:
    """Open a shard, or a directory of shards.

    Reads headers and per-sample columns only; the tokens stay on the disk until they are asked for. A shard
    must not be changed while it is open: it is mapped, not read.

    Args:
        path: a shard, or a directory whose *.safetensors files are all shards. Where the directory has a
            `shards.end`, they are those that it says; without one, numbered shards have no gap.

    Raises:
        StorageError: file-unusable (missing, no shard in it, not a safetensors file), schema-unknown (another
            program's safetensors file, or a version that this release does not read), store-changed (shards
            are missing, or there are others), shard-truncated, shard-altered.

    Example:
        open_reader("rollouts")[0].token_ids
    """
    path = Path(path)
    try:
        is_directory = path.is_dir()
    except OSError as error:
        raise unusable(path, error) from error
    if not is_directory:
        return ShardReader([path])
    return _open_directory(path)


def _open_directory(path: Path) -> ShardReader:
    listing = list_directory(path)
    end = read_end(path) if listing.ended else None
    if end is not None:
        # A listing taken while names were added can lack some; nothing is added behind the end.
        listing = list_directory(path)
        require_shards(path, listing.shards, end)
    require_no_gap(path, listing.shards)
    if not listing.shards:
        raise _no_shards(path, listing)
    reader = ShardReader(listing.shards, leftovers=listing.leftovers)
    if end is not None:
        require_samples(path, len(reader), end)
    return reader


def _no_shards(path: Path, listing: Listing) -> StorageError:
    found = f"{listing.num_names} entries, none of that name" if listing.num_names else "an empty directory"
    if listing.leftovers:
        found += f"; {len(listing.leftovers)} are temporary, of a writer that was killed or is at work"
    if listing.ended:
        found += f"; {END_NAME} says that none were written"
    expected = "a directory with at least one *.safetensors file"
    return refusal("file-unusable", path, expected=expected, found=found)
