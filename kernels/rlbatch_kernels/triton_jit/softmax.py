"""Softmax of rows of logits: forward online over columns, backward from what it left.

One program a row. A row begins at `logits + offsets[row]`, an int64. Where the caller knows that every offset
is a multiple of ALIGNMENT elements, blocks are loaded in vectors of 16 bytes; where not, ALIGNMENT is 1 and
lanes load one by one. Either way lane k of a block takes the same column, and only the last block is masked.

Exponentials are float32 and powers of two; each lane sums in float32, at most V / BLOCK of them, and the
lanes are summed in float64, as is everything kept between tiles. The argument of an exponential is
(logit - maximum) / temperature, subtracted before it is scaled: so no digit is lost at logits of 1e4.
`scales` [N] float64 are log2(e) / temperature, and a `slope` is the gradient's to a power of two.

Logits are scaled, capped and masked as they are read (`shaping.Shaping`), where a call asks for it. Beside 1,
tanh is 1 - q: q keeps its digits where tanh has none left, and the derivative is q * (2 - q).

A maximum drops NaN here, on every device, so NaN is left to the sum: NaN and +inf both make their own
exponential NaN, and no factor makes it finite again.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)

LEAST_POWER = tl.constexpr(-200.0)
"""2^-200 is 0 in float32. Powers are bounded by it where 0 * -inf would be NaN."""

MINUS_INFINITY = tl.constexpr(float("-inf"))


TWO_LOG2_E = tl.constexpr(2.8853900817779268)

TANH_IS_1 = tl.constexpr(32.0)
"""From here on tanh is 1 in float32, and its derivative below 1e-27."""

TANH_SERIES_BELOW = tl.constexpr(0.625)


@triton.jit
def shaped(x, counts, logit_scale, soft_cap, CAPPED: tl.constexpr, MASKED: tl.constexpr):
    """Logits as the softmax takes them, float32, and the derivative of that; `counts`: 0 is masked."""
    y = x * logit_scale
    slope = logit_scale
    if CAPPED:
        z = y / soft_cap
        u = z * z
        # tanh z = z + z * u * p(u): p interpolates at the Chebyshev nodes, relative error 2e-8.
        p = ((-0.0060967147 * u + 0.020997179) * u - 0.053850910) * u + 0.13332770
        small = y + y * (u * (p * u - 0.33333329))
        t = small / soft_cap
        # NaN is above nothing, so it stays.
        size = tl.where(tl.abs(z) > TANH_IS_1, TANH_IS_1, tl.abs(z))
        q = 2.0 / (tl.exp2(size * TWO_LOG2_E) + 1.0)
        large = soft_cap - soft_cap * q
        is_small = size < TANH_SERIES_BELOW
        y = tl.where(is_small, small, tl.where(z < 0.0, -large, large))
        slope = logit_scale * tl.where(is_small, 1.0 - t * t, q * (2.0 - q))
    if MASKED:
        y = tl.where(counts != 0, y, MINUS_INFINITY)
        slope = tl.where(counts != 0, slope, 0.0)
    return y, slope


@triton.jit
def _add_block(x, maximum, total, weighted, above, target, scale, FULL: tl.constexpr):
    """Take in a block of float32 logits; excluded lanes are -inf, which adds 0."""
    largest = tl.maximum(maximum, tl.max(x, axis=0))
    # Where every logit so far is -inf any finite number serves: each exponential below is 0.
    origin = tl.where(largest == MINUS_INFINITY, 0.0, largest)
    shift = tl.where(maximum == MINUS_INFINITY, 0.0, (maximum - origin) * scale)
    factor = tl.where(maximum == MINUS_INFINITY, 0.0, tl.exp2(shift))
    power = (x - origin) * scale
    e = tl.exp2(power)
    if FULL:
        weighted = factor * (weighted + tl.maximum(shift, LEAST_POWER) * total) + e * tl.maximum(
            power, LEAST_POWER
        )
        above += (x > target).to(tl.int32)
    total = factor * total + e
    return largest, total, weighted, above


@triton.jit(do_not_specialize=["num_columns", "first_column", "logit_scale", "soft_cap"])
def forward(
    logits,
    offsets,
    target_ids,
    scales,
    maxima,
    totals,
    targets,
    weighted_sums,
    num_above,
    vocab_mask,
    logit_scale,
    soft_cap,
    num_columns,
    first_column,
    FULL: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Add the columns [first_column, first_column + num_columns) of a row to its state."""
    row = tl.program_id(0)
    offset = tl.load(offsets + row)
    # The division says to the compiler what the caller knows.
    begin = logits + (offset // ALIGNMENT) * ALIGNMENT
    # The state is float64 and is only touched here and at the end.
    before = tl.load(maxima + row)
    scale = tl.load(scales + row)

    column = tl.load(target_ids + row) - first_column
    inside = (column >= 0) & (column < num_columns)
    found = tl.load(begin + column, mask=inside, other=0.0).to(tl.float32)
    # A target always counts.
    found = shaped(found, 1, logit_scale, soft_cap, CAPPED, False)[0]
    target = tl.where(inside, found, tl.load(targets + row).to(tl.float32))
    tl.store(targets + row, target.to(tl.float64))

    lane = tl.arange(0, BLOCK)
    maximum = before.to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    scale32 = scale.to(tl.float32)
    last = (num_columns // BLOCK) * BLOCK
    for start in range(0, last, BLOCK):
        x = tl.load(begin + start + lane, eviction_policy="evict_first").to(tl.float32)
        counts = tl.load(vocab_mask + start + lane) if MASKED else 1
        y = shaped(x, counts, logit_scale, soft_cap, CAPPED, MASKED)[0]
        maximum, total, weighted, above = _add_block(
            y, maximum, total, weighted, above, target, scale32, FULL
        )
    if last < num_columns:
        here = last + lane < num_columns
        x = tl.load(begin + last + lane, mask=here, other=0.0).to(tl.float32)
        counts = tl.load(vocab_mask + last + lane, mask=here, other=0) if MASKED else here
        y = shaped(x, counts, logit_scale, soft_cap, CAPPED, True)[0]
        maximum, total, weighted, above = _add_block(
            y, maximum, total, weighted, above, target, scale32, FULL
        )

    largest = maximum.to(tl.float64)
    fresh = before == MINUS_INFINITY
    shift = tl.where(fresh, 0.0, (before - largest) * scale)
    factor = tl.where(fresh, 0.0, tl.exp2(shift))
    total_before = tl.load(totals + row)
    tl.store(maxima + row, largest)
    tl.store(totals + row, factor * total_before + tl.sum(total.to(tl.float64), axis=0))
    if FULL:
        moved = factor * (tl.load(weighted_sums + row) + shift * LN_2 * total_before)
        tl.store(weighted_sums + row, moved + tl.sum(weighted.to(tl.float64), axis=0) * LN_2)
        tl.store(num_above + row, tl.load(num_above + row) + tl.sum(above.to(tl.int64), axis=0))


@triton.jit
def _gradient(x, column, column_of_target, maximum, scale, constant, slope, at_target, SLOPE: tl.constexpr):
    """e * (constant + slope * z), and more at the target: one block, float32."""
    power = (x - maximum) * scale
    factor = constant
    if SLOPE:
        factor = constant + slope * tl.maximum(power, LEAST_POWER)
    return tl.exp2(power) * factor + tl.where(column == column_of_target, at_target, 0.0)


@triton.jit(do_not_specialize=["num_columns", "first_column", "logit_scale", "soft_cap"])
def backward(
    logits,
    offsets,
    target_ids,
    scales,
    maxima,
    at_targets,
    constants,
    slopes,
    out,
    out_offsets,
    vocab_mask,
    logit_scale,
    soft_cap,
    num_columns,
    first_column,
    SLOPE: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    SAME_OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Write the gradient of these columns of a row to `out`, which may be `logits`."""
    row = tl.program_id(0)
    aligned = (tl.load(offsets + row) // ALIGNMENT) * ALIGNMENT
    begin = logits + aligned
    # The same offsets are known to be aligned, and then blocks are written in vectors too.
    out_begin = out + aligned if SAME_OFFSETS else out + tl.load(out_offsets + row)
    target = (tl.load(target_ids + row) - first_column).to(tl.int32)
    scale = tl.load(scales + row).to(tl.float32)
    maximum = tl.load(maxima + row).to(tl.float32)
    constant = tl.load(constants + row).to(tl.float32)
    at_target = tl.load(at_targets + row).to(tl.float32)
    slope = 0.0
    if SLOPE:
        slope = tl.load(slopes + row).to(tl.float32)

    lane = tl.arange(0, BLOCK)
    dtype = out.dtype.element_ty
    last = (num_columns // BLOCK) * BLOCK
    for start in range(0, last, BLOCK):
        column = start + lane
        x = tl.load(begin + column).to(tl.float32)
        counts = tl.load(vocab_mask + column) if MASKED else 1
        y, of_shaped = shaped(x, counts, logit_scale, soft_cap, CAPPED, MASKED)
        grad = _gradient(y, column, target, maximum, scale, constant, slope, at_target, SLOPE)
        tl.store(out_begin + column, (grad * of_shaped).to(dtype))
    if last < num_columns:
        column = last + lane
        here = column < num_columns
        x = tl.load(begin + column, mask=here, other=0.0).to(tl.float32)
        counts = tl.load(vocab_mask + column, mask=here, other=0) if MASKED else here
        y, of_shaped = shaped(x, counts, logit_scale, soft_cap, CAPPED, MASKED)
        grad = _gradient(y, column, target, maximum, scale, constant, slope, at_target, SLOPE)
        tl.store(out_begin + column, (grad * of_shaped).to(dtype), mask=here)
