"""Media in a shard: bytes of all arrays of a sample, and a JSON list of their names, dtypes and shapes.

media          uint8, ragged: the arrays' bytes one after another, little-endian, C order
media.kinds    uint8, ragged: JSON, [[name, dtype, shape], ...] a sample; both absent where no sample has any
"""

import json
import math
from collections.abc import Sequence

import numpy as np

from rlbatch.records import MEDIA_DTYPES, MediaArray
from rlbatch.records.media import check_media
from rlbatch.storage.format import load_json

MEDIA = "media"
MEDIA_KINDS = "media.kinds"

_DTYPES = {dtype.name: dtype.newbyteorder("<") for dtype in MEDIA_DTYPES}


def encode_media(media: Sequence[MediaArray]) -> tuple[bytes, bytes]:
    """A sample's media as bytes, and the JSON that says what they are."""
    kinds = [[part.name, part.values.dtype.name, list(part.values.shape)] for part in media]
    data = b"".join(part.values.astype(_DTYPES[part.values.dtype.name]).tobytes() for part in media)
    return data, json.dumps(kinds).encode()


def decode_media(data: bytes, kinds: bytes) -> tuple[MediaArray, ...]:
    """A sample's media.

    Raises:
        ValueError, TypeError, KeyError: the two do not belong together, or are no media.
    """
    media, at = [], 0
    for name, kind, shape in load_json(kinds.decode()):
        dtype = _DTYPES[kind]
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"media of shape {shape}")
        end = at + math.prod(shape) * dtype.itemsize
        if end > len(data):
            raise ValueError(f"{len(data)} bytes of media, fewer than their shapes say")
        values = np.frombuffer(data[at:end], dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)
        media.append(MediaArray(name=name, values=values))
        at = end
    if at != len(data):
        raise ValueError(f"{len(data)} bytes of media, {at} by their shapes")
    check_media(media)
    return tuple(media)
