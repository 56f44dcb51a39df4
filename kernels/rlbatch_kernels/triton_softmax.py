"""`TritonSoftmax`: the softmax of trained rows by Triton, which reads logits where they lie. CUDA only."""

import math

import torch
from torch import Tensor

from rlbatch_kernels import triton_library, triton_linear
from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.head import Head
from rlbatch_kernels.row_softmax import Places, RowSoftmax
from rlbatch_kernels.shaping import Shaping
from rlbatch_kernels.softmax import Coefficients

BLOCK = 4096
"""Columns that a program takes at once: two or four loads of 16 bytes a thread."""

NUM_WARPS = 8

ALIGNMENT = 16
"""Elements: rows whose places are multiples of it are read in vectors, of 16 bytes at any dtype."""


class TritonSoftmax(RowSoftmax):
    """`Softmax` over float32, bfloat16 and float16 logits on CUDA; tiles are read and left as they are."""

    def __init__(self, trained: Trained, *, shaping: Shaping, full: bool = False) -> None:
        super().__init__(trained, shaping=shaping, full=full)
        # The kernels count in powers of two.
        self._scale = 1 / (trained.temperature * math.log(2))
        self._target_ids = trained.target_ids.contiguous()

    def add_head(self, head: Head, first_id: int) -> bool:
        """Take in a head by one kernel where that has its dtypes and layout."""
        if not triton_linear.serves(head):
            return False
        if self.trained.num_tokens:
            mask = self._mask(first_id, len(head.weight))
            found = triton_linear.reduce(head, self.shaping, mask, self._scale, first_id)
            self.maximum, self.total, self.target = found
        return True

    def _forward(self, logits: Tensor, offsets: Tensor, rows: slice, first_column: int) -> None:
        if offsets.numel() == 0:
            return
        full = self.weighted is not None and self.above is not None
        mask = self._mask(first_column, logits.shape[-1])
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
                mask,
                self.shaping.logit_scale,
                self.shaping.soft_cap or 1.0,
                logits.shape[-1],
                first_column,
                FULL=full,
                CAPPED=self.shaping.soft_cap is not None,
                MASKED=mask is not None,
                BLOCK=BLOCK,
                ALIGNMENT=_alignment(logits),
                num_warps=NUM_WARPS,
            )

    def _backward(
        self, logits: Tensor, given: Coefficients, rows: slice, first_column: int, places: Places
    ) -> None:
        offsets, out = places.offsets, places.out
        out_offsets = None if places.out_offsets is offsets else places.out_offsets
        if offsets.numel() == 0:
            return
        mask = self._mask(first_column, logits.shape[-1])
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
                mask,
                self.shaping.logit_scale,
                self.shaping.soft_cap or 1.0,
                logits.shape[-1],
                first_column,
                SLOPE=given.slope is not None,
                CAPPED=self.shaping.soft_cap is not None,
                MASKED=mask is not None,
                SAME_OFFSETS=out_offsets is None,
                BLOCK=BLOCK,
                ALIGNMENT=_alignment(logits),
                num_warps=NUM_WARPS,
            )

    def _mask(self, first_column: int, num_columns: int) -> Tensor | None:
        mask = self.shaping.mask_of(first_column, num_columns)
        return None if mask is None else mask.view(torch.uint8)


def _alignment(logits: Tensor) -> int:
    """By the strides and the width alone, so that one row of a batch is read as all of them are."""
    numbers = (*logits.stride()[:-1], logits.shape[-1])
    return ALIGNMENT if all(number % ALIGNMENT == 0 for number in numbers) else 1
