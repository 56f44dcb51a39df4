"""What `alignment_stats` can write of every token beside its table: the ratio, or a policy loss's gradient.

The mathematics in plain torch; `Written` says to every backend what is wanted. Knows nothing of segments.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlbatch_kernels.errors import DtypeError, ScaleError
from rlbatch_kernels.reference import MAX_EXPONENT, bounded

KINDS = ("ratio", "clip", "cap")
"""What can be written; kernels number them by their place here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """A loss of each token, from its ratio and its advantage A.

    `clip`, as in PPO, GRPO and DAPO: -min(ratio * A, clamp(ratio, low, high) * A). Its gradient to the
    trainer's logprob is -ratio * A, and 0 where A pushes the ratio further out than `low` or `high`.
    `cap`, as in CISPO and truncated importance sampling: -clamp(ratio, low, high) * A * trainer_logprob, the
    clamped ratio a constant. Its gradient is -clamp(ratio, low, high) * A.

    Example:
        PolicyLoss(kind="clip", low=0.8, high=1.28), ratio 1.5 -> gradient 0 at A = 1, 1.5 at A = -1;
        PolicyLoss(kind="cap", low=0.0, high=2.0), ratio 3 -> gradient -2 at A = 1

    Raises:
        DtypeError: a bound that is no number.
        ScaleError: another kind, bounds out of order, or bounds of `clip` that leave out the ratio 1.
    """

    kind: Literal["clip", "cap"]
    low: float
    """Of the ratio, not of its distance from 1; at least 0."""
    high: float
    """Likewise; infinity is no bound."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS[1:]:
            raise ScaleError(f"PolicyLoss.kind: found {self.kind!r}, expected 'clip' or 'cap'")
        for name in ("low", "high"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise DtypeError(f"PolicyLoss.{name}: found {type(value).__name__}, expected a number")
        found = f"PolicyLoss: found low {self.low!r} and high {self.high!r}, expected"
        # NaN is in no order.
        if not 0 <= self.low <= self.high:
            raise ScaleError(f"{found} 0 <= low <= high")
        # The clipped ratio of weights that have not moved would have no gradient where A > 0, or where A < 0.
        if self.kind == "clip" and not self.low <= 1 <= self.high:
            raise ScaleError(
                f"{found} low <= 1 <= high: bounds of the ratio, where distances of 0.2 and 0.28 from 1 are "
                "low=0.8, high=1.28"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Written:
    """Where and what is written of the tokens of segments."""

    out: Tensor
    """[B, T], contiguous: filled already with what tokens outside all segments have."""
    loss: PolicyLoss | None = None
    """Its gradient is written; None: the ratio."""
    advantages: Tensor | None = None
    """[B, T] in the dtype of `out`; None for the ratio."""

    @property
    def kind(self) -> int:
        """Place in `KINDS`."""
        return KINDS.index("ratio" if self.loss is None else self.loss.kind)

    def put(self, where: tuple[Tensor, Tensor], trainer: Tensor, inference: Tensor, mask: Tensor) -> None:
        """Write the tokens [M] at `where`, from their logprobs in float64."""
        if self.loss is None or self.advantages is None:
            compared = mask & trainer.isfinite() & inference.isfinite()
            values = bounded(torch.where(compared, trainer - inference, 0.0)).exp()
        else:
            values = _gradient(self.loss, trainer, inference, mask, self.advantages[where].to(torch.float64))
        self.out[where] = values.to(self.out.dtype)


def require_loss(loss: object) -> PolicyLoss:
    """The loss, refused unless it is one."""
    if not isinstance(loss, PolicyLoss):
        raise DtypeError(f"loss: found {type(loss).__name__}, expected a PolicyLoss")
    return loss


def _gradient(
    loss: PolicyLoss, trainer: Tensor, inference: Tensor, mask: Tensor, advantages: Tensor
) -> Tensor:
    log_ratio = torch.where(mask, trainer - inference, 0.0)
    ratio = bounded(log_ratio).exp()
    if loss.kind == "cap":
        weight = ratio.clamp(loss.low, loss.high)
    else:
        inside = torch.where(advantages > 0, ratio <= loss.high, ratio >= loss.low)
        # Beyond MAX_EXPONENT the ratio is a constant.
        weight = torch.where(inside & (log_ratio.abs() <= MAX_EXPONENT), ratio, 0.0)
    gradient = -advantages * weight
    has_none = ~mask | (trainer == -math.inf) & inference.isfinite()
    not_finite = ~(trainer.isfinite() & inference.isfinite())
    return gradient.masked_fill(not_finite, math.nan).masked_fill(has_none, 0.0)
