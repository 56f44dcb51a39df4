"""`linear_logprobs` in plain torch: hidden x head in tiles, so that no [T, V] ever exists.

Logits are float32 (float64 for float64): tiles of half-precision arguments are widened before the product,
which makes every product exact and every sum float32. Rounding logits to bfloat16 instead, as a bfloat16
GEMM does, costs up to 0.04 nats a token. Autocast does not reach in here; TF32, where the caller allows it,
does (it loses nothing on bfloat16 and float16 arguments in the forward).

The forward keeps two scalars a token; the backward computes the logits again, a tile at a time. Memory beyond
arguments and gradients: one tile of logits, one of weights, and in the backward the float32 gradients of the
trained hidden states and of one tile of weights. Double backward is not supported.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.reference import Softmax, compute_dtype, refuse_double_backward

TOKEN_TILE = 1024
"""Rows of a tile: enough for a GEMM at full speed, and few passes over the gradient of a weight tile."""

VOCAB_TILE = 4096
"""Columns of a tile: with TOKEN_TILE rows 16 MiB of float32 logits, which a large cache still holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What a model does to its logits after the head."""

    logit_scale: float
    """Multiplies them first."""
    soft_cap: float | None
    """Then cap * tanh(logits / cap); None = not."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Head:
    """The head, and the trained rows it is applied to."""

    hidden: Tensor
    """[N, D] trained rows, in the dtype they came in."""
    weight: Tensor
    """[V, D]."""
    bias: Tensor | None
    """[V]."""
    scaling: Scaling
    dtype: torch.dtype
    """float32 or float64: what is computed in."""

    def token_tiles(self) -> list[slice]:
        return [slice(first, first + TOKEN_TILE) for first in range(0, self.hidden.shape[0], TOKEN_TILE)]

    def vocab_tiles(self) -> list[slice]:
        return [slice(first, first + VOCAB_TILE) for first in range(0, self.weight.shape[0], VOCAB_TILE)]

    def logits(self, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """[n, v] from tiles already in `dtype`."""
        logits = hidden @ weight.t()
        if self.bias is not None:
            logits += self.bias[columns].to(self.dtype)
        if self.scaling.logit_scale != 1.0:
            logits *= self.scaling.logit_scale
        if self.scaling.soft_cap is not None:
            logits.div_(self.scaling.soft_cap).tanh_().mul_(self.scaling.soft_cap)
        return logits

    def slope(self, logits: Tensor) -> Tensor | None:
        """Derivative [n, v] of `logits` to what the cap was given; None without a cap."""
        cap = self.scaling.soft_cap
        return None if cap is None else 1 - (logits / cap).square_()


class LinearLogprobs(torch.autograd.Function):
    """Logprobs of targets from hidden states and the head."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        trained: Trained,
        scaling: Scaling,
    ) -> Tensor:
        """[...] logprobs; 0 where not trained."""
        head = _head(hidden, weight, bias, trained, scaling)
        softmax = Softmax(trained)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in head.vocab_tiles():
                weight_tile = head.weight[columns].to(head.dtype)
                for rows in head.token_tiles():
                    hidden_tile = head.hidden[rows].to(head.dtype)
                    softmax.add(head.logits(hidden_tile, weight_tile, columns), rows, columns.start)
        # The trained rows are gathered again in the backward rather than kept.
        ctx.save_for_backward(hidden, weight, bias)  # type: ignore[arg-type]
        ctx.trained, ctx.softmax, ctx.scaling = trained, softmax, scaling  # type: ignore[attr-defined]
        out = torch.zeros(trained.shape, dtype=head.dtype, device=hidden.device)
        trained.put(out, softmax.logprobs())
        return out

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Gradients to hidden, weight and bias, each summed in float32 and cast once to its own dtype."""
        refuse_double_backward("linear_logprobs")
        hidden, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        trained: Trained = ctx.trained  # type: ignore[attr-defined]
        head = _head(hidden, weight, bias, trained, ctx.scaling)  # type: ignore[attr-defined]
        grads = _Gradients(head, ctx.needs_input_grad)  # type: ignore[attr-defined]
        grad = trained.gather(grad_logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in head.vocab_tiles():
                grads.add_columns(columns, ctx.softmax, grad)  # type: ignore[attr-defined]
        grad_hidden = None
        if grads.hidden is not None:
            grad_hidden = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
            trained.put(grad_hidden, grads.hidden)
        return grad_hidden, grads.weight, grads.bias, None, None


class _Gradients:
    """The gradients asked for: hidden [N, D] in the computing dtype, weight and bias in their own."""

    def __init__(self, head: _Head, wanted: tuple[bool, ...]) -> None:
        self._head = head
        self.hidden = torch.zeros_like(head.hidden, dtype=head.dtype) if wanted[0] else None
        self.weight = torch.empty_like(head.weight) if wanted[1] else None
        self.bias = torch.empty_like(head.bias) if head.bias is not None and wanted[2] else None

    def add_columns(self, columns: slice, softmax: Softmax, grad: Tensor) -> None:
        """Add one tile of the vocabulary: all tokens, so that the weight tile's sum is cast only once."""
        head = self._head
        weight_tile = head.weight[columns].to(head.dtype)
        grad_weight = torch.zeros_like(weight_tile) if self.weight is not None else None
        grad_bias = weight_tile.new_zeros(weight_tile.shape[0])
        for rows in head.token_tiles():
            hidden_tile = head.hidden[rows].to(head.dtype)
            logits = head.logits(hidden_tile, weight_tile, columns)
            slope = head.slope(logits)
            grad_logits = softmax.backward(logits, grad, rows, columns.start)
            # The next tile's logits must not be made while this one's are held.
            del logits
            if slope is not None:
                grad_logits *= slope
            grad_logits *= head.scaling.logit_scale
            if self.hidden is not None:
                self.hidden[rows].addmm_(grad_logits, weight_tile)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), hidden_tile)
            if self.bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            del grad_logits, slope
        if self.weight is not None and grad_weight is not None:
            self.weight[columns] = grad_weight.to(self.weight.dtype)
        if self.bias is not None:
            self.bias[columns] = grad_bias.to(self.bias.dtype)


def _head(hidden: Tensor, weight: Tensor, bias: Tensor | None, trained: Trained, scaling: Scaling) -> _Head:
    return _Head(
        hidden=trained.gather(hidden),
        weight=weight,
        bias=bias,
        scaling=scaling,
        dtype=compute_dtype(hidden, weight),
    )
