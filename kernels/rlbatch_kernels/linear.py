"""`linear_logprobs`: hidden x head in tiles, so that no [T, V] ever exists.

Logits are float32 (float64 for float64) unless they are asked for in bfloat16. For float32 logits tiles of
half-precision arguments are widened before the product, which makes every product exact and every sum
float32; bfloat16 logits are those that a bfloat16 GEMM rounds, up to 0.04 nats a token away. Autocast does
not reach in here; TF32, where the caller allows it, does (it loses nothing on half-precision arguments in the
forward).

Tiles are filled up with zeros to a height at which a row has the same bits in every tile, so that a token's
logprob does not depend, to the bit, on how many others there are. The forward keeps a few scalars a token;
the backward computes the logits again. Gradients of bfloat16 arguments come from bfloat16 products summed in
float32. Memory beyond arguments and gradients: the tiles, and in the backward the float32 gradients of the
trained hidden states and of one tile of weights. Double backward is not supported.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rlbatch_kernels.arguments import Trained
from rlbatch_kernels.gemm import product, rows_agree
from rlbatch_kernels.reference import compute_dtype, refuse_double_backward
from rlbatch_kernels.shaping import Shaping
from rlbatch_kernels.softmax import Coefficients, Softmax, Upstream

TOKEN_TILE = 512
"""Rows of a tile are a multiple of this: little to fill up, and enough for a GEMM to be worth calling."""

TALL_TILES = 4
"""So many make one taller tile of bfloat16 where that changes no bit: a GEMM lays out its weights anew each
call, which is much beside its bfloat16 products and little beside float32 ones."""

HIDDEN_BYTES = 2**22
"""A tile of hidden states is taller than TOKEN_TILE only within this: 4 MiB."""

VOCAB_TILE = 2048
"""Columns of a tile: 4 MiB of float32 logits, or 8 MiB of bfloat16 ones in the tallest."""

WIDENED_ELEMENTS = 2**20
"""A tile of weights that must be widened has at most so many elements: 4 MiB."""


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
    logits_dtype: torch.dtype

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
    def tile_height(self) -> int:
        """Rows of a whole tile, a multiple of TOKEN_TILE."""
        width, dtype = self.hidden.shape[-1], self.operand_dtype
        tall = min(TALL_TILES, HIDDEN_BYTES // (width * dtype.itemsize * TOKEN_TILE)) * TOKEN_TILE
        if tall <= TOKEN_TILE or self.trained.num_tokens <= TOKEN_TILE:
            return TOKEN_TILE
        if dtype != torch.bfloat16 or self.bias is not None:
            return TOKEN_TILE
        # All tiles of the vocabulary but the last have one width.
        *_, last = tiles = list(self.vocab_tiles())
        widths = {tile.stop - tile.start for tile in (tiles[0], last)}
        shapes = [(tall, width, columns) for columns in widths]
        agree = all(rows_agree(shape, TOKEN_TILE, dtype, self.hidden.device) for shape in shapes)
        return tall if agree else TOKEN_TILE

    def token_tiles(self) -> Iterator[slice]:
        """Trained rows of each tile; the last one may have fewer."""
        height = self.tile_height
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

    def hidden_tile(self, rows: slice) -> Tensor:
        """[n, D] in their own dtype, n a multiple of TOKEN_TILE: the trained rows, then zeros."""
        gathered = self.trained.gather(self.hidden, rows)
        height = whole_tiles(len(gathered))
        if len(gathered) == height:
            return gathered
        tile = gathered.new_zeros(height, gathered.shape[1])
        tile[: len(gathered)] = gathered
        return tile

    def logits(self, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """[n, v] in `logits_dtype`, from tiles in `operand_dtype`."""
        if self.bias is not None and hidden.dtype == torch.bfloat16:
            # Rounded once, after the bias, as a bfloat16 layer does.
            logits = torch.addmm(self.bias[columns].to(hidden.dtype), hidden, weight.t())
        else:
            logits = product(hidden, weight)
            if self.bias is not None:
                logits += self.bias[columns].to(logits.dtype)
        return self.shaping.apply(logits.to(self.logits_dtype), columns)


def whole_tiles(num_rows: int) -> int:
    """The next multiple of TOKEN_TILE."""
    return -(-num_rows // TOKEN_TILE) * TOKEN_TILE


class LinearLogprobs(torch.autograd.Function):
    """Logprobs of targets from hidden states and the head."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        softmax_type: type[Softmax],
    ) -> Tensor:
        """[...] logprobs; 0 where not trained. `head` holds the three tensors too."""
        softmax = softmax_type(head.trained)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in head.token_tiles():
                hidden_tile = head.hidden_tile(rows).to(head.operand_dtype)
                for columns in head.vocab_tiles():
                    weight_tile = weight[columns].to(head.operand_dtype)
                    logits = head.logits(hidden_tile, weight_tile, columns)
                    softmax.add(logits[: rows.stop - rows.start], rows, columns.start)
                    # The next tiles must not be made while these are held.
                    del weight_tile, logits
        ctx.save_for_backward(hidden, weight, bias)  # type: ignore[arg-type]
        ctx.softmax = softmax  # type: ignore[attr-defined]
        ctx.shaping, ctx.logits_dtype = head.shaping, head.logits_dtype  # type: ignore[attr-defined]
        dtype = compute_dtype(hidden, weight)
        out = torch.zeros(head.trained.shape, dtype=dtype, device=hidden.device)
        head.trained.put(out, softmax.logprobs())
        return out

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        """Gradients to hidden, weight and bias, each summed in float32 and cast once to its own dtype."""
        refuse_double_backward("linear_logprobs")
        hidden, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        softmax: Softmax = ctx.softmax  # type: ignore[attr-defined]
        trained = softmax.trained
        head = Head(
            hidden=hidden,
            weight=weight,
            bias=bias,
            trained=trained,
            shaping=ctx.shaping,  # type: ignore[attr-defined]
            logits_dtype=ctx.logits_dtype,  # type: ignore[attr-defined]
        )
        grads = _Gradients(head, ctx.needs_input_grad)  # type: ignore[attr-defined]
        given = softmax.coefficients(Upstream(logprobs=trained.gather(grad_logprobs).to(torch.float64)))
        with torch.autocast(hidden.device.type, enabled=False):
            for columns in head.vocab_tiles():
                grads.add_columns(columns, softmax, given)
        grad_hidden = None
        if grads.hidden is not None:
            grad_hidden = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
            trained.put(grad_hidden, grads.hidden[: trained.num_tokens])
        return grad_hidden, grads.weight, grads.bias, None, None


class _Gradients:
    """The gradients asked for: hidden in the computing dtype and whole tiles, the others in their own."""

    def __init__(self, head: Head, wanted: tuple[bool, ...]) -> None:
        self._head = head
        self._dtype = compute_dtype(head.hidden, head.weight)
        rows = (whole_tiles(head.trained.num_tokens), head.weight.shape[1])
        self.hidden = head.weight.new_zeros(rows, dtype=self._dtype) if wanted[0] else None
        self.weight = torch.empty_like(head.weight) if wanted[1] else None
        self.bias = torch.empty_like(head.bias) if head.bias is not None and wanted[2] else None

    def add_columns(self, columns: slice, softmax: Softmax, given: Coefficients) -> None:
        """Add one tile of the vocabulary: all tokens, so that the weight tile's sum is cast only once."""
        head = self._head
        weight = head.weight[columns]
        operand, factor = weight.to(head.operand_dtype), weight.to(head.gradient_dtype)
        grad_weight = weight.new_zeros(weight.shape, dtype=self._dtype) if self.weight is not None else None
        grad_bias = weight.new_zeros(len(weight), dtype=self._dtype)
        for rows in head.token_tiles():
            hidden = head.hidden_tile(rows)
            grad_logits = self._grad_logits(hidden, operand, (rows, columns), softmax, given)
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
        self,
        hidden: Tensor,
        weight: Tensor,
        tile: tuple[slice, slice],
        softmax: Softmax,
        given: Coefficients,
    ) -> Tensor:
        """[n, v] in `gradient_dtype`, to what the head itself gave; 0 in the rows that fill up."""
        head, (rows, columns) = self._head, tile
        logits = head.logits(hidden.to(head.operand_dtype), weight, columns)
        slope, num_rows = head.shaping.slope(logits, columns), rows.stop - rows.start
        out = (
            logits
            if logits.dtype == head.gradient_dtype
            else logits.new_empty(logits.shape, dtype=head.gradient_dtype)
        )
        written = softmax.backward(logits[:num_rows], given, rows, columns.start, out[:num_rows])
        out[num_rows:] = 0
        if slope is not None:
            written *= slope if isinstance(slope, float) else slope[:num_rows].to(out.dtype)
        return out
