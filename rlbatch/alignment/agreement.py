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
from rlbatch.batch import Batch
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
    "samples": "the same samples in the steps that ranks share (shown as a checksum)",
}
"""What all ranks must have alike, and how a finding says it."""
_COLUMNS = (
    *_COMPARED,
    *("share", "step_loss_tokens"),
    *("num_bytes", "num_trained", "num_excluded_segments", "all_comparable", "num_ages"),
)
_LIKELY_SAMPLES = "the loaders of the ranks differ in seed, in store, or in the position they resumed at"
_FIX_SAMPLES = "give every rank the same store and seed, and load the same state_dict on all of them"
_LIKELY_SHARES = "num_ranks was not given to the loaders, or two of them have the same rank"
_FIX_SHARES = (
    "RolloutLoader(..., rank=dist.get_rank(), num_ranks=dist.get_world_size()); where ranks share a batch on "
    "purpose (tensor parallel), pass the group of the data-parallel ranks"
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
    """Of the samples of the step, or of all steps in order, as the loader says; None where it does not."""
    share_crc32: int | None = None
    """Of the trained samples that this rank holds of them; None where it has none, or no loader gave them."""
    step_loss_tokens: int | None = None
    """Trained tokens of the steps on all ranks, as the loader says; None where not all of a step is here, or
    no other rank has a part of it."""

    def numbers(self, judge: Judge) -> list[float]:
        """One a name of `_COMPARED`, and the two that follow."""
        limits = float(_crc32(judge.limits))
        if self.num_batches is None:
            return [UNKNOWN, UNKNOWN, UNKNOWN, limits, UNKNOWN, UNKNOWN, UNKNOWN]
        version = judge.trainer_version
        moment = 2 * self.is_whole + self.is_early
        known_version = float(_NO_VERSION if version is None else version)
        said = (self.samples_crc32, self.share_crc32, self.step_loss_tokens)
        return [
            *(float(self.num_batches), known_version, moment, limits),
            *(UNKNOWN if each is None else float(each) for each in said),
        ]


def occasion_of(batches: Sequence[Batch], *, is_whole: bool, is_early: bool) -> Occasion:
    """What the batches of one call say of the steps that they are of."""
    steps = [batch.step for batch in batches if batch.step is not None]
    # One of each step, in order.
    firsts = list({(step.epoch, step.step): step for step in steps}.values())
    checksums = [step.samples_crc32 for step in firsts]
    # The total of a step says nothing of a part of its micro-batches.
    is_complete = len(steps) == len(batches) == sum(step.num_batches for step in firsts)
    # What is only looked at may be looked at by every rank.
    trained = sorted(each for batch in batches if batch.purpose != "audit" for each in _trained_of(batch))
    # Without a checksum of the step's samples a rank has it to itself, and the others may have their own.
    is_shared = is_complete and None not in checksums
    return Occasion(
        num_batches=len(batches),
        is_whole=is_whole,
        is_early=is_early,
        samples_crc32=None if None in checksums or not checksums else _crc32(checksums),
        share_crc32=_crc32(trained) if is_complete and trained else None,
        step_loss_tokens=sum(step.num_loss_tokens for step in firsts) if is_shared and trained else None,
    )


def _trained_of(batch: Batch) -> list[tuple[str, int, int]]:
    """Each sample that is trained, with its lengths: names may repeat where each rank samples by itself."""
    lengths = zip(batch.refs, batch.sequence_num_tokens, batch.sequence_num_loss_tokens, strict=True)
    return [(ref.sample_id, tokens, trained) for ref, tokens, trained in lengths if trained]


def _crc32(value: object) -> int:
    return zlib.crc32(repr(value).encode())


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
    rows = [part.numbers for part in parts]
    together.findings += _differences(rows, ranks)
    if not any(found.severity == "error" for found in together.findings):
        together.findings += _doubled(rows, ranks)
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
            likely=_LIKELY_SAMPLES if name == "samples" else None,
            fix=_FIX_SAMPLES if name == "samples" else None,
        )


def _doubled(rows: Sequence[dict[str, float]], ranks: Sequence[int]) -> Iterator[Finding]:
    """`ranks-differ` where ranks train the same samples, or more together than the step has."""
    first: dict[float, int] = {}
    for rank, row in zip(ranks, rows, strict=True):
        other = first.setdefault(row["share"], rank)
        if row["share"] != UNKNOWN and other != rank:
            yield finding(
                "ranks-differ",
                where=Where(rank=rank),
                expected="other samples on every rank",
                found=f"those of rank {other} again, {row['num_trained']:.0f} trained tokens",
                likely=_LIKELY_SHARES,
                fix=_FIX_SHARES,
            )
            return
    # A rank that has fillers only says none.
    total = max(row["step_loss_tokens"] for row in rows)
    trained = sum(row["num_trained"] for row in rows)
    if total != UNKNOWN and trained > total:
        yield finding(
            "ranks-differ",
            expected=f"the {total:.0f} trained tokens of the step, on all ranks together",
            found=f"{trained:.0f}",
            likely=_LIKELY_SHARES,
            fix=_FIX_SHARES,
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
