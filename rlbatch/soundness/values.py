"""What an engine's logprob of a sampled token cannot be: one table, for samples and for batches alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.records import TOKEN_FIELDS

POSITIVE_TOLERANCE = 1e-3
"""Nats above 0 that rounding explains: an engine's bf16 log-sum-exp of a certain token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFault:
    """One kind of impossible value."""

    code: str
    test: Callable[[NDArray[np.floating[Any]]], NDArray[np.bool_]]
    """[N] values -> [N], True where the value is of this kind."""
    expected: str


SENTINEL_AT = -9000.0
"""Nats from which down a value is a marker: vLLM's -9999.0; no float32 softmax over real logits gives it."""


def _is_sentinel(values: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    marker: NDArray[np.bool_] = (values <= SENTINEL_AT) & np.isfinite(values)
    return marker


def _is_positive(values: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    positive: NDArray[np.bool_] = (values > POSITIVE_TOLERANCE) & np.isfinite(values)
    return positive


VALUE_FAULTS: tuple[ValueFault, ...] = (
    ValueFault(code="logprob-missing", test=np.isnan, expected="a logprob for each sampled token"),
    ValueFault(code="logprob-not-finite", test=np.isinf, expected="finite logprobs"),
    ValueFault(code="logprob-sentinel", test=_is_sentinel, expected="logprobs, not markers"),
    ValueFault(code="logprob-positive", test=_is_positive, expected="logprobs of at most 0"),
)
"""In order of precedence; no value is of two kinds."""


OTHER_LOGPROBS = tuple(spec.name for spec in TOKEN_FIELDS if spec.optional)
"""Fields of logprobs of the sampled tokens beside the behaviour logprobs."""


MIN_SIGNS = 4
"""Values above 0 by which losses are told from logits."""

USUAL_MEDIAN_LOSS = 4.0
"""Nats: half of all sampled tokens are likelier than exp(-4); half of all logits are not below 4."""

MAX_MEDIAN_LOSS = 9.0
"""Nats: at high temperatures, for turns that have a likely token among the others too."""

LIKELY_LOSS = 0.7
"""Nats: a token likelier than a half; hardly any logit of a sampled token is so small."""


def positive_code(values: NDArray[np.floating[Any]]) -> str:
    """What a turn with positive values has in place of logprobs.

    Args:
        values: [N] nats, all finite ones of the turn.

    Returns:
        `sign-flipped` where all are losses, minus the logprobs; else `logprob-positive`.

    Example:
        [0.1, 2.3, 0.0, 0.9, 0.4] -> sign-flipped; [14.2, 9.8, 17.1, 12.0] -> logprob-positive
    """
    above = int(np.count_nonzero(values > POSITIVE_TOLERANCE))
    if above < MIN_SIGNS or float(values.min()) < -POSITIVE_TOLERANCE:
        return "logprob-positive"
    median, least = float(np.median(values)), float(values.min())
    if median < USUAL_MEDIAN_LOSS or (median < MAX_MEDIAN_LOSS and least < LIKELY_LOSS):
        return "sign-flipped"
    return "logprob-positive"


def found_text(values: NDArray[np.floating[Any]], bad: NDArray[np.intp], first_token: int) -> str:
    """The first bad value with its token, and how many there are.

    Example:
        values [-0.5, 3.0, 2.0], bad [1, 2], first token 4 -> "3 at token 5, 2 of 3 tokens"
    """
    at = int(bad[0])
    return f"{float(values[at]):.6g} at token {first_token + at}, {len(bad)} of {len(values)} tokens"
