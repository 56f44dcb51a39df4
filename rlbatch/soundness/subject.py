"""What checks are given: `Members`, samples as they are, and `Subject`, their tokens as one run.

Checks look at whole arrays, so that a thousand samples cost little more than one; only what is bad is told
sample by sample. Numpy; knows no check.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError, Where
from rlbatch.records import TOKEN_FIELDS, Origin, Provenance, Purpose, Sample, Stretch
from rlbatch.records.structure import check_scalar
from rlbatch.soundness.runs import Runs, runs_of, version_changes

# What `turn` says, the segments of the samples say too.
_LOOKED_AT = tuple(spec.name for spec in TOKEN_FIELDS if not spec.optional and spec.name != "turn")

MIN_FLAT_TOKENS = 2**14
"""Shorter stretches are joined with their neighbours: a part costs as much as looking at so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What the caller knows that no sample says."""

    purpose: Purpose
    vocab_size: int | None = None
    """Rows of the model's head."""
    trainer_version: int | None = None
    """`policy_version` of the weights in the trainer."""
    max_version_lag: int | None = None
    """How many versions older than the trainer a trained token may be."""
    group_size: int | None = None
    """Trajectories that every group must have."""

    def __post_init__(self) -> None:
        least = {"vocab_size": 1, "trainer_version": 0, "max_version_lag": 0, "group_size": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is None:
                continue
            check_scalar(name, value, int)
            if value < smallest:
                raise RecordError(f"{name}: expected at least {smallest}, found {value}")
        if self.max_version_lag is not None and self.trainer_version is None:
            raise RecordError("max_version_lag: expected a trainer_version with it, found none")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Members:
    """S samples, and where they came from."""

    samples: Sequence[Sample]
    origins: Sequence[Origin]
    expected: Expectations
    stretches: Sequence[Stretch] = ()
    """The same samples as runs that lie end to end in flat arrays; empty where nobody knows."""

    def where(self, sample: int, tokens: NDArray[np.intp] | None = None, turn: int | None = None) -> Where:
        """The place of a finding: a sample, and the span from the first to the last of its `tokens`."""
        return Where(
            path=self.origins[sample].path,
            sample=self.origins[sample].index,
            trajectory=self.samples[sample].trajectory_id,
            turn=turn,
            start=None if tokens is None else int(tokens[0]),
            stop=None if tokens is None else int(tokens[-1]) + 1,
        )

    def parts(self, *, max_tokens: int) -> Iterator["Members"]:
        """The same samples in runs, each closed once it has `max_tokens` tokens, or a long stretch ends."""
        first = 0
        for stop, stretch in self._cuts(max_tokens):
            yield Members(
                samples=self.samples[first:stop],
                origins=self.origins[first:stop],
                expected=self.expected,
                stretches=() if stretch is None else (stretch,),
            )
            first = stop

    def _cuts(self, max_tokens: int) -> Iterator[tuple[int, Stretch | None]]:
        """Where each part ends, and the one stretch that it is, where it is one."""
        pieces: list[tuple[list[int], Stretch | None]] = [
            (np.diff(stretch.offsets).tolist(), stretch if stretch.num_tokens >= MIN_FLAT_TOKENS else None)
            for stretch in self.stretches
        ]
        at = num_tokens = 0
        for lengths, stretch in pieces or [([len(sample) for sample in self.samples], None)]:
            if stretch is not None and num_tokens:
                yield at, None
                num_tokens = 0
            first = 0
            for stop, length in enumerate(lengths, start=1):
                num_tokens += length
                if num_tokens >= max_tokens or (stretch is not None and stop == len(lengths)):
                    yield at + stop, None if stretch is None else stretch.part(first, stop)
                    first, num_tokens = stop, 0
            at += len(lengths)
        if num_tokens:
            yield at, None


class Scratch:
    """Memory that subject after subject is written into: fresh pages cost more than the copy does."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def joined(self, name: str, parts: Sequence[NDArray[Any]], length: int) -> NDArray[Any]:
        """The parts end to end, `length` entries in all, in the memory of this name."""
        held = self._arrays.get(name)
        if held is None or len(held) < length:
            # Parts differ a little in length: a quarter more, and it need not grow again.
            held = self._arrays[name] = np.empty(length + length // 4, parts[0].dtype)
        return np.concatenate(parts, out=held[:length])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject(Members):
    """S samples of N tokens in all, end to end."""

    offsets: NDArray[np.intp]
    """[S + 1]; sample i is tokens offsets[i]:offsets[i + 1]."""
    token_ids: NDArray[np.int32]
    reported: NDArray[np.float32]
    """[N] nats: what the engine said, behaviour logprobs or the raw values in their place."""
    loss_mask: NDArray[np.bool_]
    advantages: NDArray[np.float32]
    policy_version: NDArray[np.int32]
    temperature: NDArray[np.float32]
    sampled: NDArray[np.bool_]
    """[N]; True = an engine drew the token."""
    runs: Runs
    version_changes: NDArray[np.intp]
    """[C] sampled tokens whose `policy_version` is not that of the token before, which is of the same run."""
    provenances: tuple[Provenance, ...]
    """The distinct ones."""

    @classmethod
    def of(cls, members: Members, scratch: "Scratch") -> "Subject":
        """The samples end to end; at least one. The next subject of the same scratch overwrites this one.

        What lies end to end already is taken as it lies.
        """
        samples = members.samples
        stretch = members.stretches[0] if len(members.stretches) == 1 else _joined(samples, scratch)
        columns: dict[str, Any] = {name: stretch.columns[name] for name in _LOOKED_AT}
        reported = columns.pop("inference_logprobs")
        if any(sample.raw_inference_logprobs is not None for sample in samples):
            parts = [_reported(sample) for sample in samples]
            reported = scratch.joined("reported", parts, stretch.num_tokens)
        runs, provenances = runs_of(samples, stretch.offsets)
        return cls(
            samples=samples,
            origins=members.origins,
            expected=members.expected,
            offsets=stretch.offsets,
            reported=reported,
            sampled=runs.spread(np.ones(len(runs), np.bool_), stretch.num_tokens, False),
            runs=runs,
            version_changes=version_changes(samples, runs, columns["policy_version"]),
            provenances=provenances,
            **columns,
        )

    def per_run(self, fact: Callable[[Provenance], Any], dtype: str) -> NDArray[Any]:
        """[G] something that the provenance of each run says."""
        return np.array([fact(item) for item in self.provenances], dtype)[self.runs.provenance]

    def trained_runs(self, bad: NDArray[np.bool_]) -> Iterator[int]:
        """Each of the runs in `bad` [G] that has a trained token."""
        for run in np.flatnonzero(bad).tolist():
            if self.loss_mask[self.tokens_of(run)].any():
                yield run

    def by_run(self, bad: NDArray[np.intp]) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Each run that has some of these tokens, and which of its own those are, from 0.

        Args:
            bad: sampled tokens, counted over all samples, in order.
        """
        yield from _grouped(bad, self.runs.start)

    def by_sample(self, bad: NDArray[np.intp]) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Each sample that has some of these tokens, and which of its own those are, from 0.

        Args:
            bad: tokens, counted over all samples, in order.
        """
        yield from _grouped(bad, self.offsets[:-1])

    def where_run(self, run: int, tokens: NDArray[np.intp] | None = None) -> Where:
        """The place of a finding: a run, or the span of some of its tokens, counted from its first."""
        sample = int(self.runs.sample[run])
        if tokens is None:
            tokens = np.array([0, self.runs.stop[run] - self.runs.start[run] - 1])
        return self.where(sample, tokens + self.first_token(run), int(self.runs.turn[run]))

    def first_token(self, run: int) -> int:
        """Where a run begins in its own sample."""
        return int(self.runs.start[run] - self.offsets[self.runs.sample[run]])

    def tokens_of(self, run: int) -> slice:
        """Where a run lies in the flat arrays."""
        return slice(int(self.runs.start[run]), int(self.runs.stop[run]))

    def begins_run(self, tokens: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of these sampled tokens, counted over all samples, are the first of their run."""
        first: NDArray[np.bool_] = (
            self.runs.start[np.searchsorted(self.runs.start, tokens, "right") - 1] == tokens
        )
        return first

    def provenance_of(self, run: int) -> Provenance:
        """How the logprobs of a run came to be."""
        return self.provenances[int(self.runs.provenance[run])]


def _joined(samples: Sequence[Sample], scratch: Scratch) -> Stretch:
    offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])
    return Stretch(
        samples=samples,
        offsets=offsets,
        columns={
            name: scratch.joined(name, [getattr(sample, name) for sample in samples], int(offsets[-1]))
            for name in _LOOKED_AT
        },
    )


def _reported(sample: Sample) -> NDArray[np.float32]:
    raw = sample.raw_inference_logprobs
    if raw is None:
        return sample.inference_logprobs
    stand_in = [turn for turn, each in enumerate(sample.provenances) if not each.gives_behaviour_logprobs]
    return np.where(np.isin(sample.turn, stand_in), raw, sample.inference_logprobs)


def _grouped(bad: NDArray[np.intp], starts: NDArray[np.intp]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    if not len(bad):
        return
    owner = np.searchsorted(starts, bad, "right") - 1
    cuts = np.flatnonzero(np.diff(owner)) + 1
    for tokens, index in zip(np.split(bad, cuts), owner[[0, *cuts]].tolist(), strict=True):
        yield index, tokens - starts[index]
