"""Logprobs over kept sets: those of `reference` and `linear`, with -inf outside each row's set.

The gradient is that of the softmax over the set, which is held fixed. A target outside its set has logprob
-inf, a constant, and so no gradient, whatever comes back for it. Plain torch on every device.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.head_tiles import HeadGradients, HeadTiles, scattered
from rlbatch_kernels.linear import Scaling
from rlbatch_kernels.reference import Softmax, compute_dtype, refuse_double_backward, row_blocks
from rlbatch_kernels.truncation import KeptSets

TOKEN_TILE = 64
"""Rows whose logits exist for all columns at once: 37 MiB of float32 at a vocabulary of 151,936."""


class KeptTokenLogprobs(torch.autograd.Function):
    """Logprobs of targets from logits, over kept sets."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, trained: Trained, sets: KeptSets) -> Tensor:
        """[...] logprobs; 0 where not trained, -inf where the target is outside."""
        dtype, softmax = compute_dtype(logits), Softmax(trained)
        for rows in row_blocks(trained, logits):
            tile = trained.gather(logits, rows).to(dtype)
            sets.learn(tile, rows)
            sets.exclude(tile, rows, 0)
            softmax.add(tile, rows, 0)
        ctx.save_for_backward(logits)
        ctx.trained, ctx.softmax, ctx.sets = trained, softmax, sets  # type: ignore[attr-defined]
        return scattered(softmax, trained, dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor) -> tuple[Tensor, None, None]:
        """Gradient to the logits, in their dtype; 0 where not trained and outside the sets."""
        refuse_double_backward("token_logprobs")
        (logits,) = ctx.saved_tensors  # type: ignore[attr-defined]
        trained, softmax, sets = ctx.trained, ctx.softmax, ctx.sets  # type: ignore[attr-defined]
        grad, dtype = _grad_inside(trained, softmax, grad_logprobs), compute_dtype(logits)
        out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        for rows in row_blocks(trained, logits):
            tile = trained.gather(logits, rows).to(dtype)
            sets.exclude(tile, rows, 0)
            trained.put(out, softmax.backward(tile, grad, rows, 0), rows)
        return out, None, None


class KeptLinearLogprobs(torch.autograd.Function):
    """Logprobs of targets from hidden states and the head, over kept sets."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        trained: Trained,
        scaling: Scaling,
        sets: KeptSets,
    ) -> Tensor:
        """[...] logprobs; 0 where not trained, -inf where the target is outside."""
        head = HeadTiles.of((hidden, weight, bias), trained, scaling, token_tile=TOKEN_TILE)
        softmax = Softmax(trained)
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
        ctx.trained, ctx.softmax, ctx.sets, ctx.scaling = trained, softmax, sets, scaling  # type: ignore[attr-defined]
        return scattered(softmax, trained, head.dtype)

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        """Gradients to hidden, weight and bias, each summed in float32 and cast once to its own dtype."""
        refuse_double_backward("linear_logprobs")
        hidden, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        trained, softmax, sets = ctx.trained, ctx.softmax, ctx.sets  # type: ignore[attr-defined]
        head = HeadTiles.of((hidden, weight, bias), trained, ctx.scaling, token_tile=TOKEN_TILE)  # type: ignore[attr-defined]
        grads = HeadGradients(head, ctx.needs_input_grad)  # type: ignore[attr-defined]
        grad = _grad_inside(trained, softmax, grad_logprobs)

        def grad_of(logits: Tensor, rows: slice, columns: slice) -> Tensor:
            sets.exclude(logits, rows, columns.start)
            grad_logits: Tensor = softmax.backward(logits, grad, rows, columns.start)
            return grad_logits

        with torch.autocast(hidden.device.type, enabled=False):
            grads.add_all(grad_of)
        return grads.hidden_like(hidden, trained), grads.weight, grads.bias, None, None, None


def _grad_inside(trained: Trained, softmax: Softmax, grad_logprobs: Tensor) -> Tensor:
    """[N]; 0 where the target is outside: 0 times infinity, which a loss may give back there, is NaN."""
    return trained.gather(grad_logprobs).masked_fill(softmax.logprobs() == -math.inf, 0.0)
