"""Faults of a batch's own arrays: planted in what collation made of good rows."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlbatch.batch import Batch
from rlbatch.collate import Padding, collate
from rlbatch.drill.tally import Drilled, told
from rlbatch.faults import LayoutFault
from rlbatch.records import LayoutArrays, Sample
from rlbatch.soundness import check_sound_layout

PARALLEL = 2
"""Ranks that share a sequence, each way, where padding is made for them."""


def layout_case(
    fault: LayoutFault, rows: Sequence[Sample], rng: np.random.Generator, *, share: float
) -> Drilled:
    """The fault in the arrays of these rows, and what is said of them.

    Raises:
        NoPlaceError: they offer no place for it.
    """
    clean, ranks = _clean_for(fault.code, rows)
    planted = fault.plant(clean, rng, share=share)
    found = check_sound_layout(planted, context_parallel=ranks, tensor_parallel=ranks)
    said = told(fault.code, found, set(range(len(rows))))
    return Drilled(code=fault.code, told=said, before=rows, findings=found)


def _clean_for(code: str, rows: Sequence[Sample]) -> tuple[LayoutArrays, int]:
    """Arrays in which the fault can come about, and the ranks that share them."""
    if code == "positions-count-padding":
        return arrays_of(collate(rows, layout="padded", padding=Padding(side="left"))), 1
    if code == "padding-too-short":
        # Context parallelism takes two pieces a rank, and each is shared again.
        padding = Padding(sequence_multiple=2 * PARALLEL * PARALLEL)
        arrays = arrays_of(collate(rows, layout="packed", padding=padding))
        return replace(arrays, inference_logprobs=None), PARALLEL
    arrays = arrays_of(collate(rows, layout="packed"))
    if code == "boundary-trained":
        return replace(arrays, loss_mask=np.roll(arrays.loss_mask, 1), align="input"), 1
    return arrays, 1


def arrays_of(batch: Batch) -> LayoutArrays:
    """A collated batch as arrays, with its own counts."""
    return LayoutArrays(
        input_ids=batch.input_ids.numpy(),
        loss_mask=batch.loss_mask.numpy(),
        align="target",
        position_ids=None if batch.position_ids is None else batch.position_ids.numpy(),
        attention_mask=None if batch.attention_mask is None else batch.attention_mask.numpy(),
        cu_seqlens=None if batch.cu_seqlens is None else batch.cu_seqlens.numpy(),
        max_seqlen=batch.max_seqlen,
        inference_logprobs=batch.inference_logprobs.numpy().reshape(-1),
        sequence_num_loss_tokens=np.array(batch.sequence_num_loss_tokens),
        normalizer=batch.num_loss_tokens,
    )
