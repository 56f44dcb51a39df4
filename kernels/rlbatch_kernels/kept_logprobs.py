"""Logprobs over kept sets: those of `logprobs` and `linear`, with -inf outside each row's set.

The gradient is that of the softmax over the set, which is held fixed. A target outside its set has logprob
-inf, a constant, and so no gradient, whatever comes back for it.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.head_tiles import HeadGradients, HeadTiles, scattered
from rlbatch_kernels.logprobs import Plan
from rlbatch_kernels.reference import compute_dtype, refuse_double_backward
from rlbatch_kernels.softmax import Coefficients, Softmax, Upstream
from rlbatch_kernels.truncation import KeptSets

TOKEN_TILE = 64
"""Rows whose logits exist for all columns at once: 37 MiB of float32 at a vocabulary of 151,936."""


class KeptTokenLogprobs(torch.autograd.Function):
    """Logprobs of targets from logits, over kept sets."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, trained: Trained, plan: Plan, sets: KeptSets) -> Tensor:
        """[...] logprobs; 0 where not trained, -inf where the target is outside."""
        dtype, softmax = compute_dtype(logits), plan.softmax(trained)
        for rows in softmax.blocks(logits.shape[-1]):
            tile = plan.shaping.apply(trained.gather(logits, rows).to(dtype))
            sets.learn(tile, rows)
            sets.exclude(tile, rows, 0)
            softmax.add(tile, rows, 0)
        ctx.save_for_backward(logits)
        ctx.trained, ctx.softmax = trained, softmax  # type: ignore[attr-defined]
        ctx.plan, ctx.sets = plan, sets  # type: ignore[attr-defined]
        return scattered(softmax, trained, dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient to the logits, in their dtype; 0 where not trained and outside the sets."""
        refuse_double_backward("token_logprobs")
        (logits,) = ctx.saved_tensors  # type: ignore[attr-defined]
        trained, softmax = ctx.trained, ctx.softmax  # type: ignore[attr-defined]
        plan, sets = ctx.plan, ctx.sets  # type: ignore[attr-defined]
        given, dtype = _given_inside(softmax, trained, grad_logprobs), compute_dtype(logits)
        out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        for rows in softmax.blocks(logits.shape[-1]):
            tile = plan.shaping.apply(trained.gather(logits, rows).to(dtype))
            slope = plan.shaping.slope(tile)
            sets.exclude(tile, rows, 0)
            grad = softmax.backward(tile, given, rows, 0)
            trained.put(out, grad if slope is None else grad * slope, rows)
        return out, None, None, None


class KeptLinearLogprobs(torch.autograd.Function):
    """Logprobs of targets from hidden states and the head, over kept sets."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        trained: Trained,
        plan: Plan,
        sets: KeptSets,
    ) -> Tensor:
        """[...] logprobs; 0 where not trained, -inf where the target is outside."""
        head = HeadTiles.of((hidden, weight, bias), trained, plan.shaping, token_tile=TOKEN_TILE)
        softmax = plan.softmax(trained)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in head.rows():
                whole = torch.empty(
                    rows.stop - rows.start, len(weight), dtype=head.dtype, device=hidden.device
                )
                for columns in head.columns():
                    whole[:, columns] = head.logits(rows, columns)
                sets.learn(whole, rows)
                sets.exclude(whole, rows, 0)
                softmax.add(whole, rows, 0)
        ctx.save_for_backward(hidden, weight, bias)  # type: ignore[arg-type]
        ctx.trained, ctx.softmax = trained, softmax  # type: ignore[attr-defined]
        ctx.plan, ctx.sets = plan, sets  # type: ignore[attr-defined]
        return scattered(softmax, trained, head.dtype)

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        """Gradients to hidden, weight and bias, each summed in float32 and cast once to its own dtype."""
        refuse_double_backward("linear_logprobs")
        hidden, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        trained, softmax = ctx.trained, ctx.softmax  # type: ignore[attr-defined]
        plan, sets = ctx.plan, ctx.sets  # type: ignore[attr-defined]
        head = HeadTiles.of((hidden, weight, bias), trained, plan.shaping, token_tile=TOKEN_TILE)
        grads = HeadGradients(head, ctx.needs_input_grad)  # type: ignore[attr-defined]
        given = _given_inside(softmax, trained, grad_logprobs)

        def grad_of(logits: Tensor, rows: slice, columns: slice) -> Tensor:
            sets.exclude(logits, rows, columns.start)
            grad_logits: Tensor = softmax.backward(logits, given, rows, columns.start)
            return grad_logits

        with torch.autocast(hidden.device.type, enabled=False):
            grads.add_all(grad_of)
        return grads.hidden_like(hidden, trained), grads.weight, grads.bias, None, None, None


def _given_inside(softmax: Softmax, trained: Trained, grad_logprobs: Tensor) -> Coefficients:
    """Of targets outside nothing comes back: 0 times infinity, which a loss may give there, is NaN."""
    grad = trained.gather(grad_logprobs).to(torch.float64)
    return softmax.coefficients(Upstream(logprobs=grad.masked_fill(softmax.logprobs() == -math.inf, 0.0)))
