"""Logits of a few suspect tokens, from the model that is trained: what `require_aligned` asks for.

Nothing is kept between two questions; each is one forward pass over one sequence, of which the head sees the
positions that were asked for.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rlbatch.alignment import LogitsFor
from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import ScoringError
from rlbatch.scoring.head import output_head, overridden
from rlbatch.scoring.inputs import inputs_of_one
from rlbatch.scoring.rope import follows_length
from rlbatch.scoring.wrappers import called_alone, how_spread, model_name


def logits_for(model: nn.Module) -> LogitsFor:
    """A callback for `require_aligned(..., logits_for=...)`.

    Each sequence is scored alone, whatever it was packed with, in the mode the model is in. Memory: a
    window of logits [256, V], besides what a forward pass over one sequence takes. Not for a model sharded
    over several ranks: only the rank that has a suspect asks, and the others would not take part.

    Args:
        model: as for `logprob_head`. Of DistributedDataParallel, whose ranks would have to ask together, the
            model inside is called; so it is of `torch.compile`.

    Raises:
        ScoringError: the model is sharded; or, at the first question, its head cannot be overridden.
    """
    spread = how_spread(model)
    if spread is not None:
        raise ScoringError.of(
            finding(
                "model-sharded",
                expected=f"{model_name(model)} whole on every rank, where one asks and the others do not",
                found=spread,
            )
        )
    inner: Any = called_alone(model)
    is_by_length = follows_length(model)

    def answer(batch: Batch, index: int, start: int, stop: int) -> Tensor:
        segment = batch.host_segments[index]
        first = batch.ref_of(segment).token_offset
        head = output_head(model)

        def asked_only(hidden: Tensor) -> Tensor:
            return nn.functional.linear(hidden[:, start - first : stop - first], head.weight, head.bias)

        # Later tokens change nothing of earlier logits, but where the frequencies follow the length.
        end = first + batch.sequence_num_tokens[batch.sequence_of(segment)] if is_by_length else stop
        with torch.no_grad(), overridden(head, asked_only):
            logits: Tensor = inner(**inputs_of_one(batch, segment, end)).logits
        return logits[0]

    return answer
