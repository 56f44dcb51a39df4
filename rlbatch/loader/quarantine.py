"""Samples set aside: a shard a step, and beside it the findings, a JSON line a sample.

000000-000012.safetensors      the samples of epoch 0, step 12 that were set aside, as they were
000000-000012.findings.jsonl   line i says what is wrong with sample i of the shard, and where it came from
000000-000012-1...             other samples that were set aside at the same place, as by an earlier run
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path

from rlbatch.errors import Finding
from rlbatch.records import Origin, Sample
from rlbatch.storage import write_shard
from rlbatch.storage.files import SHARD_SUFFIX, make_directory, unusable, write_atomically

FINDINGS_SUFFIX = ".findings.jsonl"


def set_aside(
    directory: Path,
    samples: Sequence[Sample],
    *,
    origins: Sequence[Origin],
    findings: Sequence[Sequence[Finding]],
    epoch: int,
    step: int,
) -> None:
    """Write what a step sets aside. A step that is loaded again, as after resuming, finds it written already:
    the same samples, whatever is found of them now.

    Args:
        directory: made where it is missing.
        samples: at least one.
        origins: where each was stored.
        findings: what is wrong with each.
        epoch: with `step`, names the files.
        step: counted in its epoch.

    Raises:
        StorageError: write-failed or file-unusable, the system refused.
    """
    lines = [
        json.dumps(
            {
                "path": origin.path,
                "sample": origin.index,
                "sample_id": sample.sample_id,
                "findings": [asdict(each) for each in found],
            }
        )
        for sample, origin, found in zip(samples, origins, findings, strict=True)
    ]
    make_directory(directory)
    ids = [sample.sample_id for sample in samples]
    for name in _names(epoch, step):
        path = directory / f"{name}{FINDINGS_SUFFIX}"
        written = _written_ids(path)
        if written is None:
            write_atomically(path, [f"{line}\n".encode() for line in lines])
        elif written != ids:
            continue
        shard = directory / f"{name}{SHARD_SUFFIX}"
        if not shard.exists():
            write_shard(shard, samples)
        return


def _names(epoch: int, step: int) -> Iterator[str]:
    name = f"{epoch:06d}-{step:06d}"
    yield name
    yield from (f"{name}-{number}" for number in count(1))


def _written_ids(path: Path) -> list[str] | None:
    """The samples that the file tells of: none where it has another form; None where there is no file."""
    try:
        text = path.read_text(errors="replace") if path.exists() else None
    except OSError as error:
        raise unusable(path, error) from error
    if text is None:
        return None
    try:
        return [json.loads(line)["sample_id"] for line in text.splitlines()]
    except (ValueError, TypeError, LookupError):
        return []
