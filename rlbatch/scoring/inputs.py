"""`Batch` -> the keyword arguments of a transformers model: the one place that knows which form is right.

Knows nothing of heads or logprobs.
"""

from typing import Literal, NotRequired, TypedDict, cast

import torch
from torch import Tensor

from rlbatch.batch import Batch
from rlbatch.collate.unpack import media_of_sequence
from rlbatch.records import Segment


class ModelInputs(TypedDict):
    """Keyword arguments for `model(**inputs)`."""

    input_ids: Tensor
    """[B, T] int64."""
    position_ids: NotRequired[Tensor]
    """[B, T] int64; a packed row is split into its sequences where they restart. Absent where the model
    computes them from its media."""
    use_cache: Literal[False]
    attention_mask: NotRequired[Tensor]
    """[B, T] int64, 1 at tokens; absent when packed."""


def model_inputs(batch: Batch) -> ModelInputs:
    """The arguments under which every sequence of the batch is attended alone.

    transformers finds the boundaries of a packed row in `position_ids`, but only without a cache and without
    an attention mask; with either it attends across them and says nothing.

    Args:
        batch: padded or packed, on the model's device.

    Returns:
        Arguments for `model(**inputs)`, media under their own names; tensors are the batch's own, apart from
        the mask.

    Example:
        packed, lengths 3 and 2: position_ids [[0, 1, 2, 0, 1]], use_cache False, no attention_mask
    """
    inputs = ModelInputs(input_ids=batch.input_ids, use_cache=False)
    if batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids
    if batch.attention_mask is not None:
        # 0 and 1 as tokenizers give it: some models compute with the mask, which bool does not allow.
        inputs["attention_mask"] = batch.attention_mask.to(torch.int64)
    # A model's media have names of its own, which no type here can list.
    return cast(ModelInputs, {**inputs, **{part.name: part.values for part in batch.media}})


def inputs_of_one(batch: Batch, segment: Segment, stop: int) -> ModelInputs:
    """The arguments for the segment's sequence alone, without padding, up to batch position `stop`.

    Whole where the model computes positions from media, which may belong to tokens behind `stop`.
    """
    first = batch.ref_of(segment).token_offset
    row = slice(segment.row, segment.row + 1)
    if batch.position_ids is None:
        # Padded, so that the row is the sequence.
        whole = slice(first, first + batch.sequence_num_tokens[segment.row])
        inputs = ModelInputs(input_ids=batch.input_ids[row, whole], use_cache=False)
        return cast(ModelInputs, {**inputs, **media_of_sequence(batch, segment.row)})
    before = slice(first, stop)
    return ModelInputs(
        input_ids=batch.input_ids[row, before],
        position_ids=batch.position_ids[row, before],
        use_cache=False,
    )
