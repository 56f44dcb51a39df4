"""A user's program, type-checked against the installed wheel (`mypy --strict`), never run.

It names the types of what it gets: were one of them `Any`, or the wheel without `py.typed`, the check would
fail.
"""

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor

import rlbatch_kernels
from rlbatch import Provenance, Sample, SamplingParams, Trajectory, Turn
from rlbatch.alignment import Alignment, require_aligned
from rlbatch.assemble import to_samples
from rlbatch.batch import Batch
from rlbatch.engines import parse_response
from rlbatch.errors import AlignmentError, Finding
from rlbatch.loader import RolloutLoader
from rlbatch.scoring import load_model, trainer_logprobs
from rlbatch.storage import write_shard


def store(reply: bytes, path: Path) -> None:
    """From an engine's reply to a shard."""
    provenance = Provenance(
        engine="vllm", logprobs_mode="processed", sampling=SamplingParams(temperature=1.0)
    )
    turns = parse_response(reply, provenance=provenance)
    assert_type(turns, list[Turn])
    trajectory = Trajectory(trajectory_id="0", turns=tuple(turns), reward=1.0, advantage=0.5)
    samples = to_samples(trajectory, {"default": 3})
    assert_type(samples, list[Sample])
    write_shard(path, samples)


def loss_of(shards: Path, model_dir: Path, version: int) -> list[Tensor]:
    """From shards to a loss that only aligned batches reach."""
    model = load_model(model_dir, device=torch.device("cpu"), dtype=torch.float32)
    losses = []
    for batch in RolloutLoader(shards, layout="packed", max_tokens=4096):
        assert_type(batch, Batch)
        logprobs = trainer_logprobs(model, batch)
        assert_type(logprobs, Tensor)
        alignment = require_aligned(batch, logprobs, trainer_version=version)
        assert_type(alignment, Alignment)
        losses.append(-(alignment.ratio * batch.advantages).sum() / batch.num_loss_tokens)
    return losses


def explain(error: AlignmentError) -> tuple[Finding, ...]:
    """What an error holds."""
    return error.findings


def ratio_of(trainer: Tensor, inference: Tensor, mask: Tensor) -> Tensor:
    """The kernels are typed as well."""
    return rlbatch_kernels.policy_ratio(trainer, inference, mask).ratio
