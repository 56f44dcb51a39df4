"""The record of routed experts: base64 of an npy array, decoded without trust, and its place in the turn.

    [P + C - 1 - start, L, K]     row t is the pass over token t, which predicts token t + 1

The reply does not say `start`; the request does, or the count of the rows. Reads the one npy header that
numpy writes for such an array and no other, so that nothing in it is evaluated. Knows nothing of routes.
"""

import binascii
import re
from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import NDArray

from rlbatch.engines.refusals import refusal
from rlbatch.errors import ReplyError
from rlbatch.records import EXPERT_DTYPES

MAX_BASE64_CHARS = 256 * 2**20

_WANTED = "base64 of an npy array [rows, layers, experts a token]: uint8, uint16 or int32, none negative"

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([|<](?:u1|u2|i4))', 'fortran_order': False, "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n"
)


def read_routing(value: object, *, label: str) -> NDArray[np.integer] | None:
    """[rows, L, K] as the engine wrote it; None where the reply has none.

    Args:
        value: base64 text, an array (in process), or None.
        label: what a finding calls the choice.

    Raises:
        ReplyError: routed-experts-malformed.
    """
    if value is None:
        return None
    array = value if isinstance(value, np.ndarray) else _decode(value, label)
    if array.dtype not in EXPERT_DTYPES or array.ndim != 3 or 0 in array.shape[1:]:
        raise _malformed(label, f"{array.dtype} of shape {list(array.shape)}")
    if array.dtype.kind == "i" and array.size and int(array.min()) < 0:
        raise _malformed(label, "a negative expert")
    return np.ascontiguousarray(array)


def routing_start(
    num_rows: int,
    *,
    num_prompt: int,
    num_completion: int,
    request: Mapping[str, object] | None,
    label: str,
) -> int:
    """The token of the first row: what the request asked for, where it is at hand, else what the count says.

    Raises:
        ReplyError: routed-experts-mismatch, the rows are not those of the tokens from there on.

    Example:
        22 + 8 tokens, 29 rows -> 0; 19 rows and no request -> 10; 19 rows, a request without one: refused
    """
    num_passes = num_prompt + num_completion - 1
    counted = num_passes - num_rows
    asked = counted if request is None else request.get("routed_experts_prompt_start")
    # A request that names none gets the protocol's 0.
    start = 0 if asked is None else asked
    if type(start) is int and start == counted and 0 <= start <= num_prompt:
        return start
    said = "no request at hand" if request is None else f"routed_experts_prompt_start {_shown(asked)}"
    expected = f"a row for each of {num_passes} passes from the start on"
    found = f"{label}: {num_rows} rows for {num_prompt} + {num_completion} tokens; {said}"
    raise refusal("routed-experts-mismatch", expected, found)


def base64_bytes(value: object, *, label: str, expected: str) -> bytes:
    """What base64 text stands for; nothing in it is skipped.

    Raises:
        ReplyError: routed-experts-malformed.
    """
    found = "text that is not base64"
    if not isinstance(value, str):
        found = f"a {type(value).__name__}"
    elif len(value) > MAX_BASE64_CHARS:
        found = "too much text"
    else:
        try:
            return binascii.a2b_base64(value.encode("ascii"), strict_mode=True)
        except (binascii.Error, UnicodeEncodeError):
            pass
    raise refusal("routed-experts-malformed", expected, f"{label}: {found}")


def _decode(value: object, label: str) -> NDArray[np.integer]:
    raw = base64_bytes(value, label=label, expected=_WANTED)
    start = len(_MAGIC) + 2
    header_end = start + int.from_bytes(raw[len(_MAGIC) : start], "little")
    header = _HEADER.fullmatch(raw[start:header_end])
    if not raw.startswith(_MAGIC) or header is None:
        raise _malformed(label, "no npy array of three axes in C order")
    dtype = np.dtype(header[1].decode())
    shape = tuple(int(size) for size in header.groups()[1:])
    # Compared before anything is allocated: the header may say any size.
    if prod(shape) * dtype.itemsize != len(raw) - header_end:
        raise _malformed(label, f"shape {list(shape)} of {dtype} in {len(raw) - header_end} bytes")
    return np.frombuffer(raw, dtype, offset=header_end).reshape(shape)


def _shown(asked: object) -> str:
    if asked is None:
        return "unsaid"
    return str(asked) if type(asked) is int else f"a {type(asked).__name__}"


def _malformed(label: str, found: str) -> ReplyError:
    return refusal("routed-experts-malformed", _WANTED, f"{label}: {found}")
