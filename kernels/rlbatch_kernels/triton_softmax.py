"""`TritonSoftmax`: the softmax of trained rows by Triton, which reads logits where they lie. CUDA only."""

import math

import torch
from torch import Tensor

from rlbatch_kernels import triton_library
from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.softmax import Coefficients, Softmax

BLOCK = 4096
"""Columns that a program takes at once: two or four loads of 16 bytes a thread."""

NUM_WARPS = 8

ALIGNMENT = 16
"""Elements: rows whose places are multiples of it are read in vectors, of 16 bytes at any dtype."""


class TritonSoftmax(Softmax):
    """`Softmax` over float32, bfloat16 and float16 logits on CUDA; tiles are read and left as they are."""

    def __init__(self, trained: Trained, *, full: bool = False) -> None:
        super().__init__(trained, full=full)
        # The kernels count in powers of two.
        self._scale = 1 / (trained.temperature * math.log(2))
        self._target_ids = trained.target_ids.contiguous()

    def add(self, logits: Tensor, rows: slice, first_column: int) -> None:
        """Take in a tile [n, v] of the columns from `first_column`."""
        if not _one_piece(logits):
            logits = logits.contiguous()
        self._forward(logits, _tile_offsets(logits), rows, first_column)

    def add_rows(self, logits: Tensor) -> None:
        """Take in all columns of the trained rows of `logits` [..., V], where they lie if rows are whole."""
        if _one_piece(logits):
            self._forward(logits, self.trained.offsets(logits), slice(None), 0)
        else:
            super().add_rows(logits)

    def backward(
        self, logits: Tensor, given: Coefficients, rows: slice, first_column: int, out: Tensor | None = None
    ) -> Tensor:
        """Gradient to a tile [n, v]: to `out` [n, v], whose dtype may differ, or else over the tile."""
        if not _one_piece(logits):
            logits = logits.contiguous()
        out = logits if out is None else out
        offsets, out_offsets = _tile_offsets(logits), None
        if out.stride() != logits.stride():
            out_offsets = _tile_offsets(out)
        self._backward(logits, given, rows, first_column, (offsets, out, out_offsets))
        return out

    def backward_rows(self, logits: Tensor, given: Coefficients, out: Tensor) -> None:
        """Write the gradient of the trained rows of `logits` [..., V] to `out`, which may be `logits`."""
        if not (_one_piece(logits) and _one_piece(out)):
            super().backward_rows(logits, given, out)
            return
        offsets, out_offsets = self.trained.offsets(logits), None
        if out.stride() != logits.stride():
            out_offsets = self.trained.offsets(out)
        self._backward(logits, given, slice(None), 0, (offsets, out, out_offsets))

    def _forward(self, logits: Tensor, offsets: Tensor, rows: slice, first_column: int) -> None:
        if offsets.numel() == 0:
            return
        full = self.weighted is not None and self.above is not None
        with triton_library.on_device_of(logits):
            triton_library.softmax().forward[(offsets.numel(),)](
                logits,
                offsets,
                self._target_ids[rows],
                self._scale[rows],
                self.maximum[rows],
                self.total[rows],
                self.target[rows],
                self.weighted[rows] if full else None,  # type: ignore[index]
                self.above[rows] if full else None,  # type: ignore[index]
                logits.shape[-1],
                first_column,
                FULL=full,
                BLOCK=BLOCK,
                ALIGNMENT=_alignment(logits),
                num_warps=NUM_WARPS,
            )

    def _backward(
        self,
        logits: Tensor,
        given: Coefficients,
        rows: slice,
        first_column: int,
        places: tuple[Tensor, Tensor, Tensor | None],
    ) -> None:
        offsets, out, out_offsets = places
        if offsets.numel() == 0:
            return
        with triton_library.on_device_of(logits):
            triton_library.softmax().backward[(offsets.numel(),)](
                logits,
                offsets,
                self._target_ids[rows],
                self._scale[rows],
                self.maximum[rows],
                given.at_target[rows].contiguous(),
                given.constant[rows].contiguous(),
                None if given.slope is None else given.slope[rows] * math.log(2),
                out,
                out_offsets,
                logits.shape[-1],
                first_column,
                SLOPE=given.slope is not None,
                SAME_OFFSETS=out_offsets is None,
                BLOCK=BLOCK,
                ALIGNMENT=_alignment(logits),
                num_warps=NUM_WARPS,
            )


def _alignment(logits: Tensor) -> int:
    """By the strides and the width alone, so that one row of a batch is read as all of them are."""
    numbers = (*logits.stride()[:-1], logits.shape[-1])
    return ALIGNMENT if all(number % ALIGNMENT == 0 for number in numbers) else 1


def _tile_offsets(tile: Tensor) -> Tensor:
    return torch.arange(tile.shape[0], dtype=torch.int64, device=tile.device) * tile.stride(0)


def _one_piece(values: Tensor) -> bool:
    return values.stride(-1) == 1 or values.shape[-1] == 1
