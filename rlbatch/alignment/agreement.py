"""Many ranks, one verdict: every rank tells what it saw of a step, and all hear the same.

A rank's part is a row of numbers of fixed size, gathered in one collective. Words follow in a second one, but
only where some rank has findings. No rank waits longer for another than the timeout.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.alignment.drift import Drift, Sums
from rlbatch.alignment.judge import Judge
from rlbatch.catalogue import finding
from rlbatch.errors import AlignmentError, Finding, Where

AGE_SLOTS = 16
"""Ages in versions that fit into a row of numbers; a rank with more sends them in words."""

UNKNOWN = -1.0
"""In place of what a rank that failed early does not know; it is compared with nobody's."""

_SUMS = fields(Sums)
_COMPARED = {
    "num_batches": "the same number of batches in the step",
    "trainer_version": "the same trainer_version (-2 is None)",
    "moment": "the same `defer`, and a sequence of batches on all or on none",
    "limits": "the same limits (shown as a checksum)",
    "samples": "the same samples in the step that ranks share (shown as a checksum)",
}
"""What all ranks must have alike, and how a finding says it."""
_COLUMNS = (
    *_COMPARED,
    *("num_bytes", "num_trained", "num_excluded_segments", "all_comparable", "num_ages"),
)
_NO_VERSION = -2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Occasion:
    """What brings a rank here: equal on all ranks, or the ranks are not at the same place of their loop."""

    num_batches: int | None
    """None where this rank could not tell."""
    is_whole: bool
    """A whole step, not one batch of it."""
    is_early: bool
    """Before anything is judged: only failures are told, of a step whose verdict is deferred."""
    samples_crc32: int | None = None
    """Of the samples of the step, as its loader says; None where none does."""

    def numbers(self, judge: Judge) -> list[float]:
        """One a name of `_COMPARED`."""
        limits = float(zlib.crc32(repr(judge.limits).encode()))
        if self.num_batches is None:
            return [UNKNOWN, UNKNOWN, UNKNOWN, limits, UNKNOWN]
        version = judge.trainer_version
        moment = 2 * self.is_whole + self.is_early
        known_version = float(_NO_VERSION if version is None else version)
        samples = float(UNKNOWN if self.samples_crc32 is None else self.samples_crc32)
        return [float(self.num_batches), known_version, moment, limits, samples]


class _Words(msgspec.Struct, frozen=True):
    """What does not fit into numbers."""

    findings: tuple[Finding, ...]
    by_age: dict[int, Sums]
    """Empty where the ages are in the numbers."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """What one rank said."""

    numbers: dict[str, float]
    findings: tuple[Finding, ...] = ()
    drift: Drift = field(default_factory=Drift)


def agree(mine: Judge, occasion: Occasion, group: "dist.ProcessGroup") -> Judge:
    """What all ranks of the group have seen, in the order of ranks; equal on each.

    Args:
        mine: what this rank has seen; `limits.rank_timeout` says how long the others are waited for.
        occasion: what this rank is at.
        group: every process of it must call.

    Returns:
        A judge with everyone's findings, each with its rank, and everyone's sums; with `ranks-differ` where
        the ranks are not at the same place.

    Raises:
        AlignmentError: rank-silent, a rank did not come in time, or is gone.
    """
    parts = _parts(mine, occasion, group)
    ranks = [dist.get_global_rank(group, rank) for rank in range(len(parts))]
    together = Judge(trainer_version=mine.trainer_version, limits=mine.limits)
    for rank, part in zip(ranks, parts, strict=True):
        together.merge(
            Judge(
                trainer_version=mine.trainer_version,
                findings=[replace(found, where=replace(found.where, rank=rank)) for found in part.findings],
                drift=part.drift,
                num_trained=int(part.numbers["num_trained"]),
                num_excluded_segments=int(part.numbers["num_excluded_segments"]),
                all_comparable=bool(part.numbers["all_comparable"]),
            )
        )
    together.findings += _differences([part.numbers for part in parts], ranks)
    return together


def _parts(mine: Judge, occasion: Occasion, group: "dist.ProcessGroup") -> list[_Part]:
    """Everyone's part: one collective, and a second one where somebody has words."""
    fits = len(mine.drift.by_age) <= AGE_SLOTS
    words = b""
    if mine.findings or not fits:
        by_age = {} if fits else mine.drift.by_age
        words = msgspec.msgpack.encode(_Words(findings=tuple(mine.findings), by_age=by_age))
    row = _row(mine, occasion, len(words), mine.drift.by_age if fits else {})
    rows = _gathered(torch.from_numpy(row), group, mine.limits.rank_timeout)
    parts = [_part_of(each.numpy()) for each in rows]
    sizes = [int(part.numbers["num_bytes"]) for part in parts]
    if not any(sizes):
        return parts
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(words)] = np.frombuffer(words, np.uint8)
    texts = _gathered(torch.from_numpy(padded), group, mine.limits.rank_timeout)
    for part, text, size in zip(parts, texts, sizes, strict=True):
        if size:
            said = msgspec.msgpack.decode(text.numpy().tobytes()[:size], type=_Words)
            part.findings = said.findings
            part.drift.merge(Drift(by_age=said.by_age))
    return parts


def _row(mine: Judge, occasion: Occasion, num_bytes: int, by_age: dict[int, Sums]) -> NDArray[np.float64]:
    """[columns + AGE_SLOTS * (1 + sums)]: one rank's numbers; unused slots are 0."""
    counts = [num_bytes, mine.num_trained, mine.num_excluded_segments, mine.all_comparable, len(by_age)]
    slots = np.zeros((AGE_SLOTS, 1 + len(_SUMS)))
    for slot, (age, sums) in zip(slots, sorted(by_age.items()), strict=False):
        slot[:] = [age, *(getattr(sums, spec.name) for spec in _SUMS)]
    return np.concatenate([occasion.numbers(mine), counts, slots.reshape(-1)])


def _part_of(row: NDArray[np.float64]) -> _Part:
    numbers = dict(zip(_COLUMNS, row[: len(_COLUMNS)].tolist(), strict=True))
    slots = row[len(_COLUMNS) :].reshape(AGE_SLOTS, 1 + len(_SUMS))[: int(numbers["num_ages"])]
    by_age = {int(age): _sums_of(values) for age, *values in slots.tolist()}
    return _Part(numbers=numbers, drift=Drift(by_age=by_age))


def _sums_of(values: Sequence[float]) -> Sums:
    sums = Sums()
    for spec, value in zip(_SUMS, values, strict=True):
        setattr(sums, spec.name, bool(value) if spec.type is bool else value)
    return sums


def _differences(rows: Sequence[dict[str, float]], ranks: Sequence[int]) -> Iterator[Finding]:
    """`ranks-differ` for each thing that is not alike, at the first rank that has it unlike most."""
    for name, expected in _COMPARED.items():
        known = [(rank, row[name]) for rank, row in zip(ranks, rows, strict=True) if row[name] != UNKNOWN]
        counts = Counter(value for _, value in known)
        if len(counts) < 2:
            continue
        (usual, _), *_ = counts.most_common()
        odd = next(rank for rank, value in known if value != usual)
        yield finding(
            "ranks-differ",
            where=Where(rank=odd),
            expected=f"{expected} on every rank",
            found=f"{name} " + ", ".join(f"{value:.0f} on rank {rank}" for rank, value in known),
        )


def _gathered(mine: Tensor, group: "dist.ProcessGroup", timeout: float) -> list[Tensor]:
    """Everyone's tensor of the same shape, on the host."""
    mine = mine.to(_device(group))
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(parts, mine, group=group, async_op=True)
        work.wait(timedelta(seconds=timeout))
    except RuntimeError as error:
        # The same text on every rank that is left; how each of them noticed differs, and is in the cause.
        silent = finding(
            "rank-silent",
            expected=f"every rank of the group at this step within {timeout:g} s",
            found="a rank that did not come, or is gone",
        )
        raise AlignmentError.of(silent) from error
    return [part.cpu() for part in parts]


def _device(group: "dist.ProcessGroup") -> torch.device:
    """Where the group's tensors lie: the host where it can, so that no device is waited for."""
    on_host = "cpu:" in str(dist.get_backend_config(group))
    return torch.device("cpu") if on_host else torch.device("cuda", torch.cuda.current_device())
