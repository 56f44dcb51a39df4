"""Logits of a few suspect tokens, from the model that is trained: what `require_aligned` asks for.

Nothing is kept between two questions; each is one forward pass over one sequence, of which the head sees the
positions that were asked for.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlbatch.alignment import LogitsFor
from rlbatch.batch import Batch
from rlbatch.scoring.head import output_head, overridden

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def logits_for(model: "PreTrainedModel") -> LogitsFor:
    """A callback for `require_aligned(..., logits_for=...)`.

    Each sequence is scored alone, whatever it was packed with, in the mode the model is in. Memory: a
    window of logits [256, V], besides what a forward pass over one sequence takes. Not for a
    sharded model, whose ranks would not ask for the same.

    Args:
        model: with a plain linear head.

    Raises:
        ScoringError: at the first question, where the head cannot be overridden.
    """

    def answer(batch: Batch, index: int, start: int, stop: int) -> Tensor:
        segment = batch.host_segments[index]
        first = batch.ref_of(segment).token_offset
        # Later tokens change nothing of earlier logits.
        input_ids = batch.input_ids[segment.row : segment.row + 1, first:stop]
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        head = output_head(model)

        def asked_only(hidden: Tensor) -> Tensor:
            return torch.nn.functional.linear(hidden[:, start - first :], head.weight, head.bias)

        with torch.no_grad(), overridden(head, asked_only):
            logits: Tensor = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits[0]

    return answer
