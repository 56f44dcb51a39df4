"""The autograd function of `token_logprobs` and `token_statistics`: what is kept, and where gradients go."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.reference import compute_dtype, refuse_double_backward
from rlbatch_kernels.shaping import Shaping
from rlbatch_kernels.softmax import Coefficients, Softmax, Upstream


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a call is carried out."""

    softmax: type[Softmax]
    """The backend's."""
    shaping: Shaping
    """What is done to the logits first."""
    in_place: bool
    """The backward writes the gradient over the logits."""


class RowStatistics(torch.autograd.Function):
    """Logprob, log-sum-exp, entropy and rank of targets; the backward recomputes from a few scalars a row."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, trained: Trained, plan: Plan, full: bool
    ) -> tuple[Tensor, ...]:
        """Four [...] tensors, or only the logprobs unless `full`; 0 where not trained."""
        softmax = plan.softmax(trained, full=full)
        if plan.shaping.changes_nothing:
            softmax.add_rows(logits)
        else:
            for rows in softmax.blocks(logits.shape[-1]):
                softmax.add(plan.shaping.apply(_tile(logits, trained, rows)), rows, 0)
        ctx.save_for_backward(logits)
        ctx.set_materialize_grads(False)
        ctx.softmax, ctx.plan = softmax, plan  # type: ignore[attr-defined]
        dtype = compute_dtype(logits)
        results = [softmax.logprobs()]
        if full:
            results += [softmax.log_sum_exp(), softmax.entropy()]
        placed = [_placed(trained, values, dtype) for values in results]
        if softmax.above is not None:
            placed.append(_placed(trained, softmax.above + 1, torch.int64))
            ctx.mark_non_differentiable(placed[-1])
        return tuple(placed)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        """Gradient to the logits, in their dtype; 0 where not trained."""
        refuse_double_backward("token_logprobs")
        (logits,) = ctx.saved_tensors  # type: ignore[attr-defined]
        softmax: Softmax = ctx.softmax  # type: ignore[attr-defined]
        plan: Plan = ctx.plan  # type: ignore[attr-defined]
        if all(grad is None for grad in grads):
            return None, None, None, None
        trained = softmax.trained
        given = [None if grad is None else trained.gather(grad).to(torch.float64) for grad in grads[:3]]
        logprobs = torch.zeros_like(softmax.total) if given[0] is None else given[0]
        upstream = Upstream(
            logprobs=logprobs, **dict(zip(("log_sum_exp", "entropy"), given[1:], strict=False))
        )
        out = (
            logits.detach()
            if plan.in_place
            else torch.empty_like(logits, memory_format=torch.contiguous_format)
        )
        if plan.in_place:
            # Whoever else has kept the logits for a backward must notice.
            torch.autograd.graph.increment_version(logits)
        _write_gradient(logits, softmax, plan.shaping, softmax.coefficients(upstream), out)
        trained.zero_elsewhere(out)
        return out, None, None, None


def _write_gradient(
    logits: Tensor, softmax: Softmax, shaping: Shaping, given: Coefficients, out: Tensor
) -> None:
    if shaping.changes_nothing:
        softmax.backward_rows(logits, given, out)
        return
    trained = softmax.trained
    for rows in softmax.blocks(logits.shape[-1]):
        shaped = shaping.apply(_tile(logits, trained, rows))
        slope = shaping.slope(shaped)
        grad = softmax.backward(shaped, given, rows, 0)
        trained.put(out, grad if slope is None else grad * slope, rows)
        # The next tile must not be made while this one is held.
        del shaped, slope, grad


def _tile(logits: Tensor, trained: Trained, rows: slice) -> Tensor:
    return trained.gather(logits, rows).to(compute_dtype(logits))


def _placed(trained: Trained, values: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(trained.shape, dtype=dtype, device=values.device)
    trained.put(out, values)
    return out
