"""The mathematics of the ops in plain torch: any device, any float dtype, float64 to check the others by.

Arguments are trusted; `ops` has checked them. `Softmax` is the one log-sum-exp, fed tile by tile, that
`token_logprobs` and `linear_logprobs` share; `k3` is the one estimator of the inference KLD.

Numerics, each of which was got wrong somewhere before:
- logprob = (logit - maximum) / temperature - log(total), the maximum subtracted before the division: at
  logits of 1e4 the quotients alone would be off by 5e-4 nats in float32;
- a token's own few scalars are float64, so only the exponentials and their sum are float32;
- columns of -inf add 0; a row of nothing but -inf, and any NaN or +inf, gives NaN, never a finite number.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlbatch_kernels.arguments import Trained

TILE_ELEMENTS = 2**22
"""Logits handled at once: 16 MiB in float32, small beside any [T, V], large enough to keep cores busy."""

MAX_EXPONENT = 20.0
"""exp is taken of values clamped to +-20: exp(20) is 4.9e8, and its square still adds up in float32."""

SERIES_BELOW = 0.5
"""Below this |log_ratio| k3 is a series; at it the first term left out is 4e-8 of the sum."""


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 for float64 arguments, float32 for every other float."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


class Softmax:
    """Online softmax of N rows whose logits come in tiles of columns, with each row's own temperature.

    Attributes:
        maximum: [N] float64, largest logit so far; -inf before the first.
        total: [N] float64, sum of exp((logit - maximum) / temperature).
        target: [N] float64, the logit of the row's target; NaN until its tile has come.
    """

    def __init__(self, trained: Trained) -> None:
        self._ids = trained.target_ids
        self._temperature = trained.temperature
        self.maximum = torch.full_like(trained.temperature, -math.inf)
        self.total = torch.zeros_like(trained.temperature)
        self.target = torch.full_like(trained.temperature, math.nan)

    def add(self, logits: Tensor, rows: slice, first_column: int) -> None:
        """Take in a tile [n, v] of the columns from `first_column`; overwrites it."""
        self._take_target(logits, rows, first_column)
        temperature, before = self._temperature[rows], self.maximum[rows]
        maximum = torch.maximum(before, logits.amax(dim=-1).to(torch.float64))
        # Where every logit so far is -inf any finite number serves: each exp below is 0.
        origin = maximum.masked_fill(maximum == -math.inf, 0.0)
        _exponentials(logits, origin, temperature)
        kept = self.total[rows] * torch.exp((before - origin) / temperature)
        self.total[rows] = kept + logits.sum(dim=-1)
        self.maximum[rows] = maximum

    def logprobs(self) -> Tensor:
        """[N] float64, once every column has been added."""
        return (self.target - self.maximum) / self._temperature - self.total.log()

    def backward(self, logits: Tensor, grad: Tensor, rows: slice, first_column: int) -> Tensor:
        """Gradient of the loss to a tile of logits, given `grad` [N] to the logprobs; overwrites the tile."""
        temperature, per_logit = (
            self._temperature[rows],
            grad[rows].to(torch.float64) / self._temperature[rows],
        )
        _exponentials(logits, self.maximum[rows], temperature)
        logits.mul_((-per_logit / self.total[rows]).to(logits.dtype).unsqueeze(-1))
        column, inside = self._columns(logits, rows, first_column)
        row = torch.arange(len(logits), device=logits.device)
        logits[row, column] += (per_logit * inside).to(logits.dtype)
        return logits

    def _take_target(self, logits: Tensor, rows: slice, first_column: int) -> None:
        column, inside = self._columns(logits, rows, first_column)
        found = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1).to(torch.float64)
        self.target[rows] = torch.where(inside, found, self.target[rows])

    def _columns(self, logits: Tensor, rows: slice, first_column: int) -> tuple[Tensor, Tensor]:
        column = self._ids[rows] - first_column
        inside = (column >= 0) & (column < logits.shape[-1])
        return torch.where(inside, column, 0), inside


def _exponentials(logits: Tensor, origin: Tensor, temperature: Tensor) -> None:
    """Turn a tile [n, v] into exp((logits - origin) / temperature), in place."""
    logits.sub_(origin.to(logits.dtype).unsqueeze(-1))
    logits.div_(temperature.to(logits.dtype).unsqueeze(-1)).exp_()


class TokenLogprobs(torch.autograd.Function):
    """Logprobs of targets from logits, in blocks of rows; the backward recomputes from two scalars a row."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, trained: Trained) -> Tensor:
        """[...] logprobs; 0 where not trained."""
        dtype = compute_dtype(logits)
        softmax = Softmax(trained)
        for rows in row_blocks(trained, logits):
            softmax.add(trained.gather(logits, rows).to(dtype), rows, 0)
        ctx.save_for_backward(logits)
        ctx.trained, ctx.softmax = trained, softmax  # type: ignore[attr-defined]
        out = torch.zeros(trained.shape, dtype=dtype, device=logits.device)
        trained.put(out, softmax.logprobs())
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor) -> tuple[Tensor, None]:
        """Gradient to the logits, in their dtype; 0 where not trained."""
        refuse_double_backward("token_logprobs")
        (logits,) = ctx.saved_tensors  # type: ignore[attr-defined]
        trained, softmax = ctx.trained, ctx.softmax  # type: ignore[attr-defined]
        grad, dtype = trained.gather(grad_logprobs), compute_dtype(logits)
        out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        for rows in row_blocks(trained, logits):
            grad_rows = softmax.backward(trained.gather(logits, rows).to(dtype), grad, rows, 0)
            trained.put(out, grad_rows, rows)
            # The next tile must not be made while this one is held.
            del grad_rows
        return out, None


def refuse_double_backward(op: str) -> None:
    """Called in a backward: refuse to be differentiated again.

    `once_differentiable` would not do: it drops the second derivative in silence where the first had a
    constant upstream, which is the common case.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{op}: found create_graph=True; double backward is not supported")


def row_blocks(trained: Trained, logits: Tensor) -> list[slice]:
    """The trained rows of `logits` in blocks of at most `TILE_ELEMENTS`, at least one row each."""
    step = max(1, TILE_ELEMENTS // logits.shape[-1])
    return [slice(first, first + step) for first in range(0, trained.num_tokens, step)]


def bounded(log_ratio: Tensor) -> Tensor:
    """`log_ratio` made safe for exp: clamped to +-MAX_EXPONENT; what is not finite stays as it is."""
    return torch.where(log_ratio.isfinite(), log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT), log_ratio)


class _K3(torch.autograd.Function):
    """exp(x) - 1 - x. Its own derivative, exp(x) - 1, is exact where that of a series is cut off."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        series = torch.full_like(x, 1 / math.factorial(8))
        for power in range(7, 1, -1):
            series = series * x + 1 / math.factorial(power)
        return torch.where(x.abs() < SERIES_BELOW, x * x * series, torch.expm1(bounded(x)) - x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * torch.expm1(bounded(x))


def k3(log_ratio: Tensor) -> Tensor:
    """ratio - 1 - log_ratio, never negative; relative error under 1e-6 in float32 from 1e-6 to 10.

    Beyond +-MAX_EXPONENT the ratio in it is clamped, in the value and in the gradient, which is ratio - 1.
    """
    value: Tensor = _K3.apply(log_ratio)  # type: ignore[no-untyped-call]
    return value
