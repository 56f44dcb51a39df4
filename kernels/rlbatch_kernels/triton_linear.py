"""The forward of a head in one Triton kernel: logits are reduced where the tensor cores leave them.

Made for float32 logits of half-precision factors, whose products are exact: what the vendor's GEMM would do
in float32, at a tenth of the tensor cores' rate. Where logits are rounded to bfloat16, or factors are
float32, the vendor's GEMM of tiles stays. CUDA only; no GPU has timed it yet.
"""

import torch
from torch import Tensor

from rlbatch_kernels import triton_library
from rlbatch_kernels.head import Head
from rlbatch_kernels.shaping import Shaping

ROWS, COLUMNS, STEP = 128, 128, 64
"""Tokens and columns of a tile, and terms of each product at a time: 64 sums a thread in registers."""

TILES = 8
"""Of a piece: 1,024 columns, so that even 128 tokens and a vocabulary of 150,000 make 149 programs."""

NUM_WARPS, NUM_STAGES = 8, 3

TOKENS = 4096
"""At once: their pieces take 4.6 MiB at a vocabulary of 150,000."""

COMBINED_ROWS = 128

ALIGNMENT = 8
"""Elements: 16 bytes of half precision."""


def serves(head: Head) -> bool:
    """Whether the kernel is made for these dtypes and this layout."""
    hidden, weight = head.hidden, head.weight
    return (
        hidden.dtype == weight.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and head.logits_dtype == torch.float32
        and hidden.shape[-1] > 0
        and hidden.stride(-1) == weight.stride(-1) == 1
    )


def reduce(
    head: Head, shaping: Shaping, vocab_mask: Tensor | None, scale: Tensor, first_id: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, total and target of N tokens, as `Softmax` has them: [N] float64 each.

    Args:
        head: at least one trained token.
        shaping: of its logits; `vocab_mask` [V] uint8 instead of its own mask.
        vocab_mask: of these columns, or None.
        scale: [N] float64, log2(e) / temperature.
        first_id: of column 0.
    """
    trained = head.trained
    offsets = trained.offsets(head.hidden)
    found = [torch.empty_like(scale), torch.empty_like(scale), torch.full_like(scale, torch.nan)]
    for first in range(0, trained.num_tokens, TOKENS):
        rows = slice(first, first + TOKENS)
        maxima, totals, targets = (values[rows] for values in found)
        with triton_library.on_device_of(head.hidden):
            pieces = _pieces(head, shaping, vocab_mask, (offsets[rows], scale[rows], targets), rows, first_id)
            num_blocks = -(-len(maxima) // COMBINED_ROWS)
            triton_library.linear().combine[(num_blocks,)](
                *pieces, scale[rows], maxima, totals, len(maxima), len(pieces[0]), ROWS=COMBINED_ROWS
            )
    maximum, total, target = found
    return maximum, total, target


def _pieces(
    head: Head,
    shaping: Shaping,
    vocab_mask: Tensor | None,
    tokens: tuple[Tensor, Tensor, Tensor],
    rows: slice,
    first_id: int,
) -> tuple[Tensor, Tensor]:
    """Maxima and totals [pieces, n] float32 of some tokens; writes the targets that lie in these columns."""
    offsets, scale, targets = tokens
    num_columns, width = head.weight.shape
    num_pieces = -(-num_columns // (COLUMNS * TILES))
    maxima, totals = (
        torch.empty(num_pieces, len(scale), dtype=torch.float32, device=scale.device) for _ in range(2)
    )
    num_blocks = -(-len(scale) // ROWS)
    triton_library.linear().pieces[(num_pieces * num_blocks,)](
        head.hidden,
        offsets,
        head.weight,
        head.weight.stride(0),
        head.bias,
        head.trained.target_ids[rows],
        scale,
        vocab_mask,
        shaping.logit_scale,
        shaping.soft_cap or 1.0,
        maxima,
        totals,
        targets,
        len(scale),
        width,
        num_columns,
        first_id,
        BIASED=head.bias is not None,
        CAPPED=shaping.soft_cap is not None,
        MASKED=vocab_mask is not None,
        WHOLE_STEPS=width % STEP == 0,
        ALIGNMENT=_alignment(head),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        STEP=STEP,
        TILES=TILES,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return maxima, totals


def _alignment(head: Head) -> int:
    numbers = (*head.hidden.stride()[:-1], head.weight.stride(0), head.hidden.shape[-1])
    return ALIGNMENT if all(number % ALIGNMENT == 0 for number in numbers) else 1
