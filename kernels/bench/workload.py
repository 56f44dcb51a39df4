"""Trajectories such as RL trains on: lengths from a log-normal, every field filled."""

import numpy as np
from numpy.typing import NDArray

from rlbatch.records import Provenance, Sample, SamplingParams

MEAN_LENGTH = 2000
MAX_LENGTH = 16_384
SPREAD = 1.0
"""Standard deviation of the logarithm: the longest hundredth is above 12,000 tokens."""

VOCAB_SIZE = 150_000
PROVENANCE = Provenance(
    engine="vllm",
    logprobs_mode="processed",
    sampling=SamplingParams(temperature=1.0),
    vocab_size=VOCAB_SIZE,
)


def lengths(count: int, seed: int = 0) -> NDArray[np.int64]:
    """[count] tokens of each trajectory, prompt included."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD, count)
    return np.clip(drawn, 16, MAX_LENGTH).astype(np.int64)


def trajectories(count: int, seed: int = 0, *, first: int = 0) -> list[Sample]:
    """Samples of two turns each, with all fields that every sample has; numbered from `first`."""
    rng = np.random.default_rng(seed)
    return [
        _sample(number, int(length), rng) for number, length in enumerate(lengths(count, seed), start=first)
    ]


def _sample(number: int, length: int, rng: np.random.Generator) -> Sample:
    turn = np.full(length, -1, np.int16)
    # A prompt, a first answer, a tool's reply, and a second answer to the end.
    turn[length // 8 : length // 2] = 0
    turn[length // 2 + length // 8 :] = 1
    sampled = turn >= 0
    return Sample(
        token_ids=rng.integers(0, VOCAB_SIZE, length, dtype=np.int32),
        inference_logprobs=np.where(sampled, -rng.exponential(1.0, length), np.nan).astype(np.float32),
        loss_mask=sampled,
        advantages=np.where(sampled, rng.normal(), 0).astype(np.float32),
        policy_version=np.where(sampled, 3, -1).astype(np.int32),
        temperature=np.ones(length, np.float32),
        turn=turn,
        sample_id=f"task/{number // 8}#{number % 8}.0",
        trajectory_id=f"task/{number // 8}#{number % 8}",
        group_id=f"task/{number // 8}",
        reward=float(rng.integers(0, 2)),
        provenances=(PROVENANCE, PROVENANCE),
        finish_reasons=("tool_calls", "stop"),
    )
