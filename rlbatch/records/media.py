"""`MediaArray`: an input of a sample besides its tokens, as a picture's pixels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError
from rlbatch.records.structure import check_text, keep, kind_of

MEDIA_DTYPES = tuple(map(np.dtype, ("bool", "uint8", "int32", "int64", "float16", "float32")))
"""What processors make. bfloat16 is not numpy's: widen it to float32, which is exact."""

RESERVED_NAMES = (
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "attention_mask",
    "use_cache",
    "past_key_values",
    "cache_position",
    "labels",
)
"""Arguments of a model that its tokens decide: under one of these names a medium would replace them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MediaArray:
    """One input besides tokens; what several samples have under one name is joined along the first axis."""

    name: str
    """The model's keyword argument, as `pixel_values` or `image_grid_thw`."""
    values: NDArray[Any]
    """[N, ...], with as many axes as the model wants."""

    def __post_init__(self) -> None:
        check_text(self, "name")
        if self.name in RESERVED_NAMES:
            raise RecordError(
                f"MediaArray.name: expected an input besides tokens, as pixel_values, found {self.name!r}, "
                "which the tokens decide. Leave it out"
            )
        if not isinstance(self.values, np.ndarray):
            raise RecordError(f"MediaArray.values: expected a numpy array, found {kind_of(self.values)}")
        if self.values.dtype not in MEDIA_DTYPES:
            kinds = ", ".join(map(str, MEDIA_DTYPES))
            raise RecordError(f"MediaArray.values: expected one of {kinds}, found {self.values.dtype}")
        if self.values.ndim == 0:
            raise RecordError("MediaArray.values: expected at least one axis, found a single number")
        keep(self, "values", self.values)


def check_media(media: Sequence[object]) -> None:
    """Refuse what is no media, and two of one name.

    Raises:
        RecordError: one of these.
    """
    for part in media:
        if not isinstance(part, MediaArray):
            raise RecordError(f"Sample.media: expected MediaArray, found {kind_of(part)}")
    names = [part.name for part in media if isinstance(part, MediaArray)]
    if len(set(names)) != len(names):
        raise RecordError(f"Sample.media: expected each name once, found {', '.join(names)}")
