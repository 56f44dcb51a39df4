"""The kept sets of a batch: from the provenance of its segments to the rules that the op follows."""

import torch

from rlbatch.batch import Batch
from rlbatch_kernels import Truncation


def kept_sets(batch: Batch) -> Truncation | None:
    """The rules under which the trainer's logprobs of a batch are renormalised; for one's own logits too.

    Args:
        batch: of the purpose `audit` or `train-truncated`; for `train` nothing is renormalised.

    Returns:
        top_k [B, T] int32, top_p and min_p [B, T] float32 (the engine's own precision) on the batch's device,
        off wherever the provenance keeps no set; None where that is everywhere.

    Example:
        a turn sampled by vLLM with top_k 20, processed logprobs, in an audit: top_k 20 at its positions
    """
    if not any(provenance.renormalised(batch.purpose) for provenance in batch.provenances):
        return None
    top_k = torch.zeros(batch.shape, dtype=torch.int32)
    top_p, min_p = torch.ones(batch.shape), torch.zeros(batch.shape)
    for segment, provenance in zip(batch.host_segments, batch.provenances, strict=True):
        if provenance.renormalised(batch.purpose):
            place = (segment.row, slice(segment.start, segment.stop))
            top_k[place] = provenance.sampling.top_k
            top_p[place] = provenance.sampling.top_p
            min_p[place] = provenance.sampling.min_p
    device = batch.target_ids.device
    return Truncation(top_k=top_k.to(device), top_p=top_p.to(device), min_p=min_p.to(device))
