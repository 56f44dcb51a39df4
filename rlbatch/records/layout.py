"""`LayoutArrays`: a packed or padded batch as plain arrays, whoever made it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlbatch.errors import RecordError
from rlbatch.records.structure import check_choice, check_scalar, kind_of
from rlbatch.records.token_fields import Align

ALIGNS: tuple[Align, ...] = ("input", "target")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutArrays:
    """One micro-batch on its way into a model: B rows of T positions, or S sequences packed into one row.

    Construction checks structure only; whether boundaries, positions, masks and counts agree is for
    `rlbatch.soundness.check_sound_layout` to say.
    """

    input_ids: NDArray[np.integer]
    """[B, T]; packed: [1, T]."""
    loss_mask: NDArray[np.bool_]
    """[B, T]; True = trained."""
    align: Align
    """`target`: `loss_mask` at t is about the token that t predicts; `input`: about token t itself."""
    position_ids: NDArray[np.integer] | None = None
    """[B, T]; None where the model counts them itself."""
    attention_mask: NDArray[np.bool_] | None = None
    """[B, T]; False = padding. None: no position is padding."""
    cu_seqlens: NDArray[np.integer] | None = None
    """[S + 1] first position of each sequence, and the end; None where padded."""
    max_seqlen: int | None = None
    """Length of the longest sequence, as the attention kernel is told."""
    inference_logprobs: NDArray[np.floating[Any]] | None = None
    """[N] nats, of any number, as they were handed over: one a position is what is expected."""
    sequence_num_loss_tokens: NDArray[np.integer] | None = None
    """[S], or [B] where padded: trained tokens of each sequence, as a length field says."""
    normalizer: float | None = None
    """What a token mean divides the summed loss of this batch by."""
    step_num_loss_tokens: int | None = None
    """Trained tokens of the whole optimizer step that the batch is a part of, as under gradient accumulation:
    what `normalizer` must be. None: this batch is the step."""

    def __post_init__(self) -> None:
        _check_array("input_ids", self.input_ids, "iu", ndim=2)
        shape = self.input_ids.shape
        if 0 in shape:
            raise RecordError(f"LayoutArrays.input_ids: expected at least one position, found {list(shape)}")
        for name, kinds in (("loss_mask", "b"), ("position_ids", "iu"), ("attention_mask", "b")):
            value = getattr(self, name)
            if value is None and name != "loss_mask":
                continue
            _check_array(name, value, kinds, ndim=2)
            if value.shape != shape:
                found = list(value.shape)
                raise RecordError(f"LayoutArrays.{name}: expected shape {list(shape)}, found {found}")
        check_choice("LayoutArrays.align", self.align, ALIGNS)
        for name, kinds in (
            ("cu_seqlens", "iu"),
            ("sequence_num_loss_tokens", "iu"),
            ("inference_logprobs", "f"),
        ):
            if getattr(self, name) is not None:
                _check_array(name, getattr(self, name), kinds, ndim=1)
        self._check_packed()
        if self.normalizer is not None:
            check_scalar("LayoutArrays.normalizer", self.normalizer, float)
        if self.step_num_loss_tokens is not None:
            check_scalar("LayoutArrays.step_num_loss_tokens", self.step_num_loss_tokens, int)

    def _check_packed(self) -> None:
        if self.max_seqlen is not None:
            check_scalar("LayoutArrays.max_seqlen", self.max_seqlen, int)
        if self.cu_seqlens is None:
            return
        if len(self.cu_seqlens) < 2:
            found = len(self.cu_seqlens)
            raise RecordError(f"LayoutArrays.cu_seqlens: expected at least two boundaries, found {found}")
        if len(self.input_ids) != 1:
            found = len(self.input_ids)
            raise RecordError(f"LayoutArrays.input_ids: expected one row where packed, found {found}")


def _check_array(name: str, value: object, kinds: str, *, ndim: int) -> None:
    label = f"LayoutArrays.{name}"
    if not isinstance(value, np.ndarray):
        raise RecordError(f"{label}: expected a numpy array, found {kind_of(value)}")
    if value.dtype.kind not in kinds:
        expected = {"iu": "integers", "b": "bool", "f": "floats"}[kinds]
        raise RecordError(f"{label}: expected {expected}, found {value.dtype}")
    if value.ndim != ndim:
        raise RecordError(f"{label}: expected {ndim} dimensions, found shape {list(value.shape)}")
