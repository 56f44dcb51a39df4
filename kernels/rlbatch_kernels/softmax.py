"""`Softmax`: the softmax of trained rows, whose logits come in tiles; plain torch, the oracle of the others.

Logits may be scaled, capped and masked first (`Shaping`), as they are read; gradients are to what they were.

It keeps a few float64 scalars a row, so that only the exponentials and their sum are float32 (float64 for
float64 logits). Their meaning is the same in every backend: a subclass overrides how tiles are read and
written, nothing else. Knows nothing of where logits come from.

- A logprob is (target - maximum) / temperature - log(total), the maximum subtracted before the division: at
  logits of 1e4 the quotients alone would be off by 5e-4 nats in float32.
- Columns of -inf add 0; a row of nothing but -inf, and any NaN or +inf, gives NaN, never a finite number.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.head import Head
from rlbatch_kernels.reference import compute_dtype
from rlbatch_kernels.shaping import Shaping

TILE_ELEMENTS = 2**21
"""Logits handled at once: 8 MiB in float32, small beside any [T, V], large enough to keep cores busy."""
_LEAST_Z = -1e4
"""Its exponential is 0 even in float64, and no slope makes it overflow, as one does the smallest float."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Upstream:
    """Gradients of the loss to what the rows gave, [N] float64 each; None where nothing asks for one."""

    logprobs: Tensor
    log_sum_exp: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coefficients:
    """A row's gradient, [N] float64 each: e * (constant + slope * z), and `at_target` more at the target.

    z = (logit - maximum) / temperature and e = exp(z).
    """

    at_target: Tensor
    constant: Tensor
    slope: Tensor | None


class Softmax:
    """Online softmax of N rows, each with its own temperature.

    Attributes:
        shaping: what is done to the logits first; those below are after it.
        maximum: [N] float64, largest logit so far; -inf before the first.
        total: [N] float64, sum of exp(z), z = (logit - maximum) / temperature.
        target: [N] float64, the logit of the row's target; NaN until its tile has come.
        weighted: [N] float64, sum of z * exp(z); None unless `full`.
        above: [N] int64, logits larger than the target's; None unless `full`.
    """

    def __init__(self, trained: Trained, *, shaping: Shaping, full: bool = False) -> None:
        self.trained, self.shaping = trained, shaping
        self.maximum = torch.full_like(trained.temperature, -math.inf)
        self.total = torch.zeros_like(trained.temperature)
        self.target = torch.full_like(trained.temperature, math.nan)
        self.weighted = torch.zeros_like(self.total) if full else None
        self.above = torch.zeros_like(trained.target_ids) if full else None

    def add(self, logits: Tensor, rows: slice, first_column: int) -> None:
        """Take in a tile [n, v] of the columns from `first_column`; may overwrite it.

        Where `full`, a row's target must lie in the first tile that it is given.
        """
        logits = self.shaping.apply(logits.to(compute_dtype(logits)), first_column)
        self._take_target(logits, rows, first_column)
        if self.above is not None:
            self.above[rows] += (logits > self.target[rows].to(logits.dtype).unsqueeze(-1)).sum(dim=-1)
        temperature, before = self.trained.temperature[rows], self.maximum[rows]
        maximum = torch.maximum(before, logits.amax(dim=-1).to(torch.float64))
        # Where every logit so far is -inf any finite number serves: each exp below is 0.
        origin = maximum.masked_fill(maximum == -math.inf, 0.0)
        shift = ((before - origin) / temperature).masked_fill(before == -math.inf, -math.inf)
        kept, z = self.total[rows] * shift.exp(), _scaled(logits, origin, temperature)
        if self.weighted is not None:
            moved = shift.masked_fill(shift == -math.inf, 0.0)
            weighted = shift.exp() * (self.weighted[rows] + moved * self.total[rows])
            self.weighted[rows] = weighted + (_finite(z) * z.exp()).sum(dim=-1)
        self.total[rows] = kept + z.exp_().sum(dim=-1)
        self.maximum[rows] = maximum

    def add_rows(self, logits: Tensor, first_column: int) -> None:
        """Take in the columns from `first_column`: the trained rows of `logits` [..., v]."""
        for rows in self.blocks(logits.shape[-1]):
            self.add(self.trained.gather(logits, rows), rows, first_column)

    def add_head(self, head: Head, first_id: int) -> bool:
        """Take in all logits of a head whose column 0 is `first_id`; False where they must come in tiles."""
        return False

    def blocks(self, num_columns: int) -> list[slice]:
        """Rows in tiles of at most TILE_ELEMENTS logits."""
        step = max(1, TILE_ELEMENTS // num_columns)
        return [slice(first, first + step) for first in range(0, self.trained.num_tokens, step)]

    def logprobs(self) -> Tensor:
        """[N] float64, once every column has been added."""
        return (self.target - self.maximum) / self.trained.temperature - self.total.log()

    def log_sum_exp(self) -> Tensor:
        """[N] float64, log of the sum of exp(logit / temperature)."""
        return self.maximum / self.trained.temperature + self.total.log()

    def entropy(self) -> Tensor:
        """[N] float64, nats. Not the sum of p * logit, which cancels at large logits."""
        if self.weighted is None:
            raise RuntimeError("entropy: found a Softmax without full=True")
        return self.total.log() - self.weighted / self.total

    def backward(
        self, logits: Tensor, given: Coefficients, rows: slice, first_column: int, out: Tensor | None = None
    ) -> Tensor:
        """Gradient of the loss to a tile of logits [n, v]; may overwrite it.

        Written to `out` [n, v] where given, which may have another dtype; else in that of the logits.
        """
        given_dtype, dtype = logits.dtype, compute_dtype(logits)
        column, inside = self._columns(logits, rows, first_column)
        logits = logits.to(dtype)
        # Before they are overwritten.
        slope = self.shaping.slope(logits, first_column)
        z = _scaled(
            self.shaping.apply(logits, first_column), self.maximum[rows], self.trained.temperature[rows]
        )
        factor = given.constant[rows].to(dtype).unsqueeze(-1)
        if given.slope is not None:
            factor = factor + given.slope[rows].to(dtype).unsqueeze(-1) * _finite(z)
        grad = z.exp_().mul_(factor)
        row = torch.arange(len(grad), device=grad.device)
        grad[row, column] += (given.at_target[rows] * inside).to(dtype)
        if slope is not None:
            grad *= slope
        return grad.to(given_dtype) if out is None else out.copy_(grad)

    def backward_rows(self, logits: Tensor, given: Coefficients, out: Tensor, first_column: int) -> None:
        """Write the gradient of the trained rows of `logits` [..., V] to `out`, which may be `logits`."""
        for rows in self.blocks(logits.shape[-1]):
            grad = self.backward(self.trained.gather(logits, rows), given, rows, first_column)
            self.trained.put(out, grad, rows)
            # The next tile must not be made while this one is held.
            del grad

    def coefficients(self, upstream: Upstream) -> Coefficients:
        """What the gradient of a row is made of, from those to its logprob, log-sum-exp and entropy."""
        per_logit = 1 / self.trained.temperature
        everywhere, slope = -upstream.logprobs, None
        if upstream.log_sum_exp is not None:
            everywhere = everywhere + upstream.log_sum_exp
        if upstream.entropy is not None:
            # d entropy / dz = -p * (log p + entropy), log p = z - log(total).
            everywhere = everywhere - upstream.entropy * (self.entropy() - self.total.log())
            slope = -upstream.entropy * per_logit / self.total
        return Coefficients(
            at_target=upstream.logprobs * per_logit,
            constant=everywhere * per_logit / self.total,
            slope=slope,
        )

    def _take_target(self, logits: Tensor, rows: slice, first_column: int) -> None:
        column, inside = self._columns(logits, rows, first_column)
        found = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(torch.float64)
        self.target[rows] = torch.where(inside, found, self.target[rows])

    def _columns(self, logits: Tensor, rows: slice, first_column: int) -> tuple[Tensor, Tensor]:
        column = self.trained.target_ids[rows] - first_column
        inside = (column >= 0) & (column < logits.shape[-1])
        return torch.where(inside, column, 0), inside


def _scaled(logits: Tensor, origin: Tensor, temperature: Tensor) -> Tensor:
    """(logits - origin) / temperature of a tile [n, v], in place."""
    logits.sub_(origin.to(logits.dtype).unsqueeze(-1))
    return logits.div_(temperature.to(logits.dtype).unsqueeze(-1))


def _finite(z: Tensor) -> Tensor:
    """`z` with `_LEAST_Z` for what is less, -inf too, which an exponential of 0 then cancels; NaN stays."""
    return z.clamp(min=_LEAST_Z)
