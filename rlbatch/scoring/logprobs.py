"""Trainer logprobs of a batch: the model is called in the proven form, its head gives logprobs, not logits.

[T, V] in float32 never exists for all tokens at once; that is the op's doing. Knows nothing of losses.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from rlbatch.batch import Batch
from rlbatch.catalogue import finding
from rlbatch.errors import RecordError, ScoringError
from rlbatch.records.structure import kind_of
from rlbatch.scoring.head import logprob_forward, output_head, overridden
from rlbatch.scoring.inputs import model_inputs
from rlbatch.scoring.isolation import require_packing_isolated, require_padding_ignored
from rlbatch.scoring.model import num_input_rows
from rlbatch.scoring.proof import require_known_head
from rlbatch.scoring.rope import require_alike_in_length
from rlbatch.scoring.transforms import logit_transform, switched_off


@contextmanager
def logprob_head(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Within, `model(**model_inputs(batch)).logits` is the logprobs of the batch, not logits.

    [B, T] float32 nats of `batch.target_ids` at `batch.temperature`; 0 where `loss_mask` is False; with
    gradient where grad is enabled. The backward pass may come after. Not for two threads at once. The first
    use of a model costs four forwards over eight tokens, in which all ranks of a sharded or
    DistributedDataParallel model take part.

    In a batch of the purpose `audit` or `train-truncated`, logprobs of turns that were drawn from kept sets
    are renormalised over the trainer's own (`kept_sets`), and -inf, without gradient, of a target outside.

    Args:
        model: of transformers, with a plain linear head, tied or not; what is called, with the wrapper around
            it where there is one: `fully_shard`, FullyShardedDataParallel, DistributedDataParallel,
            `torch.compile`, PEFT's adapters of other layers than the head.
        batch: padded or packed, on the model's device.

    Raises:
        ScoringError: the head cannot be overridden, its weight is not whole when it runs, the model does
            something unknown to its logits, its RoPE follows the longest sequence and the batch mixes lengths
            that it tells apart, or it is called with inputs of another shape.
    """
    require_known_head(model)
    require_alike_in_length(model, batch)
    head = output_head(model)
    forward = logprob_forward(head, batch, logit_transform(model))
    with switched_off(model), overridden(head, forward):
        yield


def trainer_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """Logprobs of the batch's targets under the model's weights. Not for two threads at once.

    Args:
        model: as for `logprob_head`.
        batch: padded or packed, on the model's device. The first of each layout proves that the model keeps
            packed sequences apart, or padding out, in which all ranks of a sharded or
            DistributedDataParallel model take part; so does the first after hooks on the model or its head,
            or its own forward, have changed.

    Returns:
        [B, T] float32 nats at `batch.temperature`; 0 where `loss_mask` is False; with gradient where grad is
        enabled; over kept sets as for `logprob_head`.

    Raises:
        PackingLeakError: the model attends across the sequences of a packed row.
        ScoringError: as for `logprob_head`; the model reads the padding of a batch with padding on the left
            as tokens; or a token id has no row in the input embedding.
        RecordError: what is given is no model, or no batch.
    """
    if not isinstance(model, nn.Module):
        raise RecordError(f"model: expected a torch module, found {kind_of(model)}")
    if not isinstance(batch, Batch):
        raise RecordError(
            f"batch: expected Batch, found {kind_of(batch)}; rlbatch.collate.collate makes one of samples"
        )
    _require_known_ids(model, batch)
    # First, for it says by name what keeps a model from giving the plain logits that the others use.
    require_known_head(model)
    if batch.layout == "packed":
        require_packing_isolated(model)
    else:
        require_padding_ignored(model, batch)
    with logprob_head(model, batch):
        logprobs: Tensor = model(**model_inputs(batch)).logits
    return logprobs


def _require_known_ids(model: nn.Module, batch: Batch) -> None:
    """On CUDA an id beyond the embedding is an assertion in a kernel that ends the process."""
    num_rows = num_input_rows(model)
    beyond = (batch.input_ids < 0) | (batch.input_ids >= num_rows)
    if not bool(beyond.any()):
        return
    row, position = beyond.nonzero()[0].tolist()
    raise ScoringError.of(
        finding(
            "token-out-of-range",
            expected=f"ids from 0 to {num_rows - 1}, the rows of the model's input embedding",
            found=f"{int(batch.input_ids[row, position])} in row {row}, position {position} of the batch "
            f"({int(beyond.sum())} such tokens)",
        )
    )
