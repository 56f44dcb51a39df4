"""`rlbatch convert`: recorded rollouts into shards, all or nothing.

Everything is read and checked before anything is written, then read again: memory stays small.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlbatch.catalogue import finding
from rlbatch.errors import Finding, SoundnessError, StorageError, Where
from rlbatch.records import Origin
from rlbatch.soundness import check_sound
from rlbatch.storage import open_writer
from rlbatch.storage.recordings import Row
from rlbatch.storage.sources import RECORDING_SUFFIXES, files_of, read_rows
from rlbatch.storage.statements import ModelIdentity, Statement


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was written."""

    paths: tuple[str, ...]
    num_samples: int
    num_tokens: int
    warnings: tuple[Finding, ...]


def convert(
    paths: Sequence[Path],
    out: Path,
    *,
    statement: Statement,
    identity: ModelIdentity | None,
    skip_refused: bool = False,
) -> Converted:
    """Write the samples of all files to shards in `out`, in order.

    Args:
        paths: recorded .json or .jsonl, shards, directories of shards.
        out: a directory without shards; made where it is missing, once everything is checked.
        statement: what recorded JSON cannot say.
        identity: the model that sampled; ids are checked against its vocabulary.
        skip_refused: recorded requests that the engine refused are warnings.

    Raises:
        SoundnessError: a sample has a fault; those of the first file with any.
        StorageError, ReplyError: a file cannot be used, or `out` cannot be written to.
    """
    files = [file for path in paths for file in files_of(path)]

    def rows_of(file: Path) -> Iterator[Row]:
        return read_rows(file, statement, identity=identity, skip_refused=skip_refused)

    _require_distinct_names(files)
    warnings: list[Finding] = []
    written: dict[str, Origin] = {}
    for file in files:
        warnings += _checked(rows_of(file), file, identity, written)
    num_samples = num_tokens = 0
    with open_writer(out) as writer:
        for file in files:
            for row in rows_of(file):
                if row.sample is None:
                    # Of an entry that is left out on request, and was told of.
                    _require_no_errors(row.findings)
                    continue
                writer.append(row.sample)
                num_samples += 1
                num_tokens += len(row.sample)
    return Converted(
        paths=writer.paths, num_samples=num_samples, num_tokens=num_tokens, warnings=tuple(warnings)
    )


def _checked(
    rows: Iterator[Row], file: Path, identity: ModelIdentity | None, written: dict[str, Origin]
) -> list[Finding]:
    """The warnings about one file.

    Args:
        rows: its entries.
        file: itself.
        identity: the model that sampled.
        written: the first place of every sample_id so far; those of this file are added.

    Raises:
        SoundnessError: it has errors; all of them.
    """
    findings = [
        found
        for row in rows
        for found in (*_findings(row, file, identity), *_named_again(row, file, written))
    ]
    _require_no_errors(findings)
    return findings


def _require_no_errors(findings: Sequence[Finding]) -> None:
    errors = [found for found in findings if found.severity == "error"]
    if errors:
        raise SoundnessError.of(*errors)


def _findings(row: Row, file: Path, identity: ModelIdentity | None) -> Iterator[Finding]:
    yield from row.findings
    if row.sample is not None:
        found = check_sound(
            [row.sample],
            purpose="audit",
            vocab_size=None if identity is None else identity.vocab_size,
            origins=[Origin(path=str(file), index=row.index)],
        )
        # What a turn shows, such as its end, its sample shows again.
        yield from (each for each in found if each not in row.findings)


def _named_again(row: Row, file: Path, written: dict[str, Origin]) -> Iterator[Finding]:
    """An id that a sample before has: rows may name themselves, and those of one trajectory are no turns."""
    if row.sample is None:
        return
    here = Origin(path=str(file), index=row.index)
    first = written.setdefault(row.sample.sample_id, here)
    if first is not here:
        yield finding(
            "duplicate-sample",
            where=Where(path=here.path, sample=here.index, trajectory=row.sample.trajectory_id),
            expected="an id for each sample",
            found=f"sample_id {row.sample.sample_id!r} again, first at {first.path} sample {first.index}",
        )


def _require_distinct_names(files: Sequence[Path]) -> None:
    """Recorded trajectories are named by their file's name: two files of one name would share ids."""
    seen: dict[str, Path] = {}
    for file in files:
        if file.suffix not in RECORDING_SUFFIXES:
            continue
        other = seen.setdefault(file.stem, file)
        if other is not file:
            raise StorageError.of(
                finding(
                    "file-unusable",
                    where=Where(path=str(file)),
                    expected="recordings of different names: trajectories are named after them",
                    found=f"the name of {other}",
                    likely="recordings of several runs, each with the same file names",
                    fix="rename one, or convert them into directories of their own",
                )
            )
