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

from rlbatch_kernels.errors import GroupError, ShapeError
from rlbatch_kernels.softmax import Softmax
from rlbatch_kernels.vocabulary import Vocabulary


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


class Shard(Vocabulary):
    """A rank's own columns."""

    def __init__(self, group: VocabGroup) -> None:
        self._group = group
        self.first_id = group.first_column

    def complete(self, softmax: Softmax) -> None:
        """Make the sums over a rank's own columns those over all, in place; the collectives of a forward.

        Raises:
            GroupError: masks, targets or temperatures that differ between the ranks; on every rank alike.
        """
        _combine(softmax, self._group)

    def complete_gradient(self, grad_hidden: Tensor) -> None:
        """Sum it over the ranks, in place; the collective of a backward."""
        dist.all_reduce(grad_hidden, group=self._group.process_group)


def _gathered(mine: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, mine, group=process_group)
    return torch.stack(parts)


def _combine(softmax: Softmax, group: VocabGroup) -> None:
    trained = softmax.trained
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
