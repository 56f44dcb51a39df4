"""One step of a trainer on samples at hand: all checks without it, then those with its logprobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlbatch.alignment import Judge, LogitsFor, measure
from rlbatch.batch import Batch, Layout
from rlbatch.collate import collate
from rlbatch.errors import Finding
from rlbatch.faults import Scored
from rlbatch.records import Origin, Purpose, Sample
from rlbatch.soundness import check_sound


class Trainer(Protocol):
    """Whoever knows the trainer's logprobs of a sample."""

    vocab_size: int | None
    """Ids that its model knows; None where there is no model at hand."""

    def __call__(self, sample: Sample, /) -> Scored:
        """The sample with its trainer logprobs; the same for the same sample every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """What a run knows of itself and wants, as `check_sound` takes it."""

    purpose: Purpose = "train"
    trainer_version: int | None = None
    max_version_lag: int | None = None
    group_size: int | None = None


def findings_of(
    rows: Sequence[Sample | Scored], trainer: Trainer, *, layout: Layout, set_up: SetUp = SetUp()
) -> tuple[Finding, ...]:
    """Everything that training on these rows would be told; `where.sample` is the place in `rows`.

    Args:
        rows: samples, which are scored here, or scored ones.
        trainer: whom to ask.
        layout: of the batch.
        set_up: of the run; without, the weights are those that sampled, and groups are not looked at.
    """
    samples = [row.sample if isinstance(row, Scored) else row for row in rows]
    origins = [Origin(path=None, index=index) for index in range(len(rows))]
    sound = check_sound(
        samples,
        purpose=set_up.purpose,
        vocab_size=trainer.vocab_size,
        origins=origins,
        trainer_version=set_up.trainer_version,
        max_version_lag=set_up.max_version_lag,
        group_size=set_up.group_size,
    )
    faulty = {found.where.sample for found in sound if found.severity == "error"}
    # A fault of all of them together has no place, and nothing is left to compare.
    if None in faulty:
        return sound
    kept = [
        (row if isinstance(row, Scored) else trainer(row), origin)
        for row, origin in zip(rows, origins, strict=True)
        if origin.index not in faulty
    ]
    return (*sound, *_against_trainer(kept, layout, set_up))


def _against_trainer(
    rows: Sequence[tuple[Scored, Origin]], layout: Layout, set_up: SetUp
) -> tuple[Finding, ...]:
    """One step, judged as one: a batch of each kind of logprobs, which never share one."""
    judge = Judge(trainer_version=set_up.trainer_version, logits_for=_logits_for(rows))
    for kind in dict.fromkeys(scored.sample.logprobs_modes for scored, _ in rows):
        part = [pair for pair in rows if pair[0].sample.logprobs_modes == kind]
        batch = collate(
            [scored.sample for scored, _ in part],
            layout=layout,
            purpose=set_up.purpose,
            origins=[origin for _, origin in part],
        )
        judge.add(measure(batch, trainer_logprobs_of(batch, [scored for scored, _ in part])))
    return judge.verdict().findings


def _logits_for(rows: Sequence[tuple[Scored, Origin]]) -> LogitsFor | None:
    """The rows' own logits; None where they have none."""
    if not all(scored.logits.shape[1] for scored, _ in rows):
        return None
    by_index = {origin.index: scored for scored, origin in rows}
    # Each answer is another pass; the same drill gets the same ones.
    rng = np.random.default_rng(0)

    def answer(batch: Batch, index: int, start: int, stop: int) -> Tensor:
        ref = batch.ref_of(batch.host_segments[index])
        first, scored = ref.token_offset, by_index[ref.index]
        logits = scored.logits[start - first : stop - first]
        if scored.dropout:
            logits = logits + rng.normal(0, scored.dropout, logits.shape)
        return torch.from_numpy(logits)

    return answer


def trainer_logprobs_of(batch: Batch, rows: Sequence[Scored]) -> Tensor:
    """[B, T] float64: the rows' own trainer logprobs at the positions that predict their tokens."""
    values = torch.zeros(batch.shape, dtype=torch.float64)
    for row, (ref, scored) in enumerate(zip(batch.refs, rows, strict=True)):
        at = row if batch.layout == "padded" else 0
        # Position t predicts token t + 1.
        logprobs = np.where(scored.sample.turn >= 0, scored.trainer_logprobs, 0.0)[1:]
        values[at, ref.token_offset : ref.token_offset + len(logprobs)] = torch.from_numpy(logprobs)
    return values
