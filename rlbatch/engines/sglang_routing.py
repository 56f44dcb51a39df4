"""SGLang's record of routed experts: base64 of a flat int32 buffer, whose shape the provenance has to say.

    [P + C - 1 - start, L, K]     row t is the pass over token start + t, which predicts the next one

The reply says neither L nor K, and a product does not tell them apart; `start` is the request's
`routed_experts_start_len`, or follows from the count. Knows nothing of the rest of a reply.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlbatch.engines.refusals import refusal
from rlbatch.engines.routing import base64_bytes, routing_start
from rlbatch.errors import ReplyError

_WANTED = "base64 of int32 rows [layers, experts a token], none negative"

_ITEM_SIZE = np.dtype(np.int32).itemsize


def read_flat_routing(
    value: object,
    *,
    label: str,
    shape: tuple[int, int] | None,
    num_prompt: int,
    num_completion: int,
    request: Mapping[str, object] | None,
) -> tuple[NDArray[np.integer], int]:
    """[rows, L, K] int32 and the token of the first row.

    Args:
        value: base64 text.
        label: what findings call the choice.
        shape: (layers, experts a token), as the provenance says; None where it does not.
        num_prompt: tokens of the prompt.
        num_completion: sampled tokens.
        request: the request, where it is at hand.

    Raises:
        ReplyError: routing-unreadable, routed-experts-malformed or routed-experts-mismatch.
    """
    if shape is None:
        raise refusal(
            "routing-unreadable",
            "the layers and experts a token of a flat buffer",
            f"{label}: `routed_experts`, and a provenance without routing_shape",
            fix="state Provenance(routing_shape=(layers, experts a token)), or ask without routed experts",
        )
    rows = _rows(value, shape, label)
    named = (
        None if request is None else {"routed_experts_prompt_start": request.get("routed_experts_start_len")}
    )
    start = routing_start(
        len(rows), num_prompt=num_prompt, num_completion=num_completion, request=named, label=label
    )
    return rows, start


def _rows(value: object, shape: tuple[int, int], label: str) -> NDArray[np.int32]:
    """[rows, L, K] of the buffer, whose length is a whole number of rows."""
    num_layers, num_experts = shape
    raw = base64_bytes(value, label=label, expected=_WANTED)
    if not raw or len(raw) % (num_layers * num_experts * _ITEM_SIZE):
        raise _malformed(label, f"{len(raw)} bytes, no whole rows of {num_layers} x {num_experts}")
    rows = np.frombuffer(raw, np.dtype("<i4")).reshape(-1, num_layers, num_experts).astype(np.int32)
    if int(rows.min()) < 0:
        raise _malformed(label, "a negative expert")
    return rows


def _malformed(label: str, found: str) -> ReplyError:
    return refusal("routed-experts-malformed", _WANTED, f"{label}: {found}")
