"""The lm_head in tiles, for the forms of `linear_logprobs` that see a vocabulary otherwise than whole.

Forward and backward use the same tiles, so that a logit computed again is the same to the bit. All tiles of
tokens have one height, the last filled up with zeros, so that a token's logits do not depend, to the bit, on
how many others there are. Factors are always widened, unlike those of `linear`, whose logits may be bfloat16.
Knows nothing of what is done with the logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.gemm import product
from rlbatch_kernels.linear import VOCAB_TILE
from rlbatch_kernels.reference import compute_dtype
from rlbatch_kernels.shaping import Shaping
from rlbatch_kernels.softmax import Softmax

GradOf: TypeAlias = Callable[[Tensor, slice, slice], Tensor]
"""(logits [n, v], rows, columns) -> gradient of the loss to them; may overwrite the logits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadTiles:
    """The head, and the trained rows it is applied to."""

    hidden: Tensor
    """[M, D] the trained rows in their own dtype, then zeros; M is the multiple of `token_tile` from N up."""
    num_tokens: int
    """N."""
    weight: Tensor
    """[V, D]."""
    bias: Tensor | None
    """[V]."""
    shaping: Shaping
    dtype: torch.dtype
    """float32 or float64: what is computed in."""
    token_tile: int
    """Rows of a tile."""

    @classmethod
    def of(
        cls,
        tensors: tuple[Tensor, Tensor, Tensor | None],
        trained: Trained,
        shaping: Shaping,
        *,
        token_tile: int,
    ) -> "HeadTiles":
        """Of hidden [..., D], weight [V, D] and bias [V] the trained rows."""
        hidden, weight, bias = tensors
        padding = -trained.num_tokens % token_tile
        return cls(
            hidden=torch.nn.functional.pad(trained.gather(hidden), (0, 0, 0, padding)),
            num_tokens=trained.num_tokens,
            weight=weight,
            bias=bias,
            shaping=shaping,
            dtype=compute_dtype(hidden, weight),
            token_tile=token_tile,
        )

    def rows(self) -> Iterator[slice]:
        """The tiles of tokens."""
        for first in range(0, self.num_tokens, self.token_tile):
            yield slice(first, min(first + self.token_tile, self.num_tokens))

    def columns(self) -> Iterator[slice]:
        """The tiles of the vocabulary."""
        for first in range(0, self.weight.shape[0], VOCAB_TILE):
            yield slice(first, min(first + VOCAB_TILE, self.weight.shape[0]))

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """[n, v], scaled and capped."""
        whole = self.hidden[rows.start : rows.start + self.token_tile].to(self.dtype)
        logits = product(whole, self.weight[columns].to(self.dtype))[: rows.stop - rows.start]
        if self.bias is not None:
            logits += self.bias[columns].to(self.dtype)
        return self.shaping.apply(logits)


class HeadGradients:
    """The gradients asked for: `hidden` [N, D] in the computing dtype, `weight` and `bias` in their own."""

    def __init__(self, head: HeadTiles, wanted: tuple[bool, ...]) -> None:
        self._head = head
        self.hidden = (
            torch.zeros_like(head.hidden[: head.num_tokens], dtype=head.dtype) if wanted[0] else None
        )
        self.weight = torch.empty_like(head.weight) if wanted[1] else None
        self.bias = torch.empty_like(head.bias) if head.bias is not None and wanted[2] else None

    def add_all(self, grad_of: GradOf) -> None:
        """Every tile, all rows of a tile of the vocabulary before the next, so that its sum is cast once."""
        head = self._head
        for columns in head.columns():
            weight_tile = head.weight[columns].to(head.dtype)
            grad_weight, grad_bias = torch.zeros_like(weight_tile), weight_tile.new_zeros(len(weight_tile))
            for rows in head.rows():
                logits = head.logits(rows, columns)
                # Before `grad_of`, which may overwrite them.
                slope = head.shaping.slope(logits)
                grad = grad_of(logits, rows, columns)
                if slope is not None:
                    grad *= slope
                if self.hidden is not None:
                    self.hidden[rows].addmm_(grad, weight_tile)
                if self.weight is not None:
                    grad_weight.addmm_(grad.t(), head.hidden[rows].to(head.dtype))
                grad_bias += grad.sum(dim=0)
            if self.weight is not None:
                self.weight[columns] = grad_weight.to(self.weight.dtype)
            if self.bias is not None:
                self.bias[columns] = grad_bias.to(self.bias.dtype)

    def hidden_like(self, hidden: Tensor, trained: Trained) -> Tensor | None:
        """The gradient of `hidden` [..., D], in its shape and dtype; None where it was not asked for."""
        if self.hidden is None:
            return None
        out = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        trained.put(out, self.hidden)
        return out


def scattered(softmax: Softmax, trained: Trained, dtype: torch.dtype) -> Tensor:
    """[...] logprobs, 0 where not trained."""
    out = torch.zeros(trained.shape, dtype=dtype, device=trained.target_ids.device)
    trained.put(out, softmax.logprobs())
    return out
