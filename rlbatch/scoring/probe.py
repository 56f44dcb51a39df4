"""Small made-up batches for the proofs that are done once a model, and the mode a model is put in for them.

Knows nothing of what is proven.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlbatch.batch import Batch, Layout
from rlbatch.collate import DEFAULT_PADDING, Padding, collate
from rlbatch.records import Provenance, Sample, SamplingParams
from rlbatch.scoring.model import input_weight

# Odd steps that share no factor with a vocabulary's size visit many rows of the embedding; the offset keeps
# the first ids, which are special tokens in most vocabularies, from coming first.
_STEP, _OFFSET = 7919, 11


def probe_sample(length: int, *, seed: int, vocab_size: int) -> Sample:
    """A sequence of made-up ids below `vocab_size`, all but the first of them trained; another a seed."""
    ids = (np.arange(length, dtype=np.int64) * _STEP + (seed + 1) * _OFFSET) % vocab_size
    return _sample(ids.astype(np.int32), f"probe/{seed}")


def repeated_sample(length: int, *, token_id: int) -> Sample:
    """A sequence of one id, all but the first of them trained."""
    return _sample(np.full(length, token_id, np.int32), f"probe/repeated/{token_id}")


def joined(samples: Sequence[Sample]) -> Sample:
    """One sequence of all their tokens, all but the first of them trained."""
    return _sample(np.concatenate([sample.token_ids for sample in samples]), "probe/joined")


def _sample(token_ids: NDArray[np.int32], name: str) -> Sample:
    length = len(token_ids)
    sampled = np.arange(length) > 0
    return Sample(
        token_ids=token_ids,
        inference_logprobs=np.where(sampled, 0, np.nan).astype(np.float32),
        loss_mask=sampled,
        advantages=np.zeros(length, np.float32),
        policy_version=np.where(sampled, 0, -1).astype(np.int32),
        temperature=np.ones(length, np.float32),
        turn=np.where(sampled, 0, -1).astype(np.int16),
        sample_id=name,
        trajectory_id=name,
        provenances=(
            Provenance(engine="probe", logprobs_mode="processed", sampling=SamplingParams(temperature=1.0)),
        ),
    )


def probe_batch(
    samples: Sequence[Sample], *, layout: Layout, model: nn.Module, padding: Padding = DEFAULT_PADDING
) -> Batch:
    """The samples collated, on the device of the model's input embedding."""
    return collate(samples, layout=layout, padding=padding).to(input_weight(model).device)


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """No gradient and no dropout; every module's own mode is put back after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def computing_dtypes(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Within, collects the dtypes that the model's linear layers give, beside that of its embedding.

    Neither weights nor logits tell it under autocast or FSDP's mixed precision, which cast on the way.
    """
    dtypes = {input_weight(model).dtype}

    def note(module: nn.Module, args: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            dtypes.add(output.dtype)

    handles = [
        module.register_forward_hook(note) for module in model.modules() if isinstance(module, nn.Linear)
    ]
    try:
        yield dtypes
    finally:
        for handle in handles:
            handle.remove()
