"""Clean steps made from clean rows: batches of their shape, whose tokens come in blocks from all of them.

A block brings the engine's and the trainer's logprobs of neighbouring sampled tokens. Nothing is scored, and
a shape is collated once for many steps: a million rows take minutes.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlbatch.batch import Batch
from rlbatch.collate import collate
from rlbatch.faults import Scored

BLOCK_TOKENS = 16
"""Neighbouring tokens that stay together: noise of neighbours is not independent."""
STEPS_A_SHAPE = 16
"""Steps that have the same rows' lengths and provenances, each with values of its own."""

Step: TypeAlias = tuple[Batch, Tensor]
"""A packed batch, and trainer logprobs [1, T] float64 of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Values of clean rows, one row after another."""

    pairs: NDArray[np.float64]
    """[N, 2] the engine's and the trainer's logprob of each sampled token, nats."""
    starts: NDArray[np.int64]
    """Where blocks may begin: not across the end of a row, unless the row is shorter than a block."""

    @classmethod
    def of(cls, rows: Sequence[Scored]) -> "Blocks":
        """All sampled tokens of the rows."""
        parts = [_sampled_pairs(row) for row in rows]
        before = np.cumsum([0, *map(len, parts)])
        starts = [
            np.arange(max(1, len(part) - BLOCK_TOKENS + 1)) + first
            for part, first in zip(parts, before, strict=False)
        ]
        return cls(np.concatenate(parts), np.concatenate(starts))

    def drawn(self, lengths: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
        """[sum of lengths, 2]; each of the rows begins with a block of its own."""
        num_blocks = -(-lengths // BLOCK_TOKENS)
        chosen = self.starts[rng.integers(len(self.starts), size=int(num_blocks.sum()))]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        block = np.repeat(np.cumsum(num_blocks) - num_blocks, lengths) + within // BLOCK_TOKENS
        at = np.minimum(chosen[block] + within % BLOCK_TOKENS, len(self.pairs) - 1)
        return self.pairs[at]


def bootstrapped(rows: Sequence[Scored], *, num_rows: int, step_rows: int) -> Iterator[Step]:
    """Steps of `step_rows` rows, at least `num_rows` in all, of each engine as many as among `rows`."""
    rng = np.random.default_rng(zlib.crc32(b"bootstrap"))
    for _, own in sorted(_by_engine(rows).items()):
        blocks = Blocks.of(own)
        num_steps = -(-num_rows * len(own) // (len(rows) * step_rows))
        for first in range(0, num_steps, STEPS_A_SHAPE):
            chosen = rng.integers(len(own), size=step_rows)
            shape = collate([own[index].sample for index in chosen], layout="packed")
            for _ in range(min(STEPS_A_SHAPE, num_steps - first)):
                yield _with_values(shape, blocks, rng)


def _with_values(shape: Batch, blocks: Blocks, rng: np.random.Generator) -> Step:
    """The batch with other values at its sampled positions."""
    lengths = np.array([part.stop - part.start for part in shape.host_segments])
    starts = np.array([part.start for part in shape.host_segments])
    at = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
    values = torch.from_numpy(blocks.drawn(lengths, rng))
    inference = torch.full_like(shape.inference_logprobs, torch.nan)
    trainer = torch.zeros(shape.shape, dtype=torch.float64)
    inference[0, at] = values[:, 0].float()
    trainer[0, at] = values[:, 1]
    return replace(shape, inference_logprobs=inference, buffer=None), trainer


def _by_engine(rows: Sequence[Scored]) -> dict[str, list[Scored]]:
    """Rows by the dtype of the engine that sampled them."""
    groups: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        groups[str(row.sample.provenances[0].dtype)].append(row)
    return groups


def _sampled_pairs(row: Scored) -> NDArray[np.float64]:
    """[N, 2] the engine's and the trainer's logprobs of sampled tokens."""
    sampled = row.sample.turn >= 0
    return np.stack([row.sample.inference_logprobs[sampled], row.trainer_logprobs[sampled]], axis=1)
