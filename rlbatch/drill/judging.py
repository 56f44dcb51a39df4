"""One step of a trainer on samples at hand: all checks without it, then those with its logprobs."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlbatch.alignment import Judge, measure
from rlbatch.batch import Batch, Layout
from rlbatch.collate import collate
from rlbatch.errors import Finding
from rlbatch.faults import Scored
from rlbatch.packing import Room, plan_batches
from rlbatch.records import Origin, Sample
from rlbatch.soundness import check_sound

MAX_BATCH_TOKENS = 16384


class Trainer(Protocol):
    """Whoever knows the trainer's logprobs of a sample."""

    vocab_size: int | None
    """Ids that its model knows; None where there is no model at hand."""

    def __call__(self, sample: Sample, /) -> Scored:
        """The sample with its trainer logprobs; the same for the same sample every time."""


def findings_of(rows: Sequence[Sample | Scored], trainer: Trainer, *, layout: Layout) -> tuple[Finding, ...]:
    """Everything that training on these rows would be told; `where.sample` is the place in `rows`.

    Args:
        rows: samples, which are scored here, or scored ones.
        trainer: whom to ask.
        layout: of the batches.
    """
    samples = [row.sample if isinstance(row, Scored) else row for row in rows]
    origins = [Origin(path=None, index=index) for index in range(len(rows))]
    sound = check_sound(samples, purpose="train", vocab_size=trainer.vocab_size, origins=origins)
    faulty = {found.where.sample for found in sound if found.severity == "error"}
    # A fault of all of them together has no place, and nothing is left to compare.
    if None in faulty:
        return sound
    kept = [
        (row if isinstance(row, Scored) else trainer(row), origin)
        for row, origin in zip(rows, origins, strict=True)
        if origin.index not in faulty
    ]
    return (*sound, *_against_trainer(kept, layout))


def _against_trainer(rows: Sequence[tuple[Scored, Origin]], layout: Layout) -> tuple[Finding, ...]:
    """Batches of one step, judged together."""
    judge = Judge(trainer_version=None)
    plan = plan_batches(
        [len(scored.sample) for scored, _ in rows],
        Room(layout=layout, max_tokens=MAX_BATCH_TOKENS),
        kinds=[scored.sample.logprobs_modes for scored, _ in rows],
    )
    for indices in plan:
        part = [rows[index] for index in indices]
        batch = collate(
            [scored.sample for scored, _ in part], layout=layout, origins=[origin for _, origin in part]
        )
        judge.add(measure(batch, trainer_logprobs_of(batch, [scored for scored, _ in part])))
    return judge.verdict().findings


def trainer_logprobs_of(batch: Batch, rows: Sequence[Scored]) -> Tensor:
    """[B, T] float64: the rows' own trainer logprobs at the positions that predict their tokens."""
    values = torch.zeros(batch.shape, dtype=torch.float64)
    for row, (ref, scored) in enumerate(zip(batch.refs, rows, strict=True)):
        at = row if batch.layout == "padded" else 0
        # Position t predicts token t + 1.
        logprobs = np.where(scored.sample.turn >= 0, scored.trainer_logprobs, 0.0)[1:]
        values[at, ref.token_offset : ref.token_offset + len(logprobs)] = torch.from_numpy(logprobs)
    return values
