"""Logprobs where each rank holds some columns of the vocabulary: Megatron's tensor-parallel lm_head.

Who has what: targets, mask, temperature and hidden states are whole and equal on every rank of the group;
logits, weight and bias are a rank's own columns. Every rank gets the same logprobs, to the bit.
Who reduces what: the values take one all_gather of [6, N] float64, combined in the order of the ranks, after
one of a single int64 a rank: collectives of other sizes would end the process, so N is compared first. The
gradients of logits, weight and bias are those of the rank's own columns and need no one else. The gradient of
hidden is a sum over all columns: the backward takes one all_reduce for it, so every rank has the whole of it
and nobody must reduce it again. The gradient that comes back to the logprobs must be equal on every rank.

An error that only one rank raises leaves the others waiting, as in every collective; those about the group
itself are raised on all.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.errors import GroupError, ShapeError
from rlbatch_kernels.head_tiles import HeadGradients, HeadTiles, scattered
from rlbatch_kernels.linear import TOKEN_TILE
from rlbatch_kernels.logprobs import Plan
from rlbatch_kernels.reference import compute_dtype, refuse_double_backward
from rlbatch_kernels.softmax import Softmax, Upstream


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VocabGroup:
    """The ranks that share a vocabulary, and which columns each has. Made once, by `VocabGroup.of`."""

    process_group: dist.ProcessGroup
    sizes: tuple[int, ...]
    """Columns of each rank, in the order of the ranks; their sum is V."""
    rank: int
    """This process's place in the group."""

    @classmethod
    def of(
        cls, process_group: dist.ProcessGroup, num_columns: int, *, device: torch.device | str
    ) -> "VocabGroup":
        """Tell the others how many columns this rank has; each rank must call, once.

        Args:
            process_group: the tensor-parallel group; its order is that of the columns.
            num_columns: of this rank; shards need not be even.
            device: where the group communicates: of the logits or weights.

        Raises:
            ShapeError: some rank has no column; on every rank alike.

        Example:
            ranks with 4, 4 and 3 columns: V is 11, and the last one's first column is 8
        """
        mine = torch.tensor([num_columns], dtype=torch.int64, device=device)
        sizes = tuple(_gathered(mine, process_group).flatten().tolist())
        if min(sizes) < 1:
            raise ShapeError(f"num_columns: found {list(sizes)} by rank, expected at least 1 on each")
        return cls(process_group=process_group, sizes=sizes, rank=dist.get_rank(process_group))

    @property
    def vocab_size(self) -> int:
        """V, of all ranks together."""
        return sum(self.sizes)

    @property
    def first_column(self) -> int:
        """Id that this rank's column 0 stands for."""
        return sum(self.sizes[: self.rank])

    def gather(self, mine: Tensor) -> Tensor:
        """[ranks, ...]: what each rank has given, in the order of the ranks; one collective."""
        return _gathered(mine, self.process_group)

    def require_own(self, name: str, num_columns: int) -> None:
        """Refuse an argument that is not this rank's share.

        Raises:
            ShapeError: it has another number of columns than the group was told.
        """
        if num_columns != self.sizes[self.rank]:
            raise ShapeError(
                f"{name}: found {num_columns} columns, expected {self.sizes[self.rank]}, "
                f"the share of rank {self.rank} in group.sizes {list(self.sizes)}"
            )


class ShardedTokenLogprobs(torch.autograd.Function):
    """Logprobs of targets from a rank's own columns of the logits."""

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, trained: Trained, plan: Plan, group: VocabGroup) -> Tensor:
        """[...] logprobs; 0 where not trained."""
        dtype, softmax = compute_dtype(logits), plan.softmax(trained)
        for rows in softmax.blocks(logits.shape[-1]):
            tile = plan.shaping.apply(trained.gather(logits, rows).to(dtype))
            softmax.add(tile, rows, group.first_column)
        combine(softmax, trained, group)
        ctx.save_for_backward(logits)
        ctx.trained, ctx.softmax = trained, softmax  # type: ignore[attr-defined]
        ctx.plan, ctx.group = plan, group  # type: ignore[attr-defined]
        return scattered(softmax, trained, dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_logprobs: Tensor) -> tuple[Tensor, None, None, None]:
        """Gradient to the rank's own logits, in their dtype; 0 where not trained."""
        refuse_double_backward("token_logprobs")
        (logits,) = ctx.saved_tensors  # type: ignore[attr-defined]
        trained, softmax = ctx.trained, ctx.softmax  # type: ignore[attr-defined]
        plan, group = ctx.plan, ctx.group  # type: ignore[attr-defined]
        grad_rows = trained.gather(grad_logprobs).to(torch.float64)
        given, dtype = softmax.coefficients(Upstream(logprobs=grad_rows)), compute_dtype(logits)
        out = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        for rows in softmax.blocks(logits.shape[-1]):
            tile = plan.shaping.apply(trained.gather(logits, rows).to(dtype))
            slope = plan.shaping.slope(tile)
            grad = softmax.backward(tile, given, rows, group.first_column)
            trained.put(out, grad if slope is None else grad * slope, rows)
        return out, None, None, None


class ShardedLinearLogprobs(torch.autograd.Function):
    """Logprobs of targets from hidden states and a rank's own rows of the head."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        trained: Trained,
        plan: Plan,
        group: VocabGroup,
    ) -> Tensor:
        """[...] logprobs; 0 where not trained."""
        head = HeadTiles.of((hidden, weight, bias), trained, plan.shaping, token_tile=TOKEN_TILE)
        softmax = plan.softmax(trained)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in head.columns():
                for rows in head.rows():
                    softmax.add(head.logits(rows, columns), rows, group.first_column + columns.start)
        combine(softmax, trained, group)
        ctx.save_for_backward(hidden, weight, bias)  # type: ignore[arg-type]
        ctx.trained, ctx.softmax = trained, softmax  # type: ignore[attr-defined]
        ctx.plan, ctx.group = plan, group  # type: ignore[attr-defined]
        return scattered(softmax, trained, head.dtype)

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        """Gradients to the whole hidden, and to the rank's own weight and bias."""
        refuse_double_backward("linear_logprobs")
        hidden, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        trained, softmax = ctx.trained, ctx.softmax  # type: ignore[attr-defined]
        plan, group = ctx.plan, ctx.group  # type: ignore[attr-defined]
        head = HeadTiles.of((hidden, weight, bias), trained, plan.shaping, token_tile=TOKEN_TILE)
        grads = HeadGradients(head, ctx.needs_input_grad)  # type: ignore[attr-defined]
        grad = trained.gather(grad_logprobs).to(torch.float64)
        given = softmax.coefficients(Upstream(logprobs=grad))

        def grad_of(logits: Tensor, rows: slice, columns: slice) -> Tensor:
            grad_logits: Tensor = softmax.backward(logits, given, rows, group.first_column + columns.start)
            return grad_logits

        with torch.autocast(hidden.device.type, enabled=False):
            grads.add_all(grad_of)
        if grads.hidden is not None:
            dist.all_reduce(grads.hidden, group=group.process_group)
        return grads.hidden_like(hidden, trained), grads.weight, grads.bias, None, None, None


def _gathered(mine: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, mine, group=process_group)
    return torch.stack(parts)


def combine(softmax: Softmax, trained: Trained, group: VocabGroup) -> None:
    """Make the sums over a rank's own columns those over all, in place; the collectives of a forward.

    Raises:
        GroupError: masks, targets or temperatures that differ between the ranks; on every rank alike.
    """
    ids = trained.target_ids
    counts = group.gather(ids.new_tensor(ids.numel())).tolist()
    if len(set(counts)) > 1:
        raise GroupError(f"mask: found {counts} trained tokens by rank, {_same_on_all(group)}")
    table = group.gather(
        torch.stack(
            [
                *(softmax.maximum, softmax.total, softmax.target),
                *(trained.positions().double(), ids.double(), trained.temperature),
            ]
        )
    )
    _require_equal(table[:, 3:], group)
    softmax.maximum = table[:, 0].amax(dim=0)
    # As in the sum over tiles: where every logit is -inf any finite number serves.
    origin = softmax.maximum.masked_fill(softmax.maximum == -math.inf, 0.0)
    softmax.total = torch.zeros_like(origin)
    for maximum, total in table[:, :2]:
        softmax.total += total * torch.exp((maximum - origin) / trained.temperature)
    ends = torch.tensor(group.sizes, device=ids.device).cumsum(0)
    owner = torch.searchsorted(ends, ids, right=True)
    softmax.target = table[:, 2].gather(0, owner.unsqueeze(0)).squeeze(0)


def _require_equal(table: Tensor, group: VocabGroup) -> None:
    """Refuse [ranks, 3, N] positions, ids and temperatures that are not the same on every rank."""
    apart = (table != table[:1]).any(dim=0)
    if not bool(apart.any()):
        return
    column, token = apart.nonzero()[0].tolist()
    name = ("mask (flat position)", "target_ids", "temperature")[column]
    raise GroupError(
        f"{name}: found {table[:, column, token].tolist()} by rank at trained token {token}, "
        f"{_same_on_all(group)}"
    )


def _same_on_all(group: VocabGroup) -> str:
    return f"expected the same on all {len(group.sizes)} ranks: do they share the batch, or only the weights?"
