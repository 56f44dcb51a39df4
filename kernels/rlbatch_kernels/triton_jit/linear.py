"""Softmax of hidden x head without logits in memory: products by tensor cores, reduced as they come.

A program takes ROWS trained tokens and a piece of the vocabulary, TILES tiles of COLUMNS, and writes one
maximum and one total a token; `combine` adds up the pieces in their order. Nothing depends on how many tokens
there are, so neither does a bit of any of them. Logits are float32 sums of exact products of half-precision
factors.

Rows that fill up the last block compute what lies first in `hidden` and write nothing; columns past the last
one read the last one and are masked. So no load is masked but those of a width that no step divides.
"""

import triton
import triton.language as tl

from rlbatch_kernels.triton_jit.softmax import MINUS_INFINITY, shaped


@triton.jit
def _logits(
    hidden,
    weight,
    width,
    WHOLE_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """[ROWS, COLUMNS] float32, from pointers to the first element of each row and column."""
    step = tl.arange(0, STEP)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, width, STEP):
        if WHOLE_STEPS:
            left = tl.load(hidden[:, None] + (start + step)[None, :])
            right = tl.load(weight[None, :] + (start + step)[:, None])
        else:
            here = start + step < width
            left = tl.load(hidden[:, None] + (start + step)[None, :], mask=here[None, :], other=0.0)
            right = tl.load(weight[None, :] + (start + step)[:, None], mask=here[:, None], other=0.0)
        sums = tl.dot(left, right, sums)
    return sums


@triton.jit(do_not_specialize=["num_tokens", "num_columns", "first_column", "logit_scale", "soft_cap"])
def pieces(
    hidden,
    offsets,
    weight,
    weight_stride,
    bias,
    target_ids,
    scales,
    vocab_mask,
    logit_scale,
    soft_cap,
    maxima,
    totals,
    targets,
    num_tokens,
    width,
    num_columns,
    first_column,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    TILES: tl.constexpr,
):
    """Reduce one piece of the columns for ROWS tokens: maxima and totals [pieces, N], and targets [N]."""
    num_blocks = tl.cdiv(num_tokens, ROWS)
    # Blocks of one piece follow each other: they read the same weights.
    piece = tl.program_id(0) // num_blocks
    row = (tl.program_id(0) % num_blocks) * ROWS + tl.arange(0, ROWS)
    is_token = row < num_tokens
    offset = tl.load(offsets + row, mask=is_token, other=0)
    # The division says to the compiler what the caller knows.
    left = hidden + (offset // ALIGNMENT) * ALIGNMENT
    target = tl.load(target_ids + row, mask=is_token, other=-1) - first_column
    scale = tl.load(scales + row, mask=is_token, other=1.0).to(tl.float32)

    maximum = tl.full([ROWS], MINUS_INFINITY, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for tile in range(TILES):
        first = (piece * TILES + tile) * COLUMNS
        column = first + tl.arange(0, COLUMNS)
        inside = column < num_columns
        known = tl.minimum(column, num_columns - 1)
        right = weight + (known.to(tl.int64) * weight_stride // ALIGNMENT) * ALIGNMENT
        x = _logits(left, right, width, WHOLE_STEPS, ROWS, COLUMNS, STEP)
        if BIASED:
            x += tl.load(bias + known).to(tl.float32)[None, :]
        counts = (inside & (tl.load(vocab_mask + known) != 0) if MASKED else inside)[None, :]
        y = shaped(x, counts, logit_scale, soft_cap, CAPPED, True)[0]
        is_target = column[None, :] == target[:, None]
        found = tl.sum(tl.where(is_target, y, 0.0), axis=1)
        is_here = is_token & (target >= first) & (target < tl.minimum(first + COLUMNS, num_columns))
        tl.store(targets + row, found.to(tl.float64), mask=is_here)
        largest = tl.maximum(maximum, tl.max(y, axis=1))
        # Where every logit so far is -inf any finite number serves: each exponential below is 0.
        origin = tl.where(largest == MINUS_INFINITY, 0.0, largest)
        e = tl.exp2((y - origin[:, None]) * scale[:, None])
        total = tl.exp2((maximum - origin) * scale) * total + tl.sum(e, axis=1)
        maximum = largest
    tl.store(maxima + piece.to(tl.int64) * num_tokens + row, maximum, mask=is_token)
    tl.store(totals + piece.to(tl.int64) * num_tokens + row, total, mask=is_token)


@triton.jit(do_not_specialize=["num_tokens", "num_pieces"])
def combine(piece_maxima, piece_totals, scales, maxima, totals, num_tokens, num_pieces, ROWS: tl.constexpr):
    """The maximum and total of each token from those of its pieces, in their order, in float64."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = row < num_tokens
    scale = tl.load(scales + row, mask=is_token, other=1.0)
    maximum = tl.full([ROWS], MINUS_INFINITY, tl.float64)
    total = tl.zeros([ROWS], tl.float64)
    for _ in range(num_pieces):
        mine = tl.load(piece_maxima + row, mask=is_token, other=MINUS_INFINITY).to(tl.float64)
        added = tl.load(piece_totals + row, mask=is_token, other=0.0).to(tl.float64)
        largest = tl.maximum(maximum, mine)
        origin = tl.where(largest == MINUS_INFINITY, 0.0, largest)
        total = total * tl.exp2((maximum - origin) * scale) + added * tl.exp2((mine - origin) * scale)
        maximum = largest
        piece_maxima += num_tokens
        piece_totals += num_tokens
    tl.store(maxima + row, maximum, mask=is_token)
    tl.store(totals + row, total, mask=is_token)
