"""Samples set aside: a shard a step, and beside it the findings, a JSON line a sample.

000000-000012.safetensors      the samples of epoch 0, step 12 that were set aside, as they were
000000-000012.findings.jsonl   line i says what is wrong with sample i of the shard, and where it came from
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlbatch.errors import Finding, StorageError
from rlbatch.records import Origin, Sample
from rlbatch.storage import write_shard
from rlbatch.storage.files import SHARD_SUFFIX, make_directory, reason, refusal, write_atomically

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
    """Write what a step sets aside. A step that is loaded again, as after resuming, finds it written already.

    Args:
        directory: made where it is missing.
        samples: at least one.
        origins: where each was stored.
        findings: what is wrong with each.
        epoch: with `step`, names the files.
        step: counted in its epoch.

    Raises:
        StorageError: write-failed, the system refused, or files of these names say something else.
    """
    name = f"{epoch:06d}-{step:06d}"
    lines = [
        json.dumps(
            {"path": origin.path, "sample": origin.index, "findings": [asdict(each) for each in found]}
        )
        for origin, found in zip(origins, findings, strict=True)
    ]
    text = "".join(f"{line}\n" for line in lines).encode()
    make_directory(directory)
    if not _written(directory / f"{name}{FINDINGS_SUFFIX}", text):
        write_atomically(directory / f"{name}{FINDINGS_SUFFIX}", [text])
    shard = directory / f"{name}{SHARD_SUFFIX}"
    if not shard.exists():
        write_shard(shard, samples)


def _written(path: Path, text: bytes) -> bool:
    """Whether the file is there already, as it would be written."""
    try:
        found = path.read_bytes() if path.exists() else None
    except OSError as error:
        raise _refused(path, reason(error)) from error
    if found is not None and found != text:
        raise _refused(path, "other findings, of another run")
    return found is not None


def _refused(path: Path, found: str) -> StorageError:
    return refusal(
        "write-failed",
        path,
        expected="a name that is free, or this very step's findings",
        found=found,
        likely="an earlier run has the same quarantine directory",
        fix="give each run a quarantine directory of its own",
    )
