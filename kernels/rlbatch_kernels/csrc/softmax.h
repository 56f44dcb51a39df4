/* Softmax of rows of logits: forward online over columns, backward from what it left. Once a processor level.
 *
 * Logits that are scaled, capped or masked first are shaped a block at a time into a buffer that stays in the
 * first cache, and go on from there like any others.
 */

/* Columns [at, at + LANES) as float32; past the end -inf. */
static INLINE vf NAME(columns)(const char *row, int dtype, int64_t at, int64_t n) {
    if (at + LANES <= n) return NAME(read)(row, dtype, at);
    char tail[LANES * sizeof(float)];
    vf nothing = NAME(splat)(-INFINITY);
    NAME(write)(tail, dtype, 0, nothing);
    size_t width = dtype == FLOAT32 ? 4 : 2;
    memcpy(tail, row + (size_t)at * width, (size_t)(n - at) * width);
    return NAME(read)(tail, dtype, 0);
}

/* x <= 0 in powers of two, from below bounded so that exp2 is defined; NaN stays NaN. */
static INLINE vf NAME(bounded)(vf x) { return NAME(select)(x < MIN_POWER, NAME(splat)(MIN_POWER), x); }

/* LANES logits scaled and capped, and the derivative of that. Beside 1, tanh is 1 - q: q keeps its digits where
 * tanh has none left, and the derivative is q * (2 - q). */
static INLINE vf NAME(capped)(vf x, const struct shaping *how, vf *slope) {
    vf scaled = x * how->logit_scale;
    *slope = NAME(splat)(how->logit_scale);
    if (how->soft_cap == 0.0f) return scaled;
    vf z = x * how->scale_over_cap, u = z * z;
    vf p = u * OF_TANH[4] + OF_TANH[3];
    for (int k = 2; k >= 0; k--) p = p * u + OF_TANH[k];
    vf small = scaled + scaled * (u * p), t = small * how->one_over_cap;
    /* NaN stays NaN: it is the second of the two. */
    vf size = NAME(smaller)(NAME(splat)(TANH_IS_1), NAME(absolute)(z));
    vf q = 2.0f / (NAME(exp)(size + size) + 1.0f);
    vf large = (vf)((vi)(how->soft_cap - how->soft_cap * q) | ((vi)x & INT32_MIN));
    vi is_small = size < TANH_SERIES_BELOW;
    *slope *= NAME(select)(is_small, 1.0f - t * t, q * (2.0f - q));
    return NAME(select)(is_small, small, large);
}

/* Columns [at, at + LANES) of a mask; past the end they do not count. */
static INLINE vi NAME(counted)(const uint8_t *mask, int64_t at, int64_t n) {
    if (at + LANES <= n) return NAME(load_mask)(mask + at);
    uint8_t tail[LANES] = {0};
    memcpy(tail, mask + at, (size_t)(n - at));
    return NAME(load_mask)(tail);
}

/* Columns [first, last) of a row as the softmax takes them; `slopes` NULL where they are not asked for. Both have
 * room for whole vectors. */
static void NAME(shape_block)(const char *row, int dtype, int64_t first, int64_t last, int64_t n,
                              const struct shaping *how, float *shaped, float *slopes) {
    for (int64_t at = first; at < last; at += LANES) {
        vf slope, x = NAME(capped)(NAME(columns)(row, dtype, at, n), how, &slope);
        if (how->vocab_mask) {
            vi counts = NAME(counted)(how->vocab_mask, at, n);
            x = NAME(select)(counts, x, NAME(splat)(-INFINITY));
            slope = NAME(select)(counts, slope, NAME(splat)(0.0f));
        }
        NAME(store)(shaped + (at - first), x);
        if (slopes) NAME(store)(slopes + (at - first), slope);
    }
}

/* One column, to the same bits as in its block, and its slope. */
static float NAME(shape_one)(const char *row, int dtype, int64_t at, int64_t n, const struct shaping *how,
                             float *slope) {
    float shaped[LANES], slopes[LANES];
    NAME(shape_block)(row, dtype, at, at + 1, n, how, shaped, slopes);
    *slope = slopes[0];
    return shaped[0];
}

static INLINE float NAME(block_maximum)(const char *row, int dtype, int64_t first, int64_t last, int64_t n) {
    vf found[4];
    for (int k = 0; k < 4; k++) found[k] = NAME(splat)(-INFINITY);
    int64_t at = first;
    for (; at + 4 * LANES <= last; at += 4 * LANES)
        for (int k = 0; k < 4; k++) {
            __builtin_prefetch(row + (size_t)(at + k * LANES) * (dtype == FLOAT32 ? 4 : 2) + PREFETCH_BYTES);
            found[k] = NAME(larger)(NAME(read)(row, dtype, at + k * LANES), found[k]);
        }
    for (; at < last; at += LANES) found[0] = NAME(larger)(NAME(columns)(row, dtype, at, n), found[0]);
    found[0] = NAME(larger)(NAME(larger)(found[1], found[0]), NAME(larger)(found[3], found[2]));
    return NAME(largest)(found[0]);
}

/* Move the sums to a new maximum: total * 2^shift, and in the weighted sum every power moves by shift too. */
static INLINE void NAME(rescale)(struct softmax *s, float maximum, float scale) {
    if (!(maximum > s->maximum)) return;
    /* Nothing has been added yet but zeros and NaNs. */
    double shift = isfinite(s->maximum) ? ((double)s->maximum - maximum) * scale : 0.0;
    double factor = isfinite(s->maximum) ? exp2(shift) : 0.0;
    s->weighted = factor * (s->weighted + shift * s->total);
    s->total *= factor;
    s->maximum = maximum;
}

/* Take in LANES columns. Two sums in turn, so that one addition need not wait for the one before. */
static INLINE void NAME(take)(vf x, const struct softmax *s, float origin, float scale, int full, vf *total,
                              vf *weighted, vi *above) {
    vf power = NAME(bounded)((x - origin) * scale);
    vf e = NAME(exp2)(power);
    *total += e;
    if (full) {
        *weighted += e * power;
        *above -= x > s->target;
    }
}

/* Take in n columns of one row. `full`: the entropy's sum and the rank too. */
static INLINE void NAME(softmax_row)(const char *row, int dtype, int64_t n, float scale, int full, struct softmax *s) {
    for (int64_t first = 0; first < n; first += COLUMNS) {
        int64_t last = first + COLUMNS < n ? first + COLUMNS : n, at = first;
        NAME(rescale)(s, NAME(block_maximum)(row, dtype, first, last, n), scale);
        /* Where every logit so far is -inf any origin serves: nothing is added that counts. */
        float origin = s->maximum == -INFINITY ? 0.0f : s->maximum;
        vf total[4] = {{0}}, weighted[4] = {{0}};
        vi above[4] = {{0}};
        for (; at + 4 * LANES <= last; at += 4 * LANES)
            for (int k = 0; k < 4; k++)
                NAME(take)(NAME(read)(row, dtype, at + k * LANES), s, origin, scale, full, total + k, weighted + k,
                           above + k);
        for (; at < last; at += LANES)
            NAME(take)(NAME(columns)(row, dtype, at, n), s, origin, scale, full, total, weighted, above);
        s->total += NAME(total_of)((total[0] + total[1]) + (total[2] + total[3]));
        if (full) {
            s->weighted += NAME(total_of)((weighted[0] + weighted[1]) + (weighted[2] + weighted[3]));
            s->above += NAME(count)(above[0] + above[1] + above[2] + above[3]);
        }
    }
}

static void NAME(softmax_add)(const char *row, int dtype, int64_t n, float scale, int full,
                              const struct shaping *how, struct softmax *s) {
    if (how) {
        for (int64_t first = 0; first < n; first += COLUMNS) {
            float shaped[COLUMNS];
            int64_t last = first + COLUMNS < n ? first + COLUMNS : n;
            NAME(shape_block)(row, dtype, first, last, n, how, shaped, NULL);
            NAME(softmax_add)((const char *)shaped, FLOAT32, last - first, scale, full, NULL, s);
        }
        return;
    }
    /* Constants, so that each case is compiled for itself. */
    if (dtype == FLOAT32 && full) NAME(softmax_row)(row, FLOAT32, n, scale, 1, s);
    else if (dtype == FLOAT32) NAME(softmax_row)(row, FLOAT32, n, scale, 0, s);
    else if (dtype == BFLOAT16 && full) NAME(softmax_row)(row, BFLOAT16, n, scale, 1, s);
    else if (dtype == BFLOAT16) NAME(softmax_row)(row, BFLOAT16, n, scale, 0, s);
    else if (full) NAME(softmax_row)(row, FLOAT16, n, scale, 1, s);
    else NAME(softmax_row)(row, FLOAT16, n, scale, 0, s);
}

/* Gradient of LANES columns: p * (constant + slope * power), where p = 2^power. */
static INLINE vf NAME(gradient_of)(vf x, const struct slope *g) {
    vf raw = (x - g->maximum) * g->scale;
    vf power = NAME(bounded)(raw);
    vf p = NAME(exp2)(power);
    p = (vf)((vi)p & ~(raw < MIN_POWER));
    return p * (g->constant + g->slope * power);
}

/* LANES values to columns [at, at + LANES) of `out`, of which only those before `n` are written. */
static INLINE void NAME(write_columns)(char *out, int dtype, int64_t at, int64_t n, vf values) {
    if (at + LANES <= n) {
        NAME(write)(out, dtype, at, values);
        return;
    }
    char tail[LANES * sizeof(float)];
    size_t width = dtype == FLOAT32 ? 4 : 2;
    NAME(write)(tail, dtype, 0, values);
    memcpy(out + (size_t)at * width, tail, (size_t)(n - at) * width);
}

static INLINE void NAME(gradient_row)(const char *row, int dtype, int64_t n, const struct slope *g, char *out,
                                      int out_dtype) {
    int64_t at = 0;
    for (; at + LANES <= n; at += LANES) {
        __builtin_prefetch(row + (size_t)at * (dtype == FLOAT32 ? 4 : 2) + PREFETCH_BYTES);
        NAME(write)(out, out_dtype, at, NAME(gradient_of)(NAME(read)(row, dtype, at), g));
    }
    if (at < n) NAME(write_columns)(out, out_dtype, at, n, NAME(gradient_of)(NAME(columns)(row, dtype, at, n), g));
}

/* The same where logits are shaped first: the gradient to what they were. */
static void NAME(shaped_gradient)(const char *row, int dtype, int64_t n, const struct slope *g,
                                  const struct shaping *how, char *out, int out_dtype) {
    for (int64_t first = 0; first < n; first += COLUMNS) {
        float shaped[COLUMNS], slopes[COLUMNS];
        int64_t last = first + COLUMNS < n ? first + COLUMNS : n;
        NAME(shape_block)(row, dtype, first, last, n, how, shaped, slopes);
        for (int64_t at = first; at < last; at += LANES) {
            vf to_shaped = NAME(gradient_of)(NAME(load)(shaped + (at - first)), g);
            NAME(write_columns)(out, out_dtype, at, last, to_shaped * NAME(load)(slopes + (at - first)));
        }
    }
}

static void NAME(softmax_gradient)(const char *row, int dtype, int64_t n, const struct slope *g,
                                   const struct shaping *how, char *out, int out_dtype) {
    if (how) {
        NAME(shaped_gradient)(row, dtype, n, g, how, out, out_dtype);
        return;
    }
    if (dtype == FLOAT32 && out_dtype == FLOAT32) NAME(gradient_row)(row, FLOAT32, n, g, out, FLOAT32);
    else if (dtype == FLOAT32 && out_dtype == BFLOAT16) NAME(gradient_row)(row, FLOAT32, n, g, out, BFLOAT16);
    else if (dtype == BFLOAT16 && out_dtype == BFLOAT16) NAME(gradient_row)(row, BFLOAT16, n, g, out, BFLOAT16);
    else if (dtype == FLOAT16 && out_dtype == FLOAT16) NAME(gradient_row)(row, FLOAT16, n, g, out, FLOAT16);
    else NAME(gradient_row)(row, dtype, n, g, out, out_dtype);
}
