"""`unpack`: a batch back into the samples that it was collated from."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.batch import NO_EXPERT, Batch
from rlbatch.collate.columns import TARGET_FIELDS
from rlbatch.records import MediaArray, Sample, TokenField


def unpack(batch: Batch) -> list[Sample]:
    """The samples of a batch, in its order: `collate` undone.

    No position predicts token 0, so its values come back as those of a token that nobody sampled: what they
    are in a sound sample. An optional field that says nothing of a sample's tokens comes back as None, and
    routed experts as int32.

    Args:
        batch: as `collate` made it, on any device.

    Example:
        input_ids [[1, 5, 7, 3, 8]] with cu_seqlens [0, 3, 5] -> samples of token_ids [1, 5, 7] and [3, 8]
    """
    host = batch.to("cpu")
    turns = _turns(host)
    return [_sample(host, sequence, turns) for sequence in range(len(host.refs))]


def _turns(batch: Batch) -> NDArray[np.int16]:
    """[B, T] the turn that sampled each position's target, -1 elsewhere."""
    turns = np.full(batch.shape, -1, np.int16)
    for segment in batch.host_segments:
        turns[segment.row, segment.start : segment.stop] = segment.turn
    return turns


def _sample(batch: Batch, sequence: int, turns: NDArray[np.int16]) -> Sample:
    ref = batch.refs[sequence]
    row = sequence if batch.layout == "padded" else 0
    at = slice(ref.token_offset, ref.token_offset + batch.sequence_num_tokens[sequence])
    columns = {spec.name: _column(batch, spec, row, at) for spec in TARGET_FIELDS}
    return Sample(
        token_ids=batch.input_ids[row, at].numpy().astype(np.int32),
        turn=_own(turns[row, at], -1),
        **columns,  # type: ignore[arg-type]
        routed_experts=_routed_experts(batch, row, at),
        media=_media(batch, sequence),
        sample_id=ref.sample_id,
        trajectory_id=ref.trajectory_id,
        group_id=ref.group_id,
        reward=batch.sequence_rewards[sequence],
        sibling=batch.sequence_siblings[sequence],
        num_siblings=batch.sequence_num_siblings[sequence],
        provenances=batch.sequence_provenances[sequence],
        finish_reasons=batch.sequence_finish_reasons[sequence],
        stop_reasons=batch.sequence_stop_reasons[sequence],
    )


def _column(batch: Batch, spec: TokenField, row: int, at: slice) -> NDArray[Any] | None:
    tensor: Tensor | None = getattr(batch, spec.name)
    if tensor is None:
        return None
    values = tensor[row, at].numpy()
    if spec.optional and np.isnan(values).all():
        return None
    return _own(values, spec.padding)


def _own(values: NDArray[Any], first: float) -> NDArray[Any]:
    """Values by the position that predicts as values by their own token."""
    own = np.empty_like(values)
    own[0] = first
    own[1:] = values[:-1]
    return own


def _routed_experts(batch: Batch, row: int, at: slice) -> NDArray[np.int32] | None:
    if batch.routed_experts is None:
        return None
    values: NDArray[np.int32] = batch.routed_experts[row, at].numpy()[:-1].copy()
    return None if (values == NO_EXPERT).all() else values


def _media(batch: Batch, sequence: int) -> tuple[MediaArray, ...]:
    media = []
    for part in batch.media:
        start = sum(part.num_rows[:sequence])
        values = part.values[start : start + part.num_rows[sequence]]
        if len(values):
            media.append(MediaArray(name=part.name, values=values.numpy()))
    return tuple(media)
