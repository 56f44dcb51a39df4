"""`rlbatch demo`: real rollouts from the package, sound as they are, then spoilt in every known way.

The stored samples have their trainer logprobs with them (as `proximal_logprobs`), so no model is needed.
"""

from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files

import numpy as np

from rlbatch.alignment import Judge, measure
from rlbatch.collate import collate
from rlbatch.errors import Finding, render
from rlbatch.faults import FAULTS, Fault
from rlbatch.records import Origin, Sample
from rlbatch.soundness import check_sound
from rlbatch.storage import open_reader

DATA = "demo.safetensors"
SEED = 0


def run() -> Iterator[tuple[str, bool]]:
    """The demonstration, paragraph by paragraph, each with whether it went as it should."""
    samples = load()
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    findings = judge(samples)
    yield (
        f"{len(samples)} rollouts of a real vLLM server, {num_tokens} sampled tokens: "
        + (render(findings) if findings else "sound, nothing to say"),
        not findings,
    )
    for fault in FAULTS.values():
        # The trainer logprobs are stored: what changes the trainer's inputs takes `rlbatch drill`.
        if not fault.rescored:
            yield _planted(fault, samples)


def load() -> list[Sample]:
    """The rollouts of the package."""
    with as_file(files("rlbatch") / "data" / DATA) as path:
        return open_reader(path).samples()


def judge(samples: Sequence[Sample]) -> tuple[Finding, ...]:
    """What training on the samples would be told: first without the trainer's logprobs, then with them."""
    origins = [Origin(path=None, index=index) for index in range(len(samples))]
    findings = check_sound(samples, purpose="train", origins=origins)
    faulty = {found.where.sample for found in findings if found.severity == "error"}
    whole = [pair for pair in zip(samples, origins, strict=True) if pair[1].index not in faulty]
    if not whole:
        return findings
    batch = collate([sample for sample, _ in whole], layout="padded", origins=[origin for _, origin in whole])
    if batch.proximal_logprobs is None:
        return findings
    judging = Judge(trainer_version=None)
    judging.add(measure(batch, batch.proximal_logprobs))
    return (*findings, *judging.verdict().findings)


def _planted(fault: Fault, samples: Sequence[Sample]) -> tuple[str, bool]:
    findings = judge(fault.plant(samples, np.random.default_rng(SEED)))
    named = [found for found in findings if found.code == fault.code]
    heading = f"planted: {fault.code}. {fault.story}"
    if not named:
        return f"{heading}\nnot found", False
    rest = f"\n... and {len(findings) - 1} more" if len(findings) > 1 else ""
    return f"{heading}\n{render(named[:1])}{rest}", True
