"""`TOKEN_FIELDS`: the one list of per-token fields. Checks, storage, collation and dialects loop over it."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

Align: TypeAlias = Literal["input", "target"]

UNKNOWN_VERSION = -1
"""`policy_version` where nobody sampled the token, or nobody knows with which weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenField:
    """One per-token field of a `Sample`: entry t is about token t."""

    name: str
    dtype: np.dtype[Any]
    not_sampled: float | None
    """Value at tokens that the engine did not sample; None where every token has one."""
    padding: float
    """Value in padding, and where collation leaves no target."""
    align: Align
    """`target`: collation moves it to the position that predicts the token; `input`: it stays."""
    optional: bool = False


def _field(
    name: str, dtype: str, not_sampled: float | None, align: Align, optional: bool = False
) -> TokenField:
    padding = 0 if not_sampled is None else not_sampled
    return TokenField(
        name=name,
        dtype=np.dtype(dtype),
        not_sampled=not_sampled,
        padding=padding,
        align=align,
        optional=optional,
    )


NAN = float("nan")
TOKEN_FIELDS: tuple[TokenField, ...] = (
    _field("token_ids", "int32", None, "input"),
    _field("inference_logprobs", "float32", NAN, "target"),
    _field("loss_mask", "bool", 0, "target"),
    _field("advantages", "float32", 0, "target"),
    _field("policy_version", "int32", UNKNOWN_VERSION, "target"),
    _field("temperature", "float32", 1, "target"),
    _field("turn", "int16", -1, "target"),
    _field("raw_inference_logprobs", "float32", NAN, "target", optional=True),
    _field("teacher_logprobs", "float32", NAN, "target", optional=True),
    _field("ref_logprobs", "float32", NAN, "target", optional=True),
    _field("proximal_logprobs", "float32", NAN, "target", optional=True),
)
"""In the order of storage; the optional ones are None where a sample has none."""
