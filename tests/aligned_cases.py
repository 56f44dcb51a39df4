"""Batches with logits of their own: the trainer's are drawn here, and an engine samples from them.

Everything is float64 numpy with plain log_softmax, and owes nothing to the library.
"""

from dataclasses import dataclass

import numpy as np
import torch
from builders import provenance, sample

from rlbatch.alignment import Judge, measure
from rlbatch.collate import collate
from rlbatch.records import SamplingParams

PROMPT = [1, 5, 9]
VOCAB_SIZE = 96


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass
class Row:
    """One completion: `logits` [C, V] predict its tokens; the trainer has them, the engine had them too."""

    ids: np.ndarray
    logits: np.ndarray
    inference: np.ndarray
    trainer: np.ndarray


def drawn(num_tokens, seed, *, temperature=1.0, noise=0.0, kept=None):
    """A row of tokens drawn from the engine's logits at a temperature; the trainer's have noise on top.

    Args:
        num_tokens: of the completion.
        seed: decides all.
        temperature: of both.
        noise: spread of the difference between the trainer's and the engine's logits.
        kept: how many of the most probable ids are drawn from; inference values are renormalised over them.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2.5, (num_tokens, VOCAB_SIZE))
    # Every third position is nearly certain, as in real text.
    logits[::3, 7] += 12
    logprobs = log_softmax(logits / temperature)
    if kept is not None:
        floor = np.sort(logprobs, axis=1)[:, -kept][:, None]
        logprobs = log_softmax(np.where(logprobs >= floor, logprobs, -np.inf))
    ids = np.array([rng.choice(VOCAB_SIZE, p=np.exp(each)) for each in logprobs])
    at = np.arange(num_tokens), ids
    noisy = logits + noise * rng.normal(size=logits.shape)
    return Row(ids, noisy, logprobs[at], log_softmax(noisy / temperature)[at])


def samples_of(rows, *, temperature=1.0, **changes):
    how = provenance(sampling=SamplingParams(temperature=temperature), vocab_size=VOCAB_SIZE)
    return [
        sample(PROMPT, row.ids.tolist(), row.inference, provenance=how, trajectory_id=f"row{at}", **changes)
        for at, row in enumerate(rows)
    ]


def batch_of(rows, *, layout="padded", temperature=1.0, **changes):
    """The batch, and [B, T] trainer logprobs of its rows."""
    batch = collate(samples_of(rows, temperature=temperature, **changes), layout=layout)
    trainer = torch.zeros(batch.shape, dtype=torch.float64)
    for segment, row in zip(batch.host_segments, rows, strict=True):
        trainer[segment.row, segment.start : segment.stop] = torch.from_numpy(row.trainer)
    return batch, trainer


def logits_of(rows):
    """A callback that knows the rows' logits; it counts what it is asked."""

    def answer(batch, index, start, stop):
        first = batch.host_segments[index].start
        return torch.from_numpy(rows[index].logits[start - first : stop - first])

    return answer


def judged(rows, *, logits=True, trainer_version=None, **how):
    """The verdict on rows; `logits` may be a callback of the caller's own."""
    asked = logits_of(rows) if logits is True else (logits or None)
    judge = Judge(trainer_version=trainer_version, logits_for=asked)
    judge.add(measure(*batch_of(rows, **how)))
    return judge.verdict()


def judged_in_turn(*parts, logits=True):
    """The verdict on a step of several batches of rows."""
    batches = [batch_of(rows) for rows in parts]

    def answer(batch, index, start, stop):
        rows = next(part for part, (each, _) in zip(parts, batches, strict=True) if each is batch)
        return logits_of(rows)(batch, index, start, stop)

    judge = Judge(trainer_version=None, logits_for=answer if logits else None)
    for number, (batch, trainer) in enumerate(batches):
        judge.add(measure(batch, trainer, number=number))
    return judge.verdict()


def told(verdict):
    return [found.code for found in verdict.findings]
