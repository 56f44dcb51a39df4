"""`CSoftmax`: the softmax of trained rows by the C kernels, which read logits where they lie. CPU only."""

import ctypes
import math

from torch import Tensor

from rlbatch_kernels import c_library
from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.row_softmax import Places, RowSoftmax
from rlbatch_kernels.shaping import Shaping
from rlbatch_kernels.softmax import Coefficients


class CSoftmax(RowSoftmax):
    """`Softmax` over float32, bfloat16 and float16 logits on the CPU; tiles are read and left as they are."""

    def __init__(self, trained: Trained, *, shaping: Shaping, full: bool = False) -> None:
        super().__init__(trained, shaping=shaping, full=full)
        self._temperature = trained.temperature.contiguous()
        self._target_ids = trained.target_ids.contiguous()

    def _forward(self, logits: Tensor, offsets: Tensor, rows: slice, first_column: int) -> None:
        described = self._rows(logits, offsets, rows, first_column)
        state = self._state(rows)
        c_library.functions().rlb_softmax_forward(
            ctypes.byref(described), ctypes.byref(state), c_library.level(), _threads(offsets, logits)
        )

    def _backward(
        self, logits: Tensor, given: Coefficients, rows: slice, first_column: int, places: Places
    ) -> None:
        offsets, out, out_offsets = places.offsets, places.out, places.out_offsets
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
        c_library.functions().rlb_softmax_backward(
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
            shaping=self._shaping(first_column, logits.shape[-1]),
        )

    def _shaping(self, first_column: int, num_columns: int) -> "ctypes._Pointer[c_library.Shaping] | None":
        shaping = self.shaping
        if shaping.changes_nothing:
            return None
        described = c_library.Shaping(
            logit_scale=shaping.logit_scale,
            soft_cap=shaping.soft_cap or 0.0,
            scale_over_cap=shaping.logit_scale / shaping.soft_cap if shaping.soft_cap else 0.0,
            one_over_cap=1 / shaping.soft_cap if shaping.soft_cap else 0.0,
            vocab_mask=c_library.pointer(shaping.mask_of(first_column, num_columns)),
        )
        return ctypes.pointer(described)

    def _state(self, rows: slice) -> c_library.State:
        full = self.weighted is not None and self.above is not None
        return c_library.State(
            maximum=c_library.pointer(self.maximum[rows]),
            total=c_library.pointer(self.total[rows]),
            target=c_library.pointer(self.target[rows]),
            weighted=c_library.pointer(self.weighted[rows]) if full else None,  # type: ignore[index]
            above=c_library.pointer(self.above[rows]) if full else None,  # type: ignore[index]
        )


def _threads(offsets: Tensor, logits: Tensor) -> int:
    return c_library.num_threads(offsets.numel() * logits.shape[-1])
