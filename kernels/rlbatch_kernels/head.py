"""The lm_head in tiles: `Head` gives tiles of logits, `HeadGradients` takes back the gradients to them.

Forward and backward use the same tiles, so that a logit computed again is the same to the bit. Tiles are
filled up with zeros to a height at which a row has the same bits in every tile, so that a token's logits do
not depend, to the bit, on how many others there are. Knows nothing of what is done with the logits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.gemm import product, rows_agree
from rlbatch_kernels.reference import compute_dtype
from rlbatch_kernels.shaping import Shaping

TOKEN_TILE = 512
"""Rows of a tile are a multiple of this: little to fill up, and enough for a GEMM to be worth calling."""

WHOLE_ROWS_TILE = 64
"""The same where rows must exist whole: 37 MiB of float32 at a vocabulary of 151,936."""

TALL_TILES = 4
"""So many make one taller tile of bfloat16 where that changes no bit: a GEMM lays out its weights anew each
call, which is much beside its bfloat16 products and little beside float32 ones."""

HIDDEN_BYTES = 2**22
"""A tile of hidden states is taller than TOKEN_TILE only within this: 4 MiB."""

VOCAB_TILE = 1024
"""Columns of a tile: 2 MiB of float32 logits, or 4 MiB of bfloat16 ones in the tallest."""

WIDENED_ELEMENTS = 2**19
"""A tile of weights that must be widened has at most so many elements: 2 MiB, and as much again in a GEMM."""

WriteGradient: TypeAlias = Callable[[Tensor, slice, slice, Tensor], None]
"""(logits [n, v], rows, columns, out [n, v]): the gradient of the loss to them; may overwrite the logits,
which may be `out`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """The head, the trained rows it is applied to, and how."""

    hidden: Tensor
    """[..., D]."""
    weight: Tensor
    """[V, D]."""
    bias: Tensor | None
    """[V]."""
    trained: Trained
    shaping: Shaping
    """What is done to tiles here."""
    logits_dtype: torch.dtype
    whole_rows: bool
    """Tiles are low enough for a row of them to exist at once."""

    @property
    def operand_dtype(self) -> torch.dtype:
        """What the factors of logits are in: bfloat16 where they and the logits are, else float32 or 64."""
        dtypes = {self.hidden.dtype, self.weight.dtype, self.logits_dtype}
        return torch.bfloat16 if dtypes == {torch.bfloat16} else compute_dtype(self.hidden, self.weight)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What the factors of gradients are in. Not float16: gradients of 1e-8 would be 0 in it."""
        both = self.hidden.dtype == self.weight.dtype == torch.bfloat16
        return torch.bfloat16 if both else compute_dtype(self.hidden, self.weight)

    @property
    def heights(self) -> tuple[int, int]:
        """Rows that a tile is a multiple of, and rows of a whole tile.

        By the head alone, never by how many tokens there are. Where a tile of TOKEN_TILE has other bits than
        taller ones, twice as many rows may agree with them: a library splits the sums of low tiles.
        """
        if self.whole_rows:
            return WHOLE_ROWS_TILE, WHOLE_ROWS_TILE
        width, dtype = self.hidden.shape[-1], self.operand_dtype
        if width and dtype == torch.bfloat16 and self.bias is None:
            tall = min(TALL_TILES, HIDDEN_BYTES // (width * dtype.itemsize * TOKEN_TILE)) * TOKEN_TILE
            # All tiles of the vocabulary but the last have one width.
            widths = {min(VOCAB_TILE, len(self.weight)), len(self.weight) % VOCAB_TILE or VOCAB_TILE}
            for step in (TOKEN_TILE, 2 * TOKEN_TILE):
                shapes = [(tall, width, columns) for columns in widths]
                if tall >= 2 * step and all(
                    rows_agree(shape, step, dtype, self.hidden.device) for shape in shapes
                ):
                    return step, tall
        return TOKEN_TILE, TOKEN_TILE

    def token_tiles(self) -> Iterator[slice]:
        """Trained rows of each tile; the last one may have fewer."""
        _, height = self.heights
        for first in range(0, self.trained.num_tokens, height):
            yield slice(first, min(first + height, self.trained.num_tokens))

    def vocab_tiles(self) -> Iterator[slice]:
        """Columns of each tile."""
        num_columns, width = self.weight.shape
        step = VOCAB_TILE
        if self.operand_dtype != self.weight.dtype:
            # Depends on the head alone, so that it is the same for every batch.
            step = max(1, min(VOCAB_TILE, WIDENED_ELEMENTS // width))
        for first in range(0, num_columns, step):
            yield slice(first, min(first + step, num_columns))

    def padded(self, num_rows: int) -> int:
        """Rows of the tiles that hold so many."""
        step, _ = self.heights
        return -(-num_rows // step) * step

    def hidden_tile(self, rows: slice) -> Tensor:
        """[n, D] in their own dtype, filled up to a multiple of `heights`: the trained rows, then zeros."""
        gathered = self.trained.gather(self.hidden, rows)
        height = self.padded(len(gathered))
        if len(gathered) == height:
            return gathered
        tile = gathered.new_zeros(height, gathered.shape[1])
        tile[: len(gathered)] = gathered
        return tile

    def raw_logits(self, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """[n, v] in `logits_dtype`, not shaped, from tiles in `operand_dtype`."""
        if self.bias is not None and hidden.dtype == torch.bfloat16:
            # Rounded once, after the bias, as a bfloat16 layer does.
            logits = torch.addmm(self.bias[columns].to(hidden.dtype), hidden, weight.t())
        else:
            logits = product(hidden, weight)
            if self.bias is not None:
                logits += self.bias[columns].to(logits.dtype)
        return logits.to(self.logits_dtype)

    def logits(self, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """[n, v] in `logits_dtype`, from tiles in `operand_dtype`."""
        return self.shaping.apply(self.raw_logits(hidden, weight, columns), columns.start)

    def tiles_of(self, rows: slice) -> Iterator[tuple[int, Tensor]]:
        """First column and logits [n, v] of each tile of these rows; where `whole_rows`, one of all columns.

        A tile should be let go before the next is asked for.
        """
        hidden, num_rows = self.hidden_tile(rows).to(self.operand_dtype), rows.stop - rows.start
        whole = (
            hidden.new_empty(num_rows, len(self.weight), dtype=self.logits_dtype) if self.whole_rows else None
        )
        for columns in self.vocab_tiles():
            weight = self.weight[columns].to(self.operand_dtype)
            if whole is None:
                yield columns.start, self.logits(hidden, weight, columns)[:num_rows]
            else:
                whole[:, columns] = self.logits(hidden, weight, columns)[:num_rows]
        if whole is not None:
            yield 0, whole


class HeadGradients:
    """The gradients asked for: hidden in the computing dtype and whole tiles, the others in their own."""

    def __init__(self, head: Head, wanted: tuple[bool, ...]) -> None:
        self._head = head
        self._dtype = compute_dtype(head.hidden, head.weight)
        rows = (head.padded(head.trained.num_tokens), head.weight.shape[1])
        self.hidden = head.weight.new_zeros(rows, dtype=self._dtype) if wanted[0] else None
        self.weight = torch.empty_like(head.weight) if wanted[1] else None
        self.bias = torch.empty_like(head.bias) if head.bias is not None and wanted[2] else None

    def add_all(self, write_gradient: WriteGradient) -> None:
        """Every tile, all rows of a tile of the vocabulary before the next, so that its sum is cast once."""
        for columns in self._head.vocab_tiles():
            self._add_columns(columns, write_gradient)

    def of_hidden(self) -> Tensor | None:
        """The gradient of `hidden` [..., D], in its shape and dtype; None where it was not asked for."""
        if self.hidden is None:
            return None
        head = self._head
        out = torch.zeros(head.hidden.shape, dtype=head.hidden.dtype, device=head.hidden.device)
        head.trained.put(out, self.hidden[: head.trained.num_tokens])
        return out

    def _add_columns(self, columns: slice, write_gradient: WriteGradient) -> None:
        head = self._head
        weight = head.weight[columns]
        operand, factor = weight.to(head.operand_dtype), weight.to(head.gradient_dtype)
        grad_weight = weight.new_zeros(weight.shape, dtype=self._dtype) if self.weight is not None else None
        grad_bias = weight.new_zeros(len(weight), dtype=self._dtype)
        for rows in head.token_tiles():
            hidden = head.hidden_tile(rows)
            grad_logits = self._grad_logits(hidden, operand, (rows, columns), write_gradient)
            if self.hidden is not None:
                self.hidden[rows.start : rows.start + len(hidden)] += product(grad_logits, factor.t())
            if grad_weight is not None:
                hidden = hidden.to(head.gradient_dtype)
                grad_weight += product(grad_logits.t(), hidden.t())
            if self.bias is not None:
                grad_bias += grad_logits.sum(dim=0, dtype=self._dtype)
            # The next tile must not be made while this one is held.
            del hidden, grad_logits
        if self.weight is not None and grad_weight is not None:
            self.weight[columns] = grad_weight.to(self.weight.dtype)
        if self.bias is not None:
            self.bias[columns] = grad_bias.to(self.bias.dtype)

    def _grad_logits(
        self, hidden: Tensor, weight: Tensor, tile: tuple[slice, slice], write_gradient: WriteGradient
    ) -> Tensor:
        """[n, v] in `gradient_dtype`, to what the head itself gave; 0 in the rows that fill up."""
        head, (rows, columns) = self._head, tile
        logits = head.raw_logits(hidden.to(head.operand_dtype), weight, columns)
        # Before they are overwritten.
        slope, num_rows = head.shaping.slope(logits, columns.start), rows.stop - rows.start
        head.shaping.apply(logits, columns.start)
        same_dtype = logits.dtype == head.gradient_dtype
        out = logits if same_dtype else torch.empty_like(logits, dtype=head.gradient_dtype)
        write_gradient(logits[:num_rows], rows, columns, out[:num_rows])
        out[num_rows:] = 0
        if slope is not None:
            out[:num_rows] *= slope if isinstance(slope, float) else slope[:num_rows].to(out.dtype)
        return out
