"""`rlbatch demo`: the drill's small form, on real rollouts from the package.

The stored samples have their trainer logprobs with them (as `proximal_logprobs`), so no model is needed, and
faults that take one are left to `rlbatch drill`.
"""

from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files

import numpy as np

from rlbatch.drill import findings_of
from rlbatch.errors import Finding, RecordError, render
from rlbatch.faults import FAULTS, Fault, Scored
from rlbatch.records import Sample
from rlbatch.storage import open_reader

DATA = "demo.safetensors"
SEED = 0
ROWS_TOGETHER = 8


class StoredTrainer:
    """Answers with what is stored."""

    vocab_size: int | None = None

    def __call__(self, sample: Sample) -> Scored:
        """The sample with its `proximal_logprobs`; without logits.

        Raises:
            RecordError: it has none.
        """
        if sample.proximal_logprobs is None:
            raise RecordError(f"demo: expected proximal_logprobs in sample {sample.sample_id!r}, found none")
        no_logits = np.empty((len(sample), 0), np.float32)
        logprobs = sample.proximal_logprobs.astype(np.float64)
        return Scored(sample=sample, trainer_logprobs=logprobs, logits=no_logits)


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
    faults = [fault for fault in FAULTS.values() if not fault.rescored]
    num_named = 0
    for fault in faults:
        text, is_named = _planted(fault, samples)
        num_named += is_named
        yield text, is_named
    yield (
        f"{num_named} of {len(faults)} faults named. The same on your own model and rollouts: "
        "rlbatch drill ROLLOUTS --model DIR; more on a code: rlbatch explain CODE",
        True,
    )


def load() -> list[Sample]:
    """The rollouts of the package."""
    with as_file(files("rlbatch") / "data" / DATA) as path:
        return open_reader(path).samples()


def judge(samples: Sequence[Sample]) -> tuple[Finding, ...]:
    """What training on the samples would be told."""
    return findings_of(samples, StoredTrainer(), layout="padded")


def _planted(fault: Fault, samples: Sequence[Sample]) -> tuple[str, bool]:
    # Rows that trade places are those of one small batch, and must be long enough to be told apart.
    by_length = sorted(samples, key=len, reverse=True)
    rows = by_length[:ROWS_TOGETHER] if fault.together else samples
    findings = judge(fault.plant(rows, np.random.default_rng(SEED)))
    named = [found for found in findings if found.code == fault.code]
    heading = f"planted: {fault.code}. {fault.story}"
    if not named:
        return f"{heading}\nnot found", False
    rest = f"\n... and {len(findings) - 1} more" if len(findings) > 1 else ""
    return f"{heading}\n{render(named[:1])}{rest}", True
