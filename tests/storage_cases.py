"""Samples for the storage tests, made by hand; torch-free, since processes that are killed use it too."""

import dataclasses

import numpy as np

from rlbatch.records import Provenance, Sample, SamplingParams

PROCESSED = Provenance(
    engine="vllm",
    engine_version="0.32.0",
    logprobs_mode="processed",
    sampling=SamplingParams(temperature=0.7),
    vocab_size=128,
    eos_token_ids=(2, 7),
)
RAW = Provenance(engine="vllm", logprobs_mode="raw", sampling=SamplingParams(temperature=1, top_k=20))


def plain_sample(number: int, *, num_tokens: int = 6) -> Sample:
    """A sample of one turn, told from others by `number` in every value that can differ."""
    tokens = np.arange(num_tokens, dtype=np.int32)
    sampled = tokens >= max(1, num_tokens // 2)
    logprobs = -(tokens + 1).astype(np.float32) / (8 + number)
    return Sample(
        token_ids=(tokens * 31 + number) % 128,
        inference_logprobs=np.where(sampled, logprobs, np.float32("nan")),
        loss_mask=sampled,
        advantages=np.where(sampled, np.float32(number) - np.float32(0.5), np.float32(0)),
        policy_version=np.where(sampled, np.int32(number), np.int32(-1)),
        temperature=np.where(sampled, np.float32(0.7), np.float32(1)),
        turn=np.where(sampled, np.int16(0), np.int16(-1)),
        sample_id=f"task/{number}#0.0",
        trajectory_id=f"task/{number}#0",
        group_id=f"task/{number}",
        reward=number / 4,
        provenances=(PROCESSED,),
        finish_reasons=("stop",),
    )


def varied_samples() -> list[Sample]:
    """Four samples that differ in what is there at all: the smallest set that uses every array of a shard."""
    plain = plain_sample(3)
    two_turns = dataclasses.replace(
        plain_sample(1, num_tokens=5),
        turn=np.array([-1, 0, -1, 1, 1], np.int16),
        raw_inference_logprobs=np.array([np.nan, -1, np.nan, -2, -0.0], np.float32),
        provenances=(PROCESSED, RAW),
        finish_reasons=("tool_calls", None),
        stop_reasons=("</s>", 2),
        sibling=1,
        num_siblings=2,
    )
    bare = dataclasses.replace(
        plain_sample(2, num_tokens=1),
        group_id=None,
        reward=None,
        finish_reasons=(),
        sample_id="2",
        trajectory_id="2",
    )
    foreign = dataclasses.replace(
        plain_sample(4, num_tokens=3),
        sample_id="задача/四#🙂",
        group_id="",
        reward=float("-inf"),
        teacher_logprobs=np.array([np.nan, -0.5, -0.25], np.float32),
        ref_logprobs=np.array([np.nan, -0.5, -0.125], np.float32),
        proximal_logprobs=np.array([np.nan, -0.5, -0.0625], np.float32),
        provenances=(RAW,),
    )
    return [plain, two_turns, bare, foreign]
