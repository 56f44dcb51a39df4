"""Stores for the loader's tests: small samples that can be told apart by every value."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from builders import sample

from rlbatch.batch import Batch
from rlbatch.records import Sample
from rlbatch.storage import open_writer


def numbered(number: int, *, length: int = 6, version: int = 0, **changes) -> Sample:
    """A sample of one turn whose ids begin with its number."""
    ids = [(number * 7 + at) % 90 + 1 for at in range(length - 2)]
    logprobs = [-(at + 1) / (number + 9) for at in range(length - 2)]
    fields = {"trajectory_id": f"t{number}", "group_id": f"g{number // 2}", "advantage": number / 8}
    made = sample([number % 100, 5], ids, logprobs, **fields | changes)
    return _drawn_by(made, version)


def _drawn_by(made: Sample, version: int) -> Sample:
    versions = np.where(made.turn >= 0, np.int32(version), np.int32(-1)).astype(np.int32)
    return replace(made, policy_version=versions)


def numbered_samples(count: int, *, seed: int = 0) -> list[Sample]:
    """Samples of 3 to 20 tokens."""
    rng = np.random.default_rng(seed)
    return [numbered(number, length=int(rng.integers(3, 21))) for number in range(count)]


def write_store(directory: Path, samples: Sequence[Sample], *, max_samples: int = 10) -> Path:
    with open_writer(directory, max_samples=max_samples) as writer:
        for each in samples:
            writer.append(each)
    return directory


def names_in(batches: Sequence[Batch]) -> list[str]:
    """Trajectory ids of what is trained, in order; fillers have none."""
    return [ref.trajectory_id for batch in batches for ref in batch.refs if ref.path is not None]


def each_once(batches: Sequence[Batch], samples: Sequence[Sample]) -> bool:
    return Counter(names_in(batches)) == Counter(made.trajectory_id for made in samples)


def same_bits(a: Batch, b: Batch) -> bool:
    """Whether every tensor is the same bit for bit, NaN included, and so is what no tensor says."""
    tensors = [
        (getattr(a, name), getattr(b, name))
        for name in a.__dataclass_fields__
        if isinstance(getattr(a, name), torch.Tensor) and name != "buffer"
    ]
    bits = all(
        x.dtype == y.dtype and x.shape == y.shape and x.numpy().tobytes() == y.numpy().tobytes()
        for x, y in tensors
    )
    return bits and len(tensors) > 8 and a.refs == b.refs and a.step == b.step


def through_json(state: dict) -> dict:
    """A state as a checkpoint gives it back."""
    return json.loads(json.dumps(state))
