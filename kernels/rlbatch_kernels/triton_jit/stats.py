"""`alignment_stats`: partial results of pieces of segments, then of each segment in the order of its pieces.

A piece is a fixed number of tokens counted from its segment's start, so a segment's bits do not depend on its
batch. No atomics. Lanes sum a piece in float32, few tokens each; lanes and pieces are summed in float64. The
columns are those of `stats.STAT_COLUMNS`, in its order.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts: the first times a whole number of up to 8 bits is exact.
LN_2_HIGH = tl.constexpr(0.693359375)
LN_2_LOW = tl.constexpr(-2.12194440e-4)

SERIES_BELOW = tl.constexpr(1.0)
"""Below this |log_ratio| k3 is a series; at it the first term left out is 4e-8 of the sum."""

MINUS_INFINITY = tl.constexpr(float("-inf"))
INFINITY = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))

MAX_ABS_LOG_RATIO = tl.constexpr(9)
MAX_INFERENCE = tl.constexpr(10)
FIRST_COMPARED = tl.constexpr(25)
FIRST_SIZE = tl.constexpr(26)
MAX_WINDOW = tl.constexpr(27)
MAX_GAIN = tl.constexpr(28)
"""Columns: those that hold maxima begin with MAX, all others are sums."""


@triton.jit
def _finite(x):
    return tl.abs(x) < INFINITY


@triton.jit
def _exp(x):
    """exp of |x| <= 20 to 1.5 units in the last place; the device's own is 4 units off, too many for k3."""
    power = tl.floor(x * LOG2_E + 0.5)
    r = (x - power * LN_2_HIGH) - power * LN_2_LOW
    series = r * 1.3888889e-3 + 8.3333333e-3
    series = series * r + 4.1666668e-2
    series = series * r + 1.6666667e-1
    series = series * r + 0.5
    value = (series * (r * r) + r) + 1.0
    # 2^power by its bits.
    return value * ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _k3_series(x):
    """exp(x) - 1 - x for |x| < 1, to the tenth power."""
    series = x * 2.7557319e-7 + 2.7557319e-6
    series = series * x + 2.4801587e-5
    series = series * x + 1.9841270e-4
    series = series * x + 1.3888889e-3
    series = series * x + 8.3333333e-3
    series = series * x + 4.1666668e-2
    series = series * x + 1.6666667e-1
    series = series * x + 0.5
    return series * (x * x)


@triton.jit
def _add_pair(i, t, paired, clip, residual, pairs):
    """Add |i - t|, at most `clip`, of the lanes that are `paired`."""
    return residual + tl.where(paired, tl.minimum(tl.abs(i - t), clip), 0.0), pairs + paired.to(tl.int32)


@triton.jit
def _add_partner(trainer, mask, partner, start, stop, usable, i, clip, residual, pairs):
    """One lag: the trainer's logprobs at `partner`, where that is trained, finite and in the segment."""
    inside = usable & (partner >= start) & (partner < stop)
    t = tl.load(trainer + partner, mask=inside, other=0.0)
    paired = inside & (tl.load(mask + partner, mask=inside, other=0) != 0) & _finite(t)
    return _add_pair(i, t, paired, clip, residual, pairs)


@triton.jit
def _weight(d, ratio, advantage, low, high, max_exponent, KIND: tl.constexpr):
    """What the gradient of a policy loss has beside -advantage."""
    if KIND == "cap":
        weight = tl.minimum(tl.maximum(ratio, low), high)
    else:
        inside = tl.where(advantage > 0, ratio <= high, ratio >= low)
        # Beyond the largest exponent the ratio is a constant.
        weight = tl.where(inside & (tl.abs(d) <= max_exponent), ratio, 0.0)
    return weight


@triton.jit
def _mean(residual, paired, NUM: tl.constexpr, WINDOW: tl.constexpr):
    """Mean [NUM] of each window of NUM * WINDOW lanes; infinite without pairs."""
    total = tl.sum(tl.reshape(residual, [NUM, WINDOW]), axis=1)
    pairs = tl.sum(tl.reshape(paired.to(tl.int32), [NUM, WINDOW]), axis=1)
    return tl.where(pairs > 0, total / tl.maximum(pairs, 1).to(tl.float32), INFINITY)


@triton.jit
def _mean_at(trainer, mask, place, within, LAG: tl.constexpr, end, usable, i, clip, BLOCK, WINDOW):
    """The same of the pairs at one lag that are inside their window; `end` is one past the last."""
    partner = place + LAG
    here = usable & (within + LAG >= 0) & (within + LAG < WINDOW) & (partner < end)
    t = tl.load(trainer + partner, mask=here, other=0.0)
    paired = here & (tl.load(mask + partner, mask=here, other=0) != 0) & _finite(t)
    return _mean(tl.where(paired, tl.minimum(tl.abs(i - t), clip), 0.0), paired, BLOCK // WINDOW, WINDOW)


@triton.jit
def _windows(
    trainer, inference, mask, first, end, clip, least, row, BLOCK: tl.constexpr, WINDOW: tl.constexpr
):
    """The largest of the windows of one piece, to its row, as `stats.WINDOW` and `WINDOW_LEAST` say."""
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK // WINDOW], tl.float32)
    gain = tl.zeros([BLOCK // WINDOW], tl.float32)
    for at in range(first, end, BLOCK):
        place, within = at + lane, lane % WINDOW
        here = place < end
        m = tl.load(mask + place, mask=here, other=0) != 0
        i = tl.load(inference + place, mask=here, other=0.0)
        usable = m & _finite(i)
        zero = _mean_at(trainer, mask, place, within, 0, end, usable, i, clip, BLOCK, WINDOW)
        other = zero + INFINITY
        for lag in tl.static_range(-2, 3):
            if lag != 0:
                mean = _mean_at(trainer, mask, place, within, lag, end, usable, i, clip, BLOCK, WINDOW)
                other = tl.minimum(other, mean)
        loud = (zero >= least) & (zero < INFINITY)
        largest = tl.maximum(largest, tl.where(loud, zero, 0.0))
        gain = tl.maximum(gain, tl.where(loud, 1.0 - other / tl.where(loud, zero, 1.0), 0.0))
    tl.store(row + MAX_WINDOW, tl.max(largest, axis=0).to(tl.float64))
    tl.store(row + MAX_GAIN, tl.max(gain, axis=0).to(tl.float64))


@triton.jit
def pieces(
    trainer,
    inference,
    mask,
    out,
    advantages,
    bounds,
    partials,
    max_exponent,
    k3_cap,
    zero_needs_below,
    confident_from,
    disagrees_by,
    residual_clip,
    window_least,
    low,
    high,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the partial results of one piece to its row of `partials` [P, WIDTH] float64.

    `bounds` [P, 4] int64: a segment's first token and the one past its last, as places in the flat [B * T]
    tensors, then the same of the piece. `KIND` is what is written to `out` [B * T]: one of `per_token.KINDS`,
    or nothing where it is empty.
    """
    piece = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(bounds + piece * 4), tl.load(bounds + piece * 4 + 1)
    first, end = tl.load(bounds + piece * 4 + 2), tl.load(bounds + piece * 4 + 3)
    lane = tl.arange(0, BLOCK)
    zero, none = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    trained, compared, zeros, confident, t_bad, i_bad = none, none, none, none, none, none
    log_ratio, size, square, k3, k3_capped, ratios, ratio_square = zero, zero, zero, zero, zero, zero, zero
    largest, largest_inference = zero, zero + MINUS_INFINITY
    first_compared, first_size = none, zero
    r0, r1, r2, r3, r4 = zero, zero, zero, zero, zero
    p0, p1, p2, p3, p4 = none, none, none, none, none
    for at in range(first, end, BLOCK):
        place = at + lane
        here = place < end
        t = tl.load(trainer + place, mask=here, other=0.0)
        i = tl.load(inference + place, mask=here, other=0.0)
        m = tl.load(mask + place, mask=here, other=0) != 0
        t_fine, i_fine = _finite(t), _finite(i)
        both = m & t_fine & i_fine
        d = tl.where(both, t - i, 0.0)
        e = _exp(tl.minimum(tl.maximum(d, -max_exponent), max_exponent))
        nats = tl.where(tl.abs(d) < SERIES_BELOW, _k3_series(d), (e - 1.0) - d)
        counted = tl.where(both, e, 0.0)
        trained += m.to(tl.int32)
        compared += both.to(tl.int32)
        log_ratio += d
        size += tl.abs(d)
        square += d * d
        k3 += nats
        k3_capped += tl.minimum(nats, k3_cap)
        ratios += counted
        ratio_square += counted * counted
        in_first = place < start + WINDOW
        first_compared += (both & in_first).to(tl.int32)
        first_size += tl.where(in_first, tl.abs(d), 0.0)
        largest = tl.maximum(largest, tl.abs(d))
        largest_inference = tl.maximum(largest_inference, tl.where(both, i, MINUS_INFINITY))
        zeros += (both & (i == 0.0) & (t < zero_needs_below)).to(tl.int32)
        confident += (both & (i >= confident_from) & (d < -disagrees_by)).to(tl.int32)
        t_bad += (m & (t_fine == 0)).to(tl.int32)
        i_bad += (m & (i_fine == 0)).to(tl.int32)
        if KIND == "ratio":
            tl.store(out + place, tl.where(both, e, 1.0), mask=here)
        elif KIND != "":
            advantage = tl.load(advantages + place, mask=here, other=0.0)
            gradient = -advantage * _weight(d, e, advantage, low, high, max_exponent, KIND)
            # Where the trainer excludes the target there is none; what else is not finite must be seen.
            otherwise = tl.where(m & ((t != MINUS_INFINITY) | (i_fine == 0)), NAN, 0.0)
            tl.store(out + place, tl.where(both, gradient, otherwise), mask=here)
        usable = m & i_fine
        r0, p0 = _add_partner(trainer, mask, place - 2, start, stop, usable, i, residual_clip, r0, p0)
        r1, p1 = _add_partner(trainer, mask, place - 1, start, stop, usable, i, residual_clip, r1, p1)
        r2, p2 = _add_pair(i, t, both, residual_clip, r2, p2)
        r3, p3 = _add_partner(trainer, mask, place + 1, start, stop, usable, i, residual_clip, r3, p3)
        r4, p4 = _add_partner(trainer, mask, place + 2, start, stop, usable, i, residual_clip, r4, p4)
    row = partials + piece * WIDTH
    sums = (trained, compared, log_ratio, size, square, k3, k3_capped, ratios, ratio_square)
    for column in tl.static_range(9):
        tl.store(row + column, tl.sum(sums[column].to(tl.float64), axis=0))
    largest_size = tl.max(largest, axis=0)
    tl.store(row + MAX_ABS_LOG_RATIO, largest_size.to(tl.float64))
    tl.store(row + MAX_INFERENCE, tl.max(largest_inference, axis=0).to(tl.float64))
    sums = (
        zeros,
        confident,
        t_bad,
        i_bad,
        r0,
        r1,
        r2,
        r3,
        r4,
        p0,
        p1,
        p2,
        p3,
        p4,
        first_compared,
        first_size,
    )
    for column in tl.static_range(16):
        tl.store(row + (MAX_INFERENCE + 1 + column), tl.sum(sums[column].to(tl.float64), axis=0))
    # No mean is above its largest term: a piece of quiet tokens is not read again.
    if largest_size >= window_least:
        _windows(trainer, inference, mask, first, end, residual_clip, window_least, row, BLOCK, WINDOW)
    else:
        tl.store(row + MAX_WINDOW, 0.0)
        tl.store(row + MAX_GAIN, 0.0)


@triton.jit
def combine(partials, ends, table, NUM_COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """One segment: its pieces [ends[g], ends[g + 1]) in order, to row g of `table` [G, NUM_COLUMNS]."""
    segment = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_maximum = (column == MAX_ABS_LOG_RATIO) | (column == MAX_INFERENCE)
    is_maximum |= (column == MAX_WINDOW) | (column == MAX_GAIN)
    initial = tl.where(column == MAX_INFERENCE, MINUS_INFINITY, 0.0)
    result = initial.to(tl.float64)
    for piece in range(tl.load(ends + segment), tl.load(ends + segment + 1)):
        part = tl.load(partials + piece * WIDTH + column, mask=column < NUM_COLUMNS, other=0.0)
        result = tl.where(is_maximum, tl.maximum(result, part), result + part)
    tl.store(table + segment * NUM_COLUMNS + column, result, mask=column < NUM_COLUMNS)
