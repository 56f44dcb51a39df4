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
    # A BOS that is known stays: to lose or to double it shows without a trainer, and has codes of its own.
    stated = {item.bos_token_id for item in sample.provenances}
    first = 1 if kind == "other" or int(sample.token_ids[0]) in stated else 0
    if kind == "other":
        others = np.setdiff1d(sample.token_ids, sample.token_ids[: first + count])
        if not len(others):
            return sample
        ids = sample.token_ids.copy()
        ids[first : first + count] = rng.choice(others, count)
        return replace(sample, token_ids=ids)
    columns: dict[str, Any] = {}
    for name in [*(spec.name for spec in TOKEN_FIELDS), "routed_experts"]:
        own = getattr(sample, name)
        if own is not None:
            behind = own[first + count :] if kind == "lost" else own[first:]
            before = own[:first] if kind == "lost" else own[: first + count]
            columns[name] = np.concatenate([before, behind])
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
