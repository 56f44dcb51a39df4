"""The mathematics of ratios in plain torch: any device, any float dtype, float64 to check the others by.

`k3` is the one estimator of the inference KLD. The softmax that the logprob ops share is in `softmax`.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

MAX_EXPONENT = 20.0
"""exp is taken of values clamped to +-20: exp(20) is 4.9e8, and its square still adds up in float32."""

SERIES_BELOW = 0.5
"""Below this |log_ratio| k3 is a series; at it the first term left out is 4e-8 of the sum."""


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 for float64 arguments, float32 for every other float."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def refuse_double_backward(op: str) -> None:
    """Called in a backward: refuse to be differentiated again.

    `once_differentiable` would not do: it drops the second derivative in silence where the first had a
    constant upstream, which is the common case.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{op}: found create_graph=True; double backward is not supported")


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
