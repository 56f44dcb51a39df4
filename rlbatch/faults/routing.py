"""Faults of recorded routed experts; samples without any offer no place for them."""

from dataclasses import replace

import numpy as np

from rlbatch.faults.planting import Fault
from rlbatch.records import Sample

MIN_PREFIX = 12
"""Rows that a second turn says again, at least: fewer would prove nothing."""


def _routing_shape(sample: Sample, rng: np.random.Generator) -> Sample:
    if sample.routed_experts is None:
        return sample
    # Read as [T-1, K, L]; where both are equal nobody could tell.
    rows, layers, choices = sample.routed_experts.shape
    if layers == choices:
        return sample
    swapped = sample.routed_experts.reshape(rows, choices, layers)
    distinct = np.sort(swapped, axis=2)
    shows = (distinct[..., 1:] == distinct[..., :-1]).any()
    return replace(sample, routed_experts=swapped) if shows else sample


def _routing_missing(sample: Sample, rng: np.random.Generator) -> Sample:
    if sample.routed_experts is None or sample.routed_experts.shape[2] < 2:
        return sample
    # One row at a turn's edge, the prompt's rows, or the completion's.
    first = int(np.argmax(sample.turn >= 0)) if (sample.turn >= 0).any() else 1
    rows = [slice(first, first + 1), slice(0, first), slice(first, None)][int(rng.integers(3))]
    experts = sample.routed_experts.copy()
    if not experts[rows].any(axis=(1, 2)).any():
        return sample
    experts[rows] = 0
    return replace(sample, routed_experts=experts)


def _routing_repeated(sample: Sample, rng: np.random.Generator) -> Sample:
    experts = sample.routed_experts
    if experts is None or len(experts) < 2 * MIN_PREFIX:
        return sample
    start = int(rng.integers(MIN_PREFIX, len(experts) - MIN_PREFIX + 1))
    repeated = np.concatenate([experts[:start], experts])[: len(experts)]
    return replace(sample, routed_experts=repeated)


ROUTING = (
    Fault(
        code="routing-shape",
        story="Layers and choices were swapped on the way.",
        corrupt=_routing_shape,
    ),
    Fault(
        code="routing-missing",
        story="Rows that the engine did not send were filled with zeros.",
        corrupt=_routing_missing,
    ),
    Fault(
        code="routing-repeated",
        story="The rows of a second turn, which begin at token 0 again, were appended whole.",
        corrupt=_routing_repeated,
    ),
)
