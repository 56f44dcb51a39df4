"""Fireworks' record of routed experts: a matrix a token inside the reply, or files of its own trainer.

    content[].routing_matrix    base64 of [L, K]: the experts of the pass that drew this token, which is the
                                pass over the token before it; empty where there is none
    routing_references          names of files: never fetched, and refused

C drawn tokens have the rows from the prompt's last token on; with an echo come the rows of the prompt. A
matrix says neither L nor K, so the provenance has to; how wide an expert is follows from the length. Knows
nothing of ids.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from rlbatch.engines.fireworks_reply import Body, Choice, places_of
from rlbatch.engines.refusals import refusal
from rlbatch.engines.routing import base64_bytes
from rlbatch.errors import ReplyError

_DTYPES: Mapping[int, np.dtype[np.integer]] = MappingProxyType(
    {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.int32)}
)
"""By the bytes of one expert: the only dtypes that a turn holds."""

_WANTED = "base64 of one matrix [layers, experts a token] for each token: uint8, uint16 or int32"


def read_matrices(
    body: Body,
    choice: Choice,
    *,
    shape: tuple[int, int] | None,
    num_prompt: int,
    num_echoed: int,
    num_ids: int,
) -> tuple[NDArray[np.integer] | None, int]:
    """[rows, L, K] and the token whose pass is the first row; None and 0 where the reply has no routing data.

    Args:
        body: the reply, which may have references.
        choice: one choice of it.
        shape: (layers, experts a token), as the provenance says; None where it does not.
        num_prompt: tokens of the prompt.
        num_echoed: tokens of the prompt that the choice repeats in front.
        num_ids: tokens of the choice, those included.

    Raises:
        ReplyError: routing-unreadable, routed-experts-malformed, routed-experts-mismatch or
            statement-contradicted.

    Example:
        prompt of 4, 5 drawn, 5 matrices -> 5 rows from token 3 on; all 4 echoed, 8 matrices -> from token 0
    """
    texts = _texts(choice)
    if choice.routing_references is not None or body.routing_references is not None:
        raise _reference_refusal(choice, len(texts))
    num_blank = next((at for at, text in enumerate(texts) if text), len(texts))
    start = num_prompt - num_echoed + num_blank - 1
    if num_blank == len(texts):
        return None, 0
    if shape is None:
        raise refusal(
            "routing-unreadable",
            "the layers and experts a token of encoded matrices",
            f"{choice.label}: {len(texts) - num_blank} of them, and a provenance without routing_shape",
        )
    if len(texts) != num_ids or num_blank > num_echoed or start < 0 or not all(texts[num_blank:]):
        found = (
            f"{choice.label}: {sum(map(bool, texts))} matrices for {num_ids} ids, {num_echoed} of them echoed"
        )
        raise refusal("routed-experts-mismatch", "a matrix for each pass that drew a token", found)
    return _rows(choice.label, texts[num_blank:], shape), start


def _texts(choice: Choice) -> list[str]:
    """The matrices as they came, one a token, wherever the choice has any."""
    said = [
        [entry.routing_matrix or "" for entry in logprobs.content or ()]
        for logprobs in places_of(choice).values()
    ]
    given = [texts for texts in said if any(texts)]
    if any(texts != given[0] for texts in given):
        found = f"{choice.label}: two places with other matrices"
        raise refusal("statement-contradicted", "the same matrices wherever a reply has them", found)
    return given[0] if given else []


def _rows(label: str, texts: Sequence[str], shape: tuple[int, int]) -> NDArray[np.integer]:
    num_layers, num_experts = shape
    parts = [base64_bytes(text, label=label, expected=_WANTED) for text in texts]
    sizes = {len(part) for part in parts}
    dtype = _DTYPES.get(min(sizes) // (num_layers * num_experts))
    if dtype is None or sizes != {num_layers * num_experts * dtype.itemsize}:
        shown = ", ".join(map(str, sorted(sizes)[:3]))
        raise _malformed(label, f"matrices of {shown} bytes for {num_layers} x {num_experts} experts")
    flat = np.frombuffer(b"".join(parts), dtype.newbyteorder("<"))
    rows = flat.reshape(-1, num_layers, num_experts).astype(dtype)
    if int(rows.min()) < 0:
        raise _malformed(label, "a negative expert")
    return rows


def _reference_refusal(choice: Choice, num_inline: int) -> ReplyError:
    if num_inline:
        found = f"{choice.label}: {num_inline} matrices inline, and references"
        return refusal("statement-contradicted", "routing data inline or by reference, not both", found)
    return refusal(
        "routing-unreadable",
        "routing data inside the reply, or none",
        f"{choice.label}: references to files, which are not fetched",
    )


def _malformed(label: str, found: str) -> ReplyError:
    return refusal("routed-experts-malformed", _WANTED, f"{label}: {found}")
