"""`unpack`: a batch back into the samples that it was collated from; `with_logprobs`: with others' beside."""

from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.batch import NO_EXPERT, Batch
from rlbatch.collate.columns import TARGET_FIELDS
from rlbatch.errors import RecordError
from rlbatch.records import MediaArray, Sample, TokenField
from rlbatch.records.structure import check_choice, kind_of

LogprobsField: TypeAlias = Literal["teacher_logprobs", "ref_logprobs", "proximal_logprobs"]
"""Fields of logprobs under other weights than those that sampled."""


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


def with_logprobs(batch: Batch, logprobs: Tensor, *, field: LogprobsField) -> list[Sample]:
    """The samples of a batch with the logprobs of a reference, teacher or proximal model.

    Each logprob comes back to the token that it is about, which is one behind the position that predicts it,
    and NaN to every token that is not trained, where `trainer_logprobs` has 0.

    Args:
        batch: as `collate` made it, padded or packed, on any device.
        logprobs: [B, T] float32, nats, as `trainer_logprobs` gives them for the batch; on any device.
        field: of `Sample`; what the batch had there is replaced.

    Raises:
        RecordError: another shape or dtype, or a field that is none of these.

    Example:
        reference = trainer_logprobs(reference_model, batch)
        samples = with_logprobs(batch, reference, field="ref_logprobs")

        token_ids [1, 5, 7, 2] with 7 and 2 trained, logprobs [[0, -0.1, -0.2, 0]]:
        ref_logprobs [NaN, NaN, -0.1, -0.2]
    """
    check_choice("field", field, get_args(LogprobsField))
    if not isinstance(logprobs, Tensor) or logprobs.dtype != torch.float32 or logprobs.shape != batch.shape:
        is_tensor = isinstance(logprobs, Tensor)
        found = f"{logprobs.dtype} {list(logprobs.shape)}" if is_tensor else kind_of(logprobs)
        raise RecordError(f"with_logprobs: expected torch.float32 {list(batch.shape)}, found {found}")
    values = torch.where(batch.loss_mask.cpu(), logprobs.detach().cpu(), torch.nan).numpy()
    samples = []
    for sequence, sample in enumerate(unpack(batch)):
        changed: dict[str, Any] = {field: _own(values[_place(batch, sequence)], np.nan)}
        samples.append(replace(sample, **changed))
    return samples


def _turns(batch: Batch) -> NDArray[np.int16]:
    """[B, T] the turn that sampled each position's target, -1 elsewhere."""
    turns = np.full(batch.shape, -1, np.int16)
    for segment in batch.host_segments:
        turns[segment.row, segment.start : segment.stop] = segment.turn
    return turns


def _sample(batch: Batch, sequence: int, turns: NDArray[np.int16]) -> Sample:
    ref = batch.refs[sequence]
    row, at = _place(batch, sequence)
    columns = {spec.name: _column(batch, spec, row, at) for spec in TARGET_FIELDS}
    return Sample(
        token_ids=batch.input_ids[row, at].numpy().astype(np.int32),
        turn=_own(turns[row, at], -1),
        **columns,  # type: ignore[arg-type]
        routed_experts=_routed_experts(batch, row, at),
        media=tuple(
            MediaArray(name=name, values=values.numpy())
            for name, values in media_of_sequence(batch, sequence).items()
        ),
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


def _place(batch: Batch, sequence: int) -> tuple[int, slice]:
    """Row and batch positions of a sequence, without padding."""
    start = batch.refs[sequence].token_offset
    row = sequence if batch.layout == "padded" else 0
    return row, slice(start, start + batch.sequence_num_tokens[sequence])


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


def media_of_sequence(batch: Batch, sequence: int) -> dict[str, Tensor]:
    """One sequence's media by name, those that it has."""
    media = {}
    for part in batch.media:
        start = sum(part.num_rows[:sequence])
        if part.num_rows[sequence]:
            media[part.name] = part.values[start : start + part.num_rows[sequence]]
    return media
