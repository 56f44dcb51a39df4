"""`Pool`: the good rollouts that faults are planted into, drawn from files of any size."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from rlbatch.catalogue import finding
from rlbatch.errors import StorageError, Where
from rlbatch.records import Sample
from rlbatch.soundness.distributions import in_force
from rlbatch.storage.sources import files_of, read_rows
from rlbatch.storage.statements import ModelIdentity, Statement

INFORMATIVE_BELOW = -0.1
"""Logprob, nats, of a token at which one value can be told from another."""
MIN_INFORMATIVE = 16
"""Such tokens that a row needs before a fault that only the trainer's logprobs show is planted in it."""

NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Rows that can be trained on, as they were read."""

    samples: tuple[Sample, ...]
    """All that were drawn; they must be silent."""
    able: tuple[Sample, ...]
    """Those of them with enough to go by that a fault in them shows; all of one logprobs mode. Never a single
    one: a fault is planted beside good rows."""
    alike: tuple[Sample, ...]
    """Those of `able` that were all sampled in one way: the largest such set."""

    @property
    def any_length(self) -> tuple[Sample, ...]:
        """Rows of the logprobs mode of `able`, else of the most frequent one; short and certain ones too."""
        if not self.able:
            return tuple(_largest(self.samples, lambda sample: sample.logprobs_modes))
        modes = self.able[0].logprobs_modes
        return tuple(sample for sample in self.samples if sample.logprobs_modes == modes)


def load_pool(
    paths: Sequence[Path],
    statement: Statement,
    *,
    max_samples: int,
    rng: np.random.Generator,
    identity: ModelIdentity | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Pool:
    """At most `max_samples` rows, drawn evenly from all files.

    Args:
        paths: shards, directories of shards, recorded .json or .jsonl.
        statement: what recorded JSON cannot say of its logprobs.
        max_samples: rows held in memory.
        rng: decides which.
        identity: the model that sampled, for what the rows' provenance does not say, such as BOS and EOS.
        on_progress: told the share of the files that is read.

    Raises:
        StorageError: a file cannot be used; nothing-trained, fewer than two rows can be trained on.
        ReplyError: recorded JSON cannot, or it and the statement disagree.
    """
    files = [file for path in paths for file in files_of(path)]
    drawn: list[Sample] = []
    left_out: Counter[str] = Counter()
    num_seen = 0
    for at, file in enumerate(files):
        for row in read_rows(file, statement, identity=identity):
            reason = _why_not(row.sample)
            if row.sample is None or reason is not None:
                left_out[str(reason)] += 1
                continue
            num_seen += 1
            # Each row that was seen is in the reservoir with the same chance.
            if len(drawn) < max_samples:
                drawn.append(row.sample)
            elif (place := int(rng.integers(num_seen))) < max_samples:
                drawn[place] = row.sample
        if on_progress is not None:
            on_progress((at + 1) / len(files))
    return pool_of(drawn, where=Where(path=str(paths[0])), left_out=left_out)


def pool_of(samples: Sequence[Sample], *, where: Where, left_out: Mapping[str, int] = NOTHING) -> Pool:
    """The pool of rows at hand, all of which can be trained on.

    Args:
        samples: the rows.
        where: the place of a finding.
        left_out: how many others there were that cannot be trained on, by reason.

    Raises:
        StorageError: nothing-trained, as `load_pool`.
    """
    usable = [_with_advantages(sample) for sample in samples]
    if len(usable) < 2:
        others = "".join(f"; {count} {reason}" for reason, count in left_out.items())
        raise StorageError.of(
            finding(
                "nothing-trained",
                where=where,
                expected="at least 2 rollouts that can be trained on: a fault is planted beside good rows",
                found=f"{len(usable)} of {len(usable) + sum(left_out.values())}{others}",
                likely="few rollouts, or logprobs that are not those of the draws",
                fix="drill with rollouts that `rlbatch audit` calls sound",
            )
        )
    informative = [sample for sample in usable if num_informative(sample) >= MIN_INFORMATIVE]
    able = _largest(informative, lambda sample: sample.logprobs_modes)
    able = able if len(able) >= 2 else []
    alike = _largest(able, lambda sample: frozenset(sample.provenances))
    return Pool(samples=tuple(usable), able=tuple(able), alike=tuple(alike))


def num_informative(sample: Sample) -> int:
    """Trained tokens that are no near-certainties."""
    return int(np.count_nonzero(sample.loss_mask & (sample.inference_logprobs < INFORMATIVE_BELOW)))


def _with_advantages(sample: Sample) -> Sample:
    """The sample with 0 for advantages that nobody has said: these copies are judged, and train nothing."""
    missing = np.isnan(sample.advantages) & sample.loss_mask
    return replace(sample, advantages=np.where(missing, 0, sample.advantages)) if missing.any() else sample


def _why_not(sample: Sample | None) -> str | None:
    """Why a row cannot be trained on; None where it can."""
    if sample is None:
        return "with a fault of their own"
    if not sample.loss_mask.any() or not sample.segments:
        return "without a trained token"
    used = [sample.provenances[part.turn] for part in sample.segments]
    refused = next((each for each in used if not each.trainable), None)
    if refused is None:
        return None
    return f"with {refused.logprobs_mode} logprobs of tokens sampled with {in_force(refused)}"


def _largest(samples: Sequence[Sample], kind: Callable[[Sample], object]) -> list[Sample]:
    """Those of the most frequent kind."""
    groups: dict[object, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[kind(sample)].append(sample)
    return max(groups.values(), key=len, default=[])
