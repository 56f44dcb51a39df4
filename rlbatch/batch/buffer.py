"""One flat buffer under all tensors of a batch, so that a copy to the device is one copy.

    0         256           512                         num_bytes
    | field 0 | rest unused | field 1 ... | ... field n |

Each field starts at a multiple of 256 bytes and is contiguous. Knows bytes, dtypes and shapes; nothing of
what the fields mean.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from rlbatch.errors import RecordError

FIELD_ALIGNMENT = 256
"""Bytes. What CUDA's own allocator aligns to, and a multiple of every vector load and cache line."""

Allocate: TypeAlias = Callable[[int], Tensor]
"""Number of bytes -> a flat uint8 tensor on the host of at least as many; what it holds does not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where in a buffer one tensor lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0
    """First byte, counted from the buffer's first."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor covers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor, as a view of the buffer."""
        return buffer[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


def fresh(num_bytes: int) -> Tensor:
    """Ordinary memory."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def place_slots(slots: Sequence[Slot], allocate: Allocate) -> tuple[Tensor, list[Tensor]]:
    """A buffer from `allocate`, cut to what is needed, and one tensor a slot in it.

    Args:
        slots: in the order of the buffer; their `start` is decided here.
        allocate: gives the memory; the tensors hold whatever it held.

    Raises:
        RecordError: `allocate` gave something else than a flat uint8 host tensor of that many bytes.

    Example:
        int64 [3] and bool [3] -> 24 bytes at 0 and 3 bytes at 256, in a buffer of 512
    """
    starts, end = [], 0
    for slot in slots:
        starts.append(end)
        end += -(-slot.num_bytes // FIELD_ALIGNMENT) * FIELD_ALIGNMENT
    buffer = _checked(allocate(end), end)[:end]
    # The whole as values of each dtype, once: of bytes each tensor would take another step.
    whole = {dtype: buffer.view(dtype) for dtype in {slot.dtype for slot in slots}}
    views = []
    for slot, start in zip(slots, starts, strict=True):
        first = start // slot.dtype.itemsize
        views.append(whole[slot.dtype][first : first + math.prod(slot.shape)].view(slot.shape))
    return buffer, views


def slot_in(buffer: Tensor | None, tensor: Tensor) -> Slot | None:
    """The slot of a tensor that is a contiguous view of the buffer; None for any other."""
    if buffer is None or not tensor.is_contiguous():
        return None
    if tensor.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
        return None
    start = int(tensor.storage_offset() * tensor.element_size() - buffer.storage_offset())
    slot = Slot(dtype=tensor.dtype, shape=tuple(tensor.shape), start=start)
    return slot if start >= 0 and start + slot.num_bytes <= buffer.numel() else None


def _checked(buffer: object, num_bytes: int) -> Tensor:
    expected = f"allocate: expected a flat, contiguous uint8 tensor on the host of at least {num_bytes} bytes"
    if not isinstance(buffer, Tensor):
        raise RecordError(f"{expected}, found {type(buffer).__name__}")
    if buffer.dtype != torch.uint8 or buffer.ndim != 1 or buffer.device.type != "cpu":
        raise RecordError(f"{expected}, found {buffer.dtype} {list(buffer.shape)} on {buffer.device}")
    # `len` of a tensor takes ten times as long.
    if buffer.numel() < num_bytes or not buffer.is_contiguous():
        raise RecordError(f"{expected}, found {buffer.numel()} with stride {buffer.stride(0)}")
    if buffer.storage_offset() % FIELD_ALIGNMENT:
        raise RecordError(
            f"{expected} that starts at a multiple of {FIELD_ALIGNMENT} bytes of its storage, "
            f"found it at byte {buffer.storage_offset()}"
        )
    return buffer
