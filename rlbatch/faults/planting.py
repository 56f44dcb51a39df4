"""How corruptions are planted: `Fault` spoils samples, `ModelFault` spoils what a model says of them as well.

`plant` is how: it raises where good data offers no place, so that what comes back is spoilt.
Knows nothing of the checks. Both leave the originals as they are; magnitudes and places are drawn from the
generator that is passed.
"""

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError
from rlbatch.records import Provenance, Sample, Segment, sampled_segments

Corruption = Callable[[Sample, np.random.Generator], Sample]
"""One sample in, its spoilt copy out; the sample itself where it offers no place for this fault."""

GroupCorruption = Callable[[Sequence[Sample], np.random.Generator], list[Sample]]
"""The same for faults that need several samples at once; those without a place come back as they are."""


class NoPlaceError(RecordError):
    """Good data that offers no place for a fault: nothing is wrong with it, and nothing was planted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """A sample and what a model says of it."""

    sample: Sample
    trainer_logprobs: NDArray[np.float64]
    """[T] nats at the sample's temperature; entry t is of token t; NaN where token t was not sampled."""
    logits: NDArray[np.floating[Any]]
    """[T, V] of the sequence: row t predicts token t + 1; as the model gives them, not divided."""
    dropout: float = 0.0
    """Spread, in logits, of what each further pass adds to them by chance."""


Score = Callable[[Sample], Scored]
"""Scores a sample alone with the trainer's model; gives the same for the same sample every time."""

ModelCorruption = Callable[[Sequence[Scored], np.random.Generator, Score], list[Scored]]
"""Scored samples in, spoilt copies out, in order; one that offers no place for this fault as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to spoil samples. Whoever wants trainer logprobs scores the spoilt ones."""

    code: str
    """Of the finding that names it."""
    story: str
    """How it comes about in real pipelines."""
    corrupt: InitVar[Corruption | GroupCorruption]
    together: bool = False
    """`corrupt` takes all chosen samples at once: it needs more than one."""
    alike: bool = False
    """Every sample is spoilt by the same draw: a fault in how a whole run is set up."""
    rescored: bool = False
    """Ids or temperature are changed too: only trainer logprobs of the spoilt samples show the fault."""
    _spoil: Corruption | GroupCorruption = field(init=False, repr=False)
    """`corrupt`, for `plant` alone: by itself it says nothing where it finds no place."""

    def __post_init__(self, corrupt: Corruption | GroupCorruption) -> None:
        object.__setattr__(self, "_spoil", corrupt)

    def plant(
        self, samples: Sequence[Sample], rng: np.random.Generator, *, share: float = 1.0
    ) -> list[Sample]:
        """Copies with `share` of the samples spoilt, at least one (two where the fault needs several).

        Raises:
            RecordError: there are no samples; `NoPlaceError` where none offers a place for this fault.
        """
        seed = int(rng.integers(2**32))
        corrupt: Any = self._spoil

        def spoil(part: list[Sample]) -> list[Sample]:
            if self.together:
                return list(corrupt(part, rng))
            return [corrupt(each, np.random.default_rng(seed) if self.alike else rng) for each in part]

        return _planted(self, samples, spoil, rng, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFault:
    """One way to spoil samples or trainer logprobs that takes the model's logits to plant."""

    code: str
    """Of the finding that names it."""
    story: str
    """How it comes about in real pipelines."""
    corrupt: InitVar[ModelCorruption]
    together: bool = False
    """`corrupt` needs more than one sample."""
    packed_only: bool = False
    """It comes about in packed batches only, in the order of the samples."""
    truncated: bool = False
    """It comes about only where training asks for tokens drawn from kept sets."""
    _spoil: ModelCorruption = field(init=False, repr=False)
    """`corrupt`, for `plant` alone: by itself it says nothing where it finds no place."""

    def __post_init__(self, corrupt: ModelCorruption) -> None:
        object.__setattr__(self, "_spoil", corrupt)

    def plant(
        self, samples: Sequence[Sample], rng: np.random.Generator, *, score: Score, share: float = 1.0
    ) -> list[Scored]:
        """Scored copies with `share` of the samples spoilt, at least one (two where the fault needs several).

        Raises:
            RecordError: there are no samples; `NoPlaceError` where none offers a place for this fault.
        """
        scored = [score(sample) for sample in samples]
        return _planted(self, scored, lambda part: self._spoil(part, rng, score), rng, share)


def _planted(
    fault: Fault | ModelFault,
    items: Sequence[Any],
    spoil: Callable[[list[Any]], list[Any]],
    rng: np.random.Generator,
    share: float,
) -> list[Any]:
    """Copies of `items` with a share of them spoilt; those without a place are passed over for others."""
    if not items:
        raise RecordError("plant: expected at least one sample, found none")
    planted = list(items)
    wanted = max(2 if fault.together else 1, round(share * len(items)))
    order = rng.permutation(len(items)).tolist()
    while order and wanted > 0:
        # In their own order: a pack has a first sequence, and a queue has neighbours.
        chosen = sorted(order[:wanted])
        order = order[wanted:]
        for index, spoilt in zip(chosen, spoil([items[index] for index in chosen]), strict=True):
            planted[index] = spoilt
            wanted -= spoilt is not items[index]
    if all(new is old for new, old in zip(planted, items, strict=True)):
        raise NoPlaceError(f"plant: expected a place for {fault.code!r}, found none in {len(items)} samples")
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
