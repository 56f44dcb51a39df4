"""A prompt that engine and trainer do not share: cut, told twice, or of another template."""

from dataclasses import replace
from typing import Any

import numpy as np

from rlbatch.faults.planting import Fault, long_segments
from rlbatch.records import TOKEN_FIELDS, Sample

SHOWS_IN = 16
"""Tokens of a turn in which it shows that the differences fade."""
MOST_TOKENS = 32
"""Prompt tokens that differ, at most: those of a header or of a short system prompt."""


def _prefix_differs(sample: Sample, rng: np.random.Generator) -> Sample:
    # What differs is at the head of the prompt: the question itself is the same on both sides.
    sampled = np.flatnonzero(sample.turn >= 0)
    num_prompt = int(sampled[0]) if len(sampled) else 0
    kind = str(rng.choice(["lost", "doubled", "other"]))
    if num_prompt < 3 or not long_segments(sample, min_length=SHOWS_IN):
        return sample
    count = int(rng.integers(1, min(num_prompt - 1, MOST_TOKENS)))
    if kind == "other":
        # The first token is the BOS, or where every template begins.
        head = sample.token_ids[1 : count + 1]
        others = np.setdiff1d(sample.token_ids, head)
        if not len(others):
            return sample
        ids = sample.token_ids.copy()
        ids[1 : count + 1] = rng.choice(others, count)
        return replace(sample, token_ids=ids)
    columns: dict[str, Any] = {}
    for name in [*(spec.name for spec in TOKEN_FIELDS), "routed_experts"]:
        own = getattr(sample, name)
        if own is not None:
            columns[name] = own[count:] if kind == "lost" else np.concatenate([own[:count], own])
    return replace(sample, **columns)


PREFIXES = (
    Fault(
        code="prefix-differs",
        story="The engine put a BOS in front of the prompt, or the trainer cut it, or has another template.",
        corrupt=_prefix_differs,
        alike=True,
        rescored=True,
    ),
)
