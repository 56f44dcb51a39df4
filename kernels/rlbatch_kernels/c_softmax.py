"""`CSoftmax`: the softmax of trained rows by the C kernels, which read logits where they lie. CPU only."""

import ctypes
import math

import torch
from torch import Tensor

from rlbatch_kernels import c_library
from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.softmax import Coefficients, Softmax


class CSoftmax(Softmax):
    """`Softmax` over float32, bfloat16 and float16 logits on the CPU; tiles are read and left as they are."""

    def __init__(self, trained: Trained, *, full: bool = False) -> None:
        super().__init__(trained, full=full)
        self._temperature = trained.temperature.contiguous()
        self._target_ids = trained.target_ids.contiguous()

    def add(self, logits: Tensor, rows: slice, first_column: int) -> None:
        """Take in a tile [n, v] of the columns from `first_column`."""
        if logits.stride(-1) != 1:
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
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        out = logits if out is None else out
        self._backward(logits, given, rows, first_column, (_tile_offsets(logits), out, _tile_offsets(out)))
        return out

    def backward_rows(self, logits: Tensor, given: Coefficients, out: Tensor) -> None:
        """Write the gradient of the trained rows of `logits` [..., V] to `out`, which may be `logits`."""
        if _one_piece(logits) and _one_piece(out):
            offsets = self.trained.offsets(logits), out, self.trained.offsets(out)
            self._backward(logits, given, slice(None), 0, offsets)
        else:
            super().backward_rows(logits, given, out)

    def _forward(self, logits: Tensor, offsets: Tensor, rows: slice, first_column: int) -> None:
        described = self._rows(logits, offsets, rows, first_column)
        state = self._state(rows)
        c_library.library().rlb_softmax_forward(
            ctypes.byref(described), ctypes.byref(state), c_library.level(), _threads(offsets, logits)
        )

    def _backward(
        self,
        logits: Tensor,
        given: Coefficients,
        rows: slice,
        first_column: int,
        places: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        offsets, out, out_offsets = places
        at_target, constant = given.at_target.contiguous(), given.constant.contiguous()
        # The kernel counts in powers of two.
        slope = None if given.slope is None else given.slope * math.log(2)
        described, state = self._rows(logits, offsets, rows, first_column), self._state(rows)
        asked = c_library.Upstream(
            at_target=c_library.pointer(at_target[rows]),
            constant=c_library.pointer(constant[rows]),
            slope=None if slope is None else c_library.pointer(slope[rows]),
            out=c_library.pointer(out),
            out_offsets=c_library.pointer(out_offsets),
            out_dtype=c_library.LOGIT_DTYPES[out.dtype],
        )
        c_library.library().rlb_softmax_backward(
            ctypes.byref(described),
            ctypes.byref(state),
            ctypes.byref(asked),
            c_library.level(),
            _threads(offsets, logits),
        )

    def _rows(self, logits: Tensor, offsets: Tensor, rows: slice, first_column: int) -> c_library.Rows:
        return c_library.Rows(
            logits=c_library.pointer(logits),
            dtype=c_library.LOGIT_DTYPES[logits.dtype],
            offsets=c_library.pointer(offsets),
            num_rows=offsets.numel(),
            num_columns=logits.shape[-1],
            first_column=first_column,
            target_ids=c_library.pointer(self._target_ids[rows]),
            temperature=c_library.pointer(self._temperature[rows]),
        )

    def _state(self, rows: slice) -> c_library.State:
        full = self.weighted is not None and self.above is not None
        return c_library.State(
            maximum=c_library.pointer(self.maximum[rows]),
            total=c_library.pointer(self.total[rows]),
            target=c_library.pointer(self.target[rows]),
            weighted=c_library.pointer(self.weighted[rows]) if full else None,  # type: ignore[index]
            above=c_library.pointer(self.above[rows]) if full else None,  # type: ignore[index]
        )


def _tile_offsets(tile: Tensor) -> Tensor:
    return torch.arange(tile.shape[0], dtype=torch.int64) * tile.stride(0)


def _one_piece(values: Tensor) -> bool:
    return values.stride(-1) == 1 or values.shape[-1] == 1


def _threads(offsets: Tensor, logits: Tensor) -> int:
    return c_library.num_threads(offsets.numel() * logits.shape[-1])
