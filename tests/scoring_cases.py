"""Tiny models, samples and the float64 truth that the tests of scoring share."""

import copy
from itertools import pairwise

import numpy as np
import torch
import transformers

from rlbatch.records import Provenance, Sample, SamplingParams

VOCAB_SIZE = 96
LENGTHS = (13, 5, 9)
TEMPERATURES = (1.0, 0.7, 1.3)

# Large weights, strong transforms and a short window: what is small by default would not show in the tests.
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "gemma2": lambda: transformers.Gemma2Config(
        **_SIZES, head_dim=8, final_logit_softcapping=5.0, sliding_window=4
    ),
    "cohere": lambda: transformers.CohereConfig(**_SIZES, logit_scale=0.3),
    "granite": lambda: transformers.GraniteConfig(**_SIZES, logits_scaling=4.0),
}
# transformers 5.24 has no sdpa for Gemma 2.
CASES = [
    (name, attention)
    for name in CONFIGS
    for attention in ("eager", "sdpa")
    if (name, attention) != ("gemma2", "sdpa")
]


def tiny_model(name, *, attention="eager", cls=None, **changes):
    """A small model with random weights, the same each time; `cls` is a subclass of its usual class."""
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    usual = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if cls is None:
        return usual.eval()
    model = cls(usual.config)
    model.load_state_dict(usual.state_dict())
    return model.eval()


def make_samples(lengths=LENGTHS, *, seed=0, temperatures=TEMPERATURES):
    """Random ids; the first two tokens are the prompt."""
    rng = np.random.default_rng(seed)
    return [
        make_sample(
            rng.integers(0, VOCAB_SIZE, length), num_prompt=2, temperature=temperature, name=f"s{length}"
        )
        for length, temperature in zip(lengths, temperatures, strict=True)
    ]


def make_sample(ids, *, num_prompt, temperature=1.0, name="s", logprobs=None):
    """One turn: `num_prompt` tokens, then sampled ones, all of them trained."""
    ids = np.asarray(ids, np.int32)
    sampled = np.arange(len(ids)) >= num_prompt
    inference = np.full(len(ids), np.nan, np.float32)
    inference[num_prompt:] = -1.0 if logprobs is None else logprobs
    return Sample(
        token_ids=ids,
        inference_logprobs=inference,
        loss_mask=sampled,
        advantages=np.zeros(len(ids), np.float32),
        policy_version=np.where(sampled, 0, -1).astype(np.int32),
        temperature=np.where(sampled, temperature, 1).astype(np.float32),
        turn=np.where(sampled, 0, -1).astype(np.int16),
        sample_id=name,
        trajectory_id=name,
        provenances=(
            Provenance(
                engine="test", logprobs_mode="processed", sampling=SamplingParams(temperature=temperature)
            ),
        ),
    )


def true_logprobs(model, sample):
    """[T] float64 nats of each token given those before it, 0 where untrained.

    By a float64 copy of the model, called on the sequence alone in the plainest way.
    """
    double = copy.deepcopy(model).double()
    ids = token_ids(sample).to(double.device)
    with torch.no_grad():
        logits = double(ids[None]).logits[0].double()
    temperature = torch.tensor(sample.temperature.tolist(), dtype=torch.float64, device=ids.device)
    logprobs = torch.log_softmax(logits[:-1] / temperature[1:, None], dim=-1)
    out = torch.zeros(len(sample), dtype=torch.float64)
    out[1:] = logprobs.gather(1, ids[1:, None])[:, 0].cpu()
    return out * torch.tensor(sample.loss_mask.tolist())


def token_ids(sample):
    """[T] int64."""
    return torch.tensor(sample.token_ids.tolist())


def by_sample(batch, values):
    """[T] of each sample, in its own tokens, from [B, T]: batch position t is about token t + 1."""
    out = []
    for row, start, length in places(batch):
        own = torch.zeros(length, dtype=torch.float64)
        own[1:] = values[row, start : start + length - 1].double().cpu()
        out.append(own)
    return out


def places(batch):
    """(row, start, length) of each sequence, from cu_seqlens or the attention mask."""
    if batch.cu_seqlens is not None:
        edges = batch.cu_seqlens.tolist()
        return [(0, start, stop - start) for start, stop in pairwise(edges)]
    return [(row, mask.index(True), sum(mask)) for row, mask in enumerate(batch.attention_mask.tolist())]


def leaking_llama():
    """A Llama that always makes a cache: it then attends across packed sequences."""

    class LeakingLlama(transformers.LlamaForCausalLM):
        def forward(self, *args, use_cache=None, **kwargs):
            return super().forward(*args, use_cache=True, **kwargs)

    return LeakingLlama
