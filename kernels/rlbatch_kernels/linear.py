"""`linear_logprobs`: hidden x head in tiles, so that no [T, V] ever exists.

Logits are float32 (float64 for float64) unless they are asked for in bfloat16. For float32 logits tiles of
half-precision arguments are widened before the product, which makes every product exact and every sum
float32; bfloat16 logits are those that a bfloat16 GEMM rounds, up to 0.04 nats a token away. Neither autocast
nor `torch.set_float32_matmul_precision` reaches in here, but that TF32, where the caller allows it, serves
half-precision arguments (it loses nothing on them in the forward). On CUDA float32 logits of half-precision
arguments are reduced as they are made, never in memory (`rlbatch_kernels.triton_linear`).

The forward keeps a few scalars a token; the backward computes the logits again. Gradients of bfloat16
arguments come from bfloat16 products summed in float32. Memory beyond arguments and gradients: the tiles
(see `rlbatch_kernels.head`), and in the backward the float32 gradients of the trained hidden states and of
one tile of weights. Double backward is not supported.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.gemm import exact_products
from rlbatch_kernels.head import Head, HeadGradients
from rlbatch_kernels.logprobs import Plan, placed
from rlbatch_kernels.reference import compute_dtype, refuse_double_backward
from rlbatch_kernels.softmax import Softmax, Upstream
from rlbatch_kernels.vocabulary import Vocabulary


class LinearLogprobs(torch.autograd.Function):
    """Logprobs of targets from hidden states and the head."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        trained: Trained,
        plan: Plan,
        logits_dtype: torch.dtype,
    ) -> Tensor:
        """[...] logprobs; 0 where not trained."""
        softmax, vocabulary = plan.new_softmax(trained), plan.vocabulary
        head = _head(hidden, weight, bias, trained, plan, logits_dtype)
        with torch.autocast(hidden.device.type, enabled=False), exact_products(hidden, weight):
            if plan.shapes_tiles or not softmax.add_head(head, vocabulary.first_id):
                _add_tiles(softmax, head, vocabulary)
        vocabulary.complete(softmax)
        ctx.save_for_backward(hidden, weight, bias)  # type: ignore[arg-type]
        ctx.softmax, ctx.plan, ctx.logits_dtype = softmax, plan, logits_dtype  # type: ignore[attr-defined]
        return placed(trained, softmax.logprobs(), compute_dtype(hidden, weight))

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        """Gradients to hidden, weight and bias, each summed in float32 and cast once to its own dtype."""
        refuse_double_backward("linear_logprobs")
        hidden, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        softmax: Softmax = ctx.softmax  # type: ignore[attr-defined]
        plan: Plan = ctx.plan  # type: ignore[attr-defined]
        trained, vocabulary = softmax.trained, plan.vocabulary
        head = _head(hidden, weight, bias, trained, plan, ctx.logits_dtype)  # type: ignore[attr-defined]
        grads = HeadGradients(head, ctx.needs_input_grad)  # type: ignore[attr-defined]
        upstream = vocabulary.upstream(softmax, trained.gather(grad_logprobs).to(torch.float64))
        given = softmax.coefficients(Upstream(logprobs=upstream))

        def write_gradient(logits: Tensor, rows: slice, columns: slice, out: Tensor) -> None:
            vocabulary.exclude(logits, rows, columns.start)
            softmax.backward(logits, given, rows, vocabulary.first_id + columns.start, out)

        with torch.autocast(hidden.device.type, enabled=False), exact_products(hidden, weight):
            grads.add_all(write_gradient)
        if grads.hidden is not None:
            vocabulary.complete_gradient(grads.hidden)
        return grads.of_hidden(), grads.weight, grads.bias, None, None, None


def _add_tiles(softmax: Softmax, head: Head, vocabulary: Vocabulary) -> None:
    for rows in head.token_tiles():
        for first_column, logits in head.tiles_of(rows):
            vocabulary.learn(logits, rows)
            vocabulary.exclude(logits, rows, first_column)
            softmax.add(logits, rows, vocabulary.first_id + first_column)
            # The next tile must not be made while this one is held.
            del logits


def _head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    trained: Trained,
    plan: Plan,
    logits_dtype: torch.dtype,
) -> Head:
    return Head(
        hidden=hidden,
        weight=weight,
        bias=bias,
        trained=trained,
        shaping=plan.tile_shaping,
        logits_dtype=logits_dtype,
        whole_rows=plan.vocabulary.needs_whole_rows,
    )
