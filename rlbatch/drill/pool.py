"""`Pool`: the good rollouts that faults are planted into, drawn from files of any size."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlbatch.catalogue import finding
from rlbatch.errors import StorageError, Where
from rlbatch.records import Provenance, Sample
from rlbatch.storage.sources import files_of, read_rows
from rlbatch.storage.statements import Statement

INFORMATIVE_BELOW = -0.1
"""Logprob, nats, of a token at which one value can be told from another."""
MIN_INFORMATIVE = 16
"""Such tokens that a row needs before a fault is planted in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Rows that can be trained on, as they were read."""

    samples: tuple[Sample, ...]
    """All that were drawn; they must be silent."""
    able: tuple[Sample, ...]
    """Those of them with enough to go by that a fault in them shows; all of one logprobs mode."""
    alike: tuple[Sample, ...]
    """Those of `able` that were all sampled in one way: the largest such set."""

    @property
    def any_length(self) -> tuple[Sample, ...]:
        """Rows of the logprobs mode of `able`, short and certain ones among them."""
        modes = self.able[0].logprobs_modes
        return tuple(sample for sample in self.samples if sample.logprobs_modes == modes)


def load_pool(
    paths: Sequence[Path],
    statement: Statement,
    *,
    max_samples: int,
    rng: np.random.Generator,
    on_progress: Callable[[float], None] | None = None,
) -> Pool:
    """At most `max_samples` rows, drawn evenly from all files.

    Args:
        paths: shards, directories of shards, recorded .json or .jsonl.
        statement: what recorded JSON cannot say of its logprobs.
        max_samples: rows held in memory.
        rng: decides which.
        on_progress: told the share of the files that is read.

    Raises:
        StorageError: a file cannot be used; nothing-trained, no row that can be trained on, or none with
            enough informative tokens.
        ReplyError: recorded JSON cannot, or it and the statement disagree.
    """
    files = [file for path in paths for file in files_of(path)]
    drawn: list[Sample] = []
    num_seen = num_read = 0
    for at, file in enumerate(files):
        for row in read_rows(file, statement):
            num_read += 1
            if row.sample is None or not _trainable(row.sample):
                continue
            num_seen += 1
            # Each row that was seen is in the reservoir with the same chance.
            if len(drawn) < max_samples:
                drawn.append(row.sample)
            elif (place := int(rng.integers(num_seen))) < max_samples:
                drawn[place] = row.sample
        if on_progress is not None:
            on_progress((at + 1) / len(files))
    return pool_of(drawn, where=Where(path=str(paths[0])), num_read=num_read)


def pool_of(samples: Sequence[Sample], *, where: Where, num_read: int) -> Pool:
    """The pool of rows at hand; those that cannot be trained on are left out.

    Raises:
        StorageError: nothing-trained, as `load_pool`.
    """
    usable = [_with_advantages(sample) for sample in samples if _trainable(sample)]
    informative = [sample for sample in usable if num_informative(sample) >= MIN_INFORMATIVE]
    able = _largest(informative, lambda sample: sample.logprobs_modes)
    if len(able) < 2:
        raise StorageError.of(
            finding(
                "nothing-trained",
                where=where,
                expected=f"at least 2 rollouts that can be trained on, with {MIN_INFORMATIVE} tokens below "
                f"{INFORMATIVE_BELOW:g} nats each",
                found=f"{len(able)} of {num_read}, {len(usable)} of them trainable",
                likely="logprobs that are not those of the draws, or rollouts that are very short or certain",
                fix="drill with rollouts that `rlbatch audit` calls sound",
            )
        )
    alike = _largest(able, lambda sample: frozenset(sample.provenances))
    return Pool(samples=tuple(usable), able=tuple(able), alike=tuple(alike))


def num_informative(sample: Sample) -> int:
    """Trained tokens that are no near-certainties."""
    return int(np.count_nonzero(sample.loss_mask & (sample.inference_logprobs < INFORMATIVE_BELOW)))


def _with_advantages(sample: Sample) -> Sample:
    """The sample with 0 for advantages that nobody has said: these copies are judged, and train nothing."""
    missing = np.isnan(sample.advantages) & sample.loss_mask
    return replace(sample, advantages=np.where(missing, 0, sample.advantages)) if missing.any() else sample


def _trainable(sample: Sample) -> bool:
    used: list[Provenance] = [sample.provenances[turn] for turn in np.unique(sample.turn) if turn >= 0]
    return bool(used) and bool(sample.loss_mask.any()) and all(each.trainable for each in used)


def _largest(samples: Sequence[Sample], kind: Callable[[Sample], object]) -> list[Sample]:
    """Those of the most frequent kind."""
    groups: dict[object, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[kind(sample)].append(sample)
    return max(groups.values(), key=len, default=[])
