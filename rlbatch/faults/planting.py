"""`Fault`: one corruption with its code and story, and how it is planted. Knows nothing of the checks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError
from rlbatch.records import Provenance, Sample, Segment, sampled_segments

Corruption = Callable[[Sample, np.random.Generator], Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to spoil samples."""

    code: str
    """Of the finding that names it."""
    story: str
    """How it comes about in real pipelines."""
    corrupt: Corruption
    """One sample in, its spoilt copy out; the sample itself where it offers no place for this fault."""

    def plant(
        self, samples: Sequence[Sample], rng: np.random.Generator, *, share: float = 1.0
    ) -> list[Sample]:
        """Copies with `share` of the samples spoilt, at least one.

        Raises:
            RecordError: there are no samples, or none offers a place for this fault.
        """
        if not samples:
            raise RecordError("plant: expected at least one sample, found none")
        planted = list(samples)
        left = max(1, round(share * len(samples)))
        for index in rng.permutation(len(samples)).tolist():
            if left:
                planted[index] = self.corrupt(samples[index], rng)
                left -= planted[index] is not samples[index]
        if all(new is old for new, old in zip(planted, samples, strict=True)):
            raise RecordError(
                f"plant: expected a place for {self.code!r}, found none in {len(samples)} samples"
            )
        return planted


def long_segments(sample: Sample, *, min_length: int) -> list[Segment]:
    """Runs of sampled tokens of at least this many."""
    return [part for part in sampled_segments(sample.turn) if part.stop - part.start >= min_length]


def with_logprobs(sample: Sample, at: NDArray[np.int64], value: float) -> Sample:
    """A copy with one value at some places."""
    logprobs = sample.inference_logprobs.copy()
    logprobs[at] = value
    return replace(sample, inference_logprobs=logprobs)


def at_sampled(sample: Sample, rng: np.random.Generator, value: float) -> Sample:
    """A copy with one value at one sampled token drawn at random."""
    sampled = np.flatnonzero(sample.turn >= 0)
    return with_logprobs(sample, rng.choice(sampled, 1), value) if len(sampled) else sample


def with_provenances(sample: Sample, change: Callable[[Provenance], Provenance]) -> Sample:
    """A copy whose provenances are changed."""
    changed: dict[str, Any] = {"provenances": tuple(change(item) for item in sample.provenances)}
    return replace(sample, **changed)
