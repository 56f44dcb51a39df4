"""`RowSoftmax`: a softmax whose kernels are told where each row begins, and read logits where they lie.

What the C and the Triton backend have in common: which tensors their kernels can take as they are. Knows
nothing of how a kernel is launched.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbatch_kernels.softmax import Coefficients, Softmax


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Where a backward reads and writes; offsets are [n] int64 elements from a tensor's first."""

    offsets: Tensor
    """Of the logits' rows."""
    out: Tensor
    out_offsets: Tensor
    """Of the rows of `out`; the tensor `offsets` itself where they are the same."""


class RowSoftmax(Softmax, ABC):
    """`Softmax` by kernels over rows whose columns lie side by side; tiles are read and left as they are."""

    def add(self, logits: Tensor, rows: slice, first_column: int) -> None:
        """Take in a tile [n, v] of the columns from `first_column`."""
        logits = _in_rows(logits)
        self._forward(logits, _tile_offsets(logits), rows, first_column)

    def add_rows(self, logits: Tensor, first_column: int) -> None:
        """Take in the trained rows of `logits` [..., v], where they lie if their columns lie side by side."""
        if _one_piece(logits):
            self._forward(logits, self.trained.offsets(logits), slice(None), first_column)
        else:
            super().add_rows(logits, first_column)

    def backward(
        self, logits: Tensor, given: Coefficients, rows: slice, first_column: int, out: Tensor | None = None
    ) -> Tensor:
        """Gradient to a tile [n, v]: to `out` [n, v], whose dtype may differ, or else over the tile."""
        logits = _in_rows(logits)
        out = logits if out is None else out
        offsets = _tile_offsets(logits)
        out_offsets = offsets if out.stride() == logits.stride() else _tile_offsets(out)
        places = Places(offsets=offsets, out=out, out_offsets=out_offsets)
        self._backward(logits, given, rows, first_column, places)
        return out

    def backward_rows(self, logits: Tensor, given: Coefficients, out: Tensor, first_column: int) -> None:
        """Write the gradient of the trained rows of `logits` [..., V] to `out`, which may be `logits`."""
        if not (_one_piece(logits) and _one_piece(out)):
            super().backward_rows(logits, given, out, first_column)
            return
        offsets = self.trained.offsets(logits)
        out_offsets = offsets if out.stride() == logits.stride() else self.trained.offsets(out)
        places = Places(offsets=offsets, out=out, out_offsets=out_offsets)
        self._backward(logits, given, slice(None), first_column, places)

    @abstractmethod
    def _forward(self, logits: Tensor, offsets: Tensor, rows: slice, first_column: int) -> None:
        """Run the kernel over the rows of `logits` at `offsets` [n]."""

    @abstractmethod
    def _backward(
        self, logits: Tensor, given: Coefficients, rows: slice, first_column: int, places: Places
    ) -> None:
        """Run the kernel over the rows of `logits` at the offsets of `places`."""


def _in_rows(tile: Tensor) -> Tensor:
    return tile if _one_piece(tile) else tile.contiguous()


def _tile_offsets(tile: Tensor) -> Tensor:
    return torch.arange(tile.shape[0], dtype=torch.int64, device=tile.device) * tile.stride(0)


def _one_piece(values: Tensor) -> bool:
    return values.stride(-1) == 1 or values.shape[-1] == 1
