"""`Shaping`: what a model does to its logits after the head, before any softmax."""

import math
from dataclasses import dataclass

from torch import Tensor

from rlbatch_kernels.reference import compute_dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shaping:
    """Scale, cap and mask of logits, in this order."""

    logit_scale: float = 1.0
    """Multiplies them."""
    soft_cap: float | None = None
    """cap * tanh(logits / cap); None = not."""
    vocab_mask: Tensor | None = None
    """[V] bool; False excludes a column, as if its logit were -inf. None = every column counts."""

    @property
    def changes_nothing(self) -> bool:
        """True where the logits are what the softmax is taken of."""
        return self.logit_scale == 1.0 and self.soft_cap is None and self.vocab_mask is None

    def apply(self, logits: Tensor, columns: slice = slice(None)) -> Tensor:
        """Shape a tile [n, v] of these columns, in place."""
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.vocab_mask is not None:
            logits.masked_fill_(~self.vocab_mask[columns], -math.inf)
        return logits

    def slope(self, shaped: Tensor, columns: slice = slice(None)) -> Tensor | float | None:
        """Derivative of `shaped` [n, v] to what `apply` was given; None where it is 1.

        A masked column needs no more than a finite one: its gradient is 0 already.
        """
        scale = None if self.logit_scale == 1.0 else self.logit_scale
        if self.soft_cap is None:
            return scale
        slope = 1 - (shaped.to(compute_dtype(shaped)) / self.soft_cap).square_()
        if self.vocab_mask is not None:
            slope.masked_fill_(~self.vocab_mask[columns], 1.0)
        return slope if scale is None else slope.mul_(scale)
