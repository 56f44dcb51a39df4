"""`Shaping`: what is done to logits after the head, before any softmax.

In torch here; the C and Triton kernels do the same to what they read.
"""

import math
from dataclasses import dataclass

import torch
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
    """[V] bool, contiguous; False excludes a column, as if its logit were -inf. None = every one counts."""

    @property
    def changes_nothing(self) -> bool:
        """True where the logits are what the softmax is taken of."""
        return not self.changes_values and self.vocab_mask is None

    @property
    def changes_values(self) -> bool:
        """True where logits are scaled or capped."""
        return self.logit_scale != 1.0 or self.soft_cap is not None

    def mask_of(self, first_id: int, num_columns: int) -> Tensor | None:
        """[v] bool of the columns that stand for the ids from `first_id` on; None where every one counts."""
        return None if self.vocab_mask is None else self.vocab_mask[first_id : first_id + num_columns]

    def apply(self, logits: Tensor, first_id: int) -> Tensor:
        """Shape a tile [n, v] of the columns from `first_id` on, in place."""
        if self.logit_scale != 1.0:
            logits.mul_(self.logit_scale)
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        mask = self.mask_of(first_id, logits.shape[-1])
        if mask is not None:
            logits.masked_fill_(~mask, -math.inf)
        return logits

    def slope(self, logits: Tensor, first_id: int) -> Tensor | float | None:
        """Derivative of what `apply` makes of a tile [n, v] to the tile; None where it is 1.

        1 - tanh(z)^2 = q * (2 - q), q = 1 - tanh |z|: q has digits where tanh, beside 1, has none.
        """
        scale = None if self.logit_scale == 1.0 else self.logit_scale
        if self.soft_cap is None:
            return scale
        z = logits.to(compute_dtype(logits)) * (self.logit_scale / self.soft_cap)
        q = 2 / (torch.exp(2 * z.abs_()) + 1)
        slope = (2 - q).mul_(q)
        mask = self.mask_of(first_id, logits.shape[-1])
        if mask is not None:
            # Whatever the logit was, NaN too.
            slope.masked_fill_(~mask, 0.0)
        return slope if scale is None else slope.mul_(scale)
