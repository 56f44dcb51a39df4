"""Files of rollouts of every kind, as one stream of rows: shards, and recorded JSON.

Knows nothing of what the rows are for.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rlbatch.errors import StorageError, Where
from rlbatch.storage.files import SHARD_SUFFIX, list_directory, refusal
from rlbatch.storage.opening import open_reader
from rlbatch.storage.recordings import Row, read_recording
from rlbatch.storage.statements import ModelIdentity, Statement, require_agreement

RECORDING_SUFFIXES = (".json", ".jsonl")


def files_of(path: Path) -> list[Path]:
    """The files to read: those of a directory are the shards right in it, any other path is itself.

    A directory without shards, or that lacks some of them, stays itself, for `read_rows` to say what is wrong
    with it.

    Raises:
        StorageError: file-unusable, the directory cannot be listed.
    """
    if not path.is_dir():
        return [path]
    shards = list(list_directory(path).shards)
    try:
        open_reader(path)
    except StorageError as error:
        # A fault of one shard is told of that shard, and the others are read.
        is_of_a_shard = error.findings[0].where.path in [str(shard) for shard in shards]
        return shards if is_of_a_shard else [path]
    return shards


def read_rows(
    path: Path,
    statement: Statement,
    *,
    identity: ModelIdentity | None = None,
    skip_refused: bool = False,
) -> Iterator[Row]:
    """Every entry of one file, in order; of a shard, after its checksums are verified.

    Args:
        path: a shard, a recorded .json, or .jsonl of those.
        statement: what recorded JSON cannot say; a shard's provenance must not deny it.
        identity: the model that sampled, for what the provenance of a sample does not say.
        skip_refused: as in `read_recording`.

    Raises:
        StorageError: the file cannot be used.
        ReplyError: its contents cannot, or file and statement disagree. What was yielded before stands.
    """
    if path.suffix in RECORDING_SUFFIXES:
        return read_recording(path, statement, identity=identity, skip_refused=skip_refused)
    if path.exists() and not path.is_dir() and path.suffix != SHARD_SUFFIX:
        known = " or ".join((SHARD_SUFFIX, *RECORDING_SUFFIXES))
        found = f"the suffix {path.suffix}" if path.suffix else "no suffix"
        raise refusal("file-unusable", path, expected=f"a file whose suffix is {known}", found=found)
    return _shard_rows(path, statement, identity)


def _shard_rows(path: Path, statement: Statement, identity: ModelIdentity | None) -> Iterator[Row]:
    reader = open_reader(path)
    require_agreement(reader.provenances, statement, Where(path=str(path)))
    completed = {each: each if identity is None else identity.complete(each) for each in reader.provenances}
    for index, sample in enumerate(reader):
        provenances = tuple(completed[each] for each in sample.provenances)
        if provenances != sample.provenances:
            sample = replace(sample, provenances=provenances)
        yield Row(index=index, sample=sample, share=(index + 1) / len(reader))
