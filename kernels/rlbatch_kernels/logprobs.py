"""The autograd function of `token_logprobs` and `token_statistics`: what is kept, and where gradients go."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.reference import compute_dtype, refuse_double_backward
from rlbatch_kernels.shaping import Shaping
from rlbatch_kernels.softmax import Coefficients, Softmax, Upstream
from rlbatch_kernels.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """How a call is carried out."""

    softmax: type[Softmax]
    """The backend's."""
    shaping: Shaping
    """What is done to the logits first."""
    vocabulary: Vocabulary
    """Which columns are kept, and which are here."""
    rounds_logits: bool = False
    """Logits are rounded to bfloat16, and again after each thing that is done to them, as a model does."""

    @property
    def shapes_tiles(self) -> bool:
        """Whether logits are shaped before a softmax sees them: kept sets are found in shaped ones, and only
        torch rounds between two steps. Else the softmax shapes them as it reads."""
        rounds = self.rounds_logits and self.shaping.changes_values
        return rounds or not self.vocabulary.excludes_nothing

    @property
    def tile_shaping(self) -> Shaping:
        """What is done to tiles before the softmax."""
        return self.shaping if self.shapes_tiles else Shaping()

    def new_softmax(self, trained: Trained, *, full: bool = False) -> Softmax:
        """One that has seen nothing yet, and does what is not done to tiles."""
        return self.softmax(trained, shaping=Shaping() if self.shapes_tiles else self.shaping, full=full)


class RowStatistics(torch.autograd.Function):
    """Logprob, log-sum-exp, entropy and rank of targets; the backward recomputes from a few scalars a row."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: Tensor, trained: Trained, plan: Plan, full: bool, in_place: bool
    ) -> tuple[Tensor, ...]:
        """Four [...] tensors, or only the logprobs unless `full`; 0 where not trained.

        `in_place`: the backward writes the gradient over the logits.
        """
        softmax, vocabulary = plan.new_softmax(trained, full=full), plan.vocabulary
        if not plan.shapes_tiles:
            softmax.add_rows(logits, vocabulary.first_id)
        else:
            for rows in softmax.blocks(logits.shape[-1]):
                tile = plan.shaping.apply(_tile(logits, trained, rows), 0)
                vocabulary.learn(tile, rows)
                vocabulary.exclude(tile, rows, 0)
                softmax.add(tile, rows, vocabulary.first_id)
                # The next tile must not be made while this one is held.
                del tile
        vocabulary.complete(softmax)
        ctx.save_for_backward(logits)
        ctx.set_materialize_grads(False)
        ctx.softmax, ctx.plan, ctx.in_place = softmax, plan, in_place  # type: ignore[attr-defined]
        dtype = compute_dtype(logits)
        results = [softmax.logprobs()]
        if full:
            results += [softmax.log_sum_exp(), softmax.entropy()]
        outputs = [placed(trained, values, dtype) for values in results]
        if softmax.above is not None:
            outputs.append(placed(trained, softmax.above + 1, torch.int64))
            ctx.mark_non_differentiable(outputs[-1])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        """Gradient to the logits, in their dtype; 0 where not trained."""
        refuse_double_backward("token_logprobs")
        (logits,) = ctx.saved_tensors  # type: ignore[attr-defined]
        softmax: Softmax = ctx.softmax  # type: ignore[attr-defined]
        plan: Plan = ctx.plan  # type: ignore[attr-defined]
        if all(grad is None for grad in grads):
            return None, None, None, None, None
        trained = softmax.trained
        given = [None if grad is None else trained.gather(grad).to(torch.float64) for grad in grads[:3]]
        logprobs = torch.zeros_like(softmax.total) if given[0] is None else given[0]
        upstream = Upstream(
            logprobs=plan.vocabulary.upstream(softmax, logprobs),
            **dict(zip(("log_sum_exp", "entropy"), given[1:], strict=False)),
        )
        if ctx.in_place:  # type: ignore[attr-defined]
            out = logits.detach()
            # Whoever else has kept the logits for a backward must notice.
            torch.autograd.graph.increment_version(logits)
        else:
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _write_gradient(logits, softmax, plan, softmax.coefficients(upstream), out)
        trained.zero_elsewhere(out)
        return out, None, None, None, None


def placed(trained: Trained, values: Tensor, dtype: torch.dtype) -> Tensor:
    """[...] in `dtype`: the `values` [N] of the trained positions, 0 elsewhere."""
    out = torch.zeros(trained.shape, dtype=dtype, device=values.device)
    trained.put(out, values)
    return out


def _write_gradient(logits: Tensor, softmax: Softmax, plan: Plan, given: Coefficients, out: Tensor) -> None:
    vocabulary = plan.vocabulary
    if not plan.shapes_tiles:
        softmax.backward_rows(logits, given, out, vocabulary.first_id)
        return
    trained = softmax.trained
    for rows in softmax.blocks(logits.shape[-1]):
        tile = _tile(logits, trained, rows)
        # Before the tile is overwritten.
        slope = plan.shaping.slope(tile, 0)
        plan.shaping.apply(tile, 0)
        vocabulary.exclude(tile, rows, 0)
        grad = softmax.backward(tile, given, rows, vocabulary.first_id)
        trained.put(out, grad if slope is None else grad * slope, rows)
        # The next tile must not be made while this one is held.
        del tile, slope, grad


def _tile(logits: Tensor, trained: Trained, rows: slice) -> Tensor:
    return trained.gather(logits, rows).to(compute_dtype(logits))
