"""Whole files only: atomic writes, and what a directory of shards holds.

A file is written under a temporary name in its own directory, flushed to the disk, and linked to its own
name, which fails where that is taken. A process that is killed at any moment leaves whole files, and at most
a temporary one: a leftover, which readers ignore and list. Knows nothing of what is in the files.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from rlbatch.catalogue import finding
from rlbatch.errors import StorageError, Where

SHARD_SUFFIX = ".safetensors"

END_NAME = "shards.end"
"""A writer's last file: JSON that says how many shards and samples there are, and that no more will come."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""What file systems without hard links say; there two writers of one name can race."""

_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""What file systems say that lock no directories, NFS among them."""

# .000003.safetensors.tmp-4711-9f86d081: the name to be, who writes it, and a part that no other writer has.
_LEFTOVER = re.compile(r"\..+\.tmp-[0-9]+-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a directory holds; its sub-directories are not looked into."""

    shards: tuple[Path, ...]
    """Everything named *.safetensors, in the order of the names."""
    leftovers: tuple[str, ...]
    """Paths of temporary files: of killed writers, or of one that is writing right now."""
    ended: bool
    """A writer said that no more shards will come."""
    num_names: int
    """Everything, of whatever name."""


def refusal(
    code: str,
    path: Path,
    *,
    expected: str,
    found: str,
    sample: int | None = None,
    likely: str | None = None,
    fix: str | None = None,
) -> StorageError:
    """The error that says one thing about one file; `sample` counts from the file's first."""
    where = Where(path=str(path), sample=sample)
    return StorageError.of(
        finding(code, where=where, expected=expected, found=found, likely=likely, fix=fix),
    )


def unusable(path: Path, error: OSError) -> StorageError:
    """The error for a file or directory that the system does not let us read."""
    return refusal("file-unusable", path, expected="a file or directory to read", found=reason(error))


def reason(error: OSError) -> str:
    """What the system said, without the path: a finding says where already."""
    return error.strerror or type(error).__name__


def list_directory(directory: Path) -> Listing:
    """What lies right in the directory.

    Raises:
        StorageError: file-unusable, the directory cannot be listed.
    """
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise unusable(directory, error) from error
    return Listing(
        shards=tuple(directory / name for name in names if name.endswith(SHARD_SUFFIX)),
        leftovers=tuple(str(directory / name) for name in names if _LEFTOVER.fullmatch(name)),
        ended=END_NAME in names,
        num_names=len(names),
    )


def write_atomically(path: Path, pieces: Iterable[bytes | NDArray[Any]]) -> None:
    """Write a new file that others see whole or not at all, also after a crash of the machine.

    Args:
        path: the file to be; its directory exists.
        pieces: its contents, in order; arrays are C-contiguous.

    Raises:
        StorageError: write-failed, there is a file of that name, or the system refused (disk full, no
            permission, ...). The temporary file is gone then, and nothing bears the name.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    placed = False
    try:
        _require_free(path)
        with temporary.open("xb") as file:
            for piece in pieces:
                file.write(piece if isinstance(piece, bytes) else piece.data)
            file.flush()
            os.fsync(file.fileno())
        _place(temporary, path)
        placed = True
        # The new name is on the disk only once its directory is.
        sync_directory(path.parent)
    except StorageError:
        _remove(temporary)
        raise
    except BaseException as error:
        _remove(path if placed else temporary)
        if isinstance(error, FileNotFoundError):
            raise refusal(
                "write-failed",
                path,
                expected=f"a directory {path.parent}",
                found="none of that name",
                likely="it was not made yet",
                fix="make it first, or use open_writer, which does",
            ) from error
        if isinstance(error, OSError):
            refused = refusal("write-failed", path, expected="a file written whole", found=reason(error))
            raise refused from error
        raise


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(directory: Path) -> None:
    """Make a directory and its parents where they are missing.

    Raises:
        StorageError: write-failed, it cannot be made, or something else bears its name.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        sync_directory(directory.absolute().parent)
    except OSError as error:
        raise refusal(
            "write-failed",
            directory,
            expected="a directory, or a place to make one",
            found=reason(error),
        ) from error


def claim_directory(directory: Path) -> Callable[[], None]:
    """Keep other writers out of a directory until what is given is called, or the process is gone.

    Where the file system has no locks nobody is kept out; then the second shard of one name is refused.

    Raises:
        StorageError: file-unusable, another writer has it.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise refusal(
            "file-unusable",
            directory,
            expected="a directory that no writer has open",
            found="one that a writer is filling",
            likely="two writers share a directory, or one of this process was never left",
            fix="give each writer a directory of its own, and use it in a `with` block",
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(handle)
            raise unusable(directory, error) from error
    return partial(_let_go, handle, os.getpid())


def _let_go(handle: int, owner: int) -> None:
    # A process forked meanwhile has the handle too: to close ours would leave the lock to it, and what that
    # process lets go must not unlock ours.
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _place(temporary: Path, path: Path) -> None:
    """Give the file its name, unless somebody was faster: a rename would replace what they wrote."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise _taken(path) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _require_free(path)
        temporary.replace(path)
    else:
        _remove(temporary)


def _require_free(path: Path) -> None:
    if path.exists():
        raise _taken(path)


def _taken(path: Path) -> StorageError:
    return refusal(
        "write-failed",
        path,
        expected="a name that is free: shards are written once",
        found="a file of that name",
        likely="the same path was written before, or two writers share a directory",
        fix="name another path, or give each writer a directory of its own",
    )


def _remove(path: Path) -> None:
    # A disk that refuses this too leaves a leftover, which readers know; the first error is the one to tell.
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
