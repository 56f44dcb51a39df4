"""Logits of a few suspect tokens, from the model that is trained: what `require_aligned` asks for.

Nothing is kept between two questions; each is one forward pass over one sequence, of which the head sees the
positions that were asked for.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rlbatch.alignment import LogitsFor
from rlbatch.batch import Batch
from rlbatch.scoring.head import output_head, overridden
from rlbatch.scoring.inputs import inputs_of_one
from rlbatch.scoring.wrappers import called_alone


def logits_for(model: nn.Module) -> LogitsFor:
    """A callback for `require_aligned(..., logits_for=...)`.

    Each sequence is scored alone, whatever it was packed with, in the mode the model is in. Memory: a
    window of logits [256, V], besides what a forward pass over one sequence takes. Not for a
    sharded model, whose ranks would not ask for the same.

    Args:
        model: as for `logprob_head`. Of DistributedDataParallel, whose ranks would have to ask together, the
            model inside is called; so it is of `torch.compile`.

    Raises:
        ScoringError: at the first question, where the head cannot be overridden.
    """
    inner: Any = called_alone(model)

    def answer(batch: Batch, index: int, start: int, stop: int) -> Tensor:
        segment = batch.host_segments[index]
        first = batch.ref_of(segment).token_offset
        head = output_head(model)

        def asked_only(hidden: Tensor) -> Tensor:
            return nn.functional.linear(hidden[:, start - first : stop - first], head.weight, head.bias)

        with torch.no_grad(), overridden(head, asked_only):
            logits: Tensor = inner(**inputs_of_one(batch, segment, stop)).logits
        return logits[0]

    return answer
