/* alignment_stats: one chunk of one segment. Included once a processor level. */

#undef BLOCK
#define BLOCK (LANE_TOKENS * LANES)

/* Sums over the tokens of a chunk, lane by lane: float32 within a block, float64 between blocks. */
struct NAME(sums) {
    vd value[NUM_VALUES];
    vi count[NUM_COUNTS];
    vf max_abs_log_ratio, max_inference;
    int64_t num_clean; /* tokens of clean blocks, which count in every count but two */
};

/* ratio - 1 - log_ratio for |x| < 1, where the difference would lose digits; the first term left out is 4e-8 of
 * the sum at 1. */
static INLINE vf NAME(k3_series)(vf x) {
    vf series = x * 2.7557319e-7f + 2.7557319e-6f; /* 1/10!, 1/9! */
    series = series * x + 2.4801587e-5f;
    series = series * x + 1.9841270e-4f;
    series = series * x + 1.3888889e-3f;
    series = series * x + 8.3333333e-3f;
    series = series * x + 4.1666668e-2f;
    series = series * x + 1.6666667e-1f;
    series = series * x + 0.5f;
    return series * (x * x);
}

static INLINE vf NAME(clamped)(vf x, float limit) {
    x = NAME(select)(x > limit, NAME(splat)(limit), x);
    return NAME(select)(x < -limit, NAME(splat)(-limit), x);
}

/* What is written of LANES tokens that are compared, from their log ratios and those clamped in an exponential. */
static INLINE vf NAME(written_of)(vf d, vf ratio, const struct limits *at, const struct written *to) {
    if (to->kind == RATIO) return ratio;
    vf advantage = NAME(load)(to->advantages), low = NAME(splat)(to->low), high = NAME(splat)(to->high);
    if (to->kind == CAP) return -advantage * NAME(larger)(low, NAME(smaller)(high, ratio));
    vi up = advantage > 0.0f, inside = (up & (ratio <= high)) | (~up & (ratio >= low));
    /* Beyond the largest exponent the ratio is a constant. */
    return -advantage * (vf)((vi)ratio & inside & (NAME(absolute)(d) <= at->max_exponent));
}

/* The same of any tokens. A ratio is then 1; a gradient 0 where not trained and where the trainer excludes the
 * target, and NaN where another logprob is not finite. */
static INLINE vf NAME(written_of_any)(vf compared, vf t, vi mask, vi both, vi i_fine, const struct written *to) {
    vf otherwise = NAME(splat)(1.0f);
    if (to->kind != RATIO) otherwise = (vf)((vi)NAME(splat)(NAN) & mask & ~((t == -INFINITY) & i_fine));
    return NAME(select)(both, compared, otherwise);
}

/* LANES tokens: everything but the residuals. What may stand in a pair goes to the two buffers, else NaN. */
static INLINE void NAME(stats_of)(vf t, vf i, vi mask, const struct limits *at, vf *value, vi *count, vf *maxima,
                                  float *usable_trainer, float *usable_inference, struct written to) {
    const vf nan = NAME(splat)(__builtin_nanf(""));
    vi t_fine = mask & NAME(finite)(t), i_fine = mask & NAME(finite)(i), both = t_fine & i_fine;
    NAME(store)(usable_trainer, NAME(select)(t_fine, t, nan));
    NAME(store)(usable_inference, NAME(select)(i_fine, i, nan));
    vf d = (vf)((vi)(t - i) & both), size = NAME(absolute)(d);
    vf ratio = NAME(exp)(NAME(clamped)(d, at->max_exponent));
    vf k3 = NAME(select)(size < 1.0f, NAME(k3_series)(d), (ratio - 1.0f) - d);
    vf counted = (vf)((vi)ratio & both);
    value[SUM_LOG_RATIO] += d;
    value[SUM_ABS_LOG_RATIO] += size;
    value[SUM_SQ_LOG_RATIO] += d * d;
    value[SUM_K3] += k3;
    value[SUM_K3_CAPPED] += NAME(smaller)(k3, NAME(splat)(at->k3_cap));
    value[SUM_RATIO] += counted;
    value[SUM_SQ_RATIO] += counted * counted;
    /* A mask's lanes are 0 or -1. */
    count[COUNT] -= mask;
    count[NUM_COMPARED] -= both;
    count[NUM_ZEROS] -= both & (i == 0.0f) & (t < at->zero_needs_below);
    count[NUM_CONFIDENT] -= both & (i >= at->confident_from) & (d < -at->disagrees_by);
    count[NUM_TRAINER_FINE] -= t_fine;
    count[NUM_INFERENCE_FINE] -= i_fine;
    maxima[0] = NAME(larger)(size, maxima[0]);
    maxima[1] = NAME(larger)(NAME(select)(both, i, NAME(splat)(-INFINITY)), maxima[1]);
    if (!to.out) return;
    vf written = NAME(written_of)(d, ratio, at, &to);
    NAME(store)(to.out, NAME(written_of_any)(written, t, mask, both, i_fine, &to));
}

/* The residuals of a block: each inference logprob beside the trainer's at every lag. */
static INLINE void NAME(residuals_of)(const float *trainer, const float *inference, int vectors, float clip,
                                      struct NAME(sums) *sums) {
    vf value[NUM_LAGS] = {{0}};
    vi pairs[NUM_LAGS] = {{0}};
    for (int v = 0; v < vectors; v++) {
        vf i = NAME(load)(inference + v * LANES);
        for (int lag = 0; lag < NUM_LAGS; lag++) {
            vf apart = NAME(absolute)(i - NAME(load)(trainer + v * LANES + lag));
            /* False where either is NaN: no pair. */
            vi paired = apart == apart;
            vf kept = NAME(select)(apart < clip, apart, NAME(splat)(clip));
            value[lag] += (vf)((vi)kept & paired);
            pairs[lag] -= paired;
        }
    }
    for (int lag = 0; lag < NUM_LAGS; lag++) {
        sums->value[RESIDUAL_SUM + lag] += __builtin_convertvector(value[lag], vd);
        sums->count[NUM_PAIRS + lag] += pairs[lag];
    }
}

static INLINE float NAME(partner)(const struct tokens *of, int64_t at, int64_t start, int64_t stop) {
    int there = at >= start && at < stop && of->mask[at] && isfinite(of->trainer[at]);
    return there ? of->trainer[at] : NAN;
}

/* Any tokens [first, first + n) of the segment [start, stop); n <= BLOCK. */
static INLINE void NAME(any_block)(const struct tokens *of, int64_t start, int64_t stop, int64_t first, int n,
                                     const struct limits *at, struct NAME(sums) *sums) {
    float trainer[BLOCK + LANES + 2 * MAX_LAG], inference[BLOCK + LANES];
    vf value[RESIDUAL_SUM] = {{0}};
    vi count[NUM_PAIRS] = {{0}};
    vf maxima[2] = {sums->max_abs_log_ratio, sums->max_inference};
    int done = 0;
    for (; done + LANES <= n; done += LANES) {
        int64_t j = first + done;
        NAME(stats_of)(NAME(load)(of->trainer + j), NAME(load)(of->inference + j), NAME(load_mask)(of->mask + j), at,
                       value, count, maxima, trainer + MAX_LAG + done, inference + done,
                       written_from(of->written, j));
    }
    if (done < n) {
        float t[LANES] = {0}, i[LANES] = {0}, advantages[LANES] = {0}, out[LANES];
        struct written from = written_from(of->written, first + done), to = from;
        uint8_t mask[LANES] = {0};
        size_t left = (size_t)(n - done);
        memcpy(t, of->trainer + first + done, left * sizeof *t);
        memcpy(i, of->inference + first + done, left * sizeof *i);
        memcpy(mask, of->mask + first + done, left);
        if (from.out) to.out = out;
        if (from.advantages) to.advantages = memcpy(advantages, from.advantages, left * sizeof *advantages);
        NAME(stats_of)(NAME(load)(t), NAME(load)(i), NAME(load_mask)(mask), at, value, count, maxima,
                       trainer + MAX_LAG + done, inference + done, to);
        if (from.out) memcpy(from.out, out, left * sizeof *out);
    }
    for (int k = 0; k < MAX_LAG; k++) {
        trainer[k] = NAME(partner)(of, first - MAX_LAG + k, start, stop);
        trainer[MAX_LAG + n + k] = NAME(partner)(of, first + n + k, start, stop);
    }
    for (int k = 0; k < RESIDUAL_SUM; k++) sums->value[k] += __builtin_convertvector(value[k], vd);
    for (int k = 0; k < NUM_PAIRS; k++) sums->count[k] += count[k];
    sums->max_abs_log_ratio = maxima[0];
    sums->max_inference = maxima[1];
    NAME(residuals_of)(trainer, inference, (n + LANES - 1) / LANES, at->residual_clip, sums);
}

/* What a clean block adds, told apart from what any block adds by its first pass. */
struct NAME(clean) {
    vf power[NUM_POWERS]; /* power[k]: the sum of log_ratio^(k + 1) */
    vf abs_log_ratio, residual[NUM_LAGS], max_abs, max_inference;
};

static INLINE int NAME(all_trained)(const uint8_t *mask, int n) {
    uint8_t all = 1;
    for (int j = 0; j < n; j++) all &= mask[j] != 0;
    return all;
}

/* One pass over n tokens whose partners at every lag are there: all that needs no exponential. Lag 0 is left
 * out: where no |log_ratio| reaches the clip its residuals are the |log_ratio| themselves. */
static INLINE void NAME(clean_pass)(const float *trainer, const float *inference, int n, float clip,
                                    struct NAME(clean) *to) {
    struct NAME(clean) sums = *to;
    for (int j = 0; j < n; j += LANES) {
        __builtin_prefetch(trainer + j + PREFETCH);
        __builtin_prefetch(inference + j + PREFETCH);
        vf i = NAME(load)(inference + j), d = NAME(load)(trainer + j) - i, size = NAME(absolute)(d);
        vf square = d * d, cube = square * d;
        sums.power[0] += d;
        sums.power[1] += square;
        sums.power[2] += square * d;
        sums.power[3] += square * square;
        sums.power[4] += square * cube;
        sums.power[5] += cube * cube;
        sums.power[6] += cube * (square * square);
        sums.abs_log_ratio += size;
        sums.max_abs = NAME(larger)(size, sums.max_abs);
        sums.max_inference = NAME(larger)(i, sums.max_inference);
        for (int lag = 0; lag < NUM_LAGS; lag++) {
            if (lag == MAX_LAG) continue;
            vf apart = NAME(absolute)(i - NAME(load)(trainer + j + lag - MAX_LAG));
            sums.residual[lag] += NAME(smaller)(apart, NAME(splat)(clip));
        }
    }
    *to = sums;
}

/* The sum of |log_ratio|, each clipped: the residuals at lag 0. */
static INLINE vf NAME(clipped_sizes)(const float *trainer, const float *inference, int n, float clip) {
    vf sum = {0};
    for (int j = 0; j < n; j += LANES) {
        vf size = NAME(absolute)(NAME(load)(trainer + j) - NAME(load)(inference + j));
        sum += NAME(smaller)(size, NAME(splat)(clip));
    }
    return sum;
}

/* The sums over ratios, of n log ratios below SMALL, from the sums of their powers. The sum of k3 has d^m / m!,
 * m from 2 on. With u = ratio - 1 = log_ratio + k3 the sum of ratios is n + sum u, and that of their squares
 * n + 2 sum u + sum u^2, where u^2 has (2^m - 2) d^m / m!. At SMALL what is left out is 3e-8 of the sums. */
static INLINE void NAME(small_ratios)(const vf *power, int n, vf *value) {
    vf k3 = {0}, sum_sq = {0};
    for (int k = NUM_POWERS - 1; k > 0; k--) {
        k3 += power[k] * OF_K3[k];
        sum_sq += power[k] * OF_SQUARE[k];
    }
    vf above_one = power[0] + k3, ones = NAME(splat)((float)(n / LANES));
    value[SUM_K3] = value[SUM_K3_CAPPED] = k3;
    value[SUM_RATIO] = ones + above_one;
    value[SUM_SQ_RATIO] = ones + (2.0f * above_one + sum_sq);
}

/* The same of any finite log ratios. */
static INLINE void NAME(large_ratios)(const float *trainer, const float *inference, int n, const struct limits *at,
                                      vf *value) {
    for (int j = 0; j < n; j += LANES) {
        vf d = NAME(load)(trainer + j) - NAME(load)(inference + j);
        vf ratio = NAME(exp)(NAME(clamped)(d, at->max_exponent));
        vf k3 = NAME(select)(NAME(absolute)(d) < 1.0f, NAME(k3_series)(d), (ratio - 1.0f) - d);
        value[SUM_K3] += k3;
        value[SUM_K3_CAPPED] += NAME(smaller)(k3, NAME(splat)(at->k3_cap));
        value[SUM_RATIO] += ratio;
        value[SUM_SQ_RATIO] += ratio * ratio;
    }
}

/* What is written of n tokens that are all compared. */
static INLINE void NAME(write_clean)(const float *trainer, const float *inference, int n, const struct limits *at,
                                     struct written to) {
    for (int j = 0; j < n; j += LANES) {
        vf d = NAME(load)(trainer + j) - NAME(load)(inference + j);
        vf ratio = NAME(exp)(NAME(clamped)(d, at->max_exponent));
        struct written here = written_from(to, j);
        NAME(store)(here.out, NAME(written_of)(d, ratio, at, &here));
    }
}

/* The two counts that a clean block can have beside the number of its tokens. */
static INLINE void NAME(clean_counts)(const float *trainer, const float *inference, int n, const struct limits *at,
                                      vi *count) {
    for (int j = 0; j < n; j += LANES) {
        vf t = NAME(load)(trainer + j), i = NAME(load)(inference + j);
        count[NUM_ZEROS] -= (i == 0.0f) & (t < at->zero_needs_below);
        count[NUM_CONFIDENT] -= (i >= at->confident_from) & (t - i < -at->disagrees_by);
    }
}

/* Whole vectors in the middle of a segment, every token of them and its partners trained and finite: the common
 * case, at a third of the instructions. 0 and nothing added where it is no such block. */
static INLINE int NAME(clean_block)(const struct tokens *of, int64_t first, int n, const struct limits *at,
                                    struct NAME(sums) *sums) {
    const float *trainer = of->trainer + first, *inference = of->inference + first;
    __builtin_prefetch(of->mask + first + PREFETCH);
    if (!NAME(all_trained)(of->mask + first, n)) return 0;
    for (int k = 1; k <= MAX_LAG; k++)
        if (!of->mask[first - k] || !isfinite(trainer[-k]) || !of->mask[first + n + k - 1] ||
            !isfinite(trainer[n + k - 1]))
            return 0;
    struct NAME(clean) found = {.max_inference = NAME(splat)(-INFINITY)};
    NAME(clean_pass)(trainer, inference, n, at->residual_clip, &found);
    /* A NaN or an infinity on either side is one in here. */
    if (NAME(any)(~NAME(finite)(found.abs_log_ratio))) return 0;
    vf value[RESIDUAL_SUM] = {{0}};
    /* No k3 below SMALL reaches a cap as large as SMALL. */
    int small = at->k3_cap >= SMALL && !NAME(any)(found.max_abs >= SMALL);
    if (small) NAME(small_ratios)(found.power, n, value);
    else NAME(large_ratios)(trainer, inference, n, at, value);
    if (of->written.out) NAME(write_clean)(trainer, inference, n, at, written_from(of->written, first));
    if (NAME(any)((found.max_inference >= 0.0f) | (found.max_abs > at->disagrees_by)))
        NAME(clean_counts)(trainer, inference, n, at, sums->count);
    int clipped = NAME(any)(found.max_abs > at->residual_clip);
    found.residual[MAX_LAG] =
        clipped ? NAME(clipped_sizes)(trainer, inference, n, at->residual_clip) : found.abs_log_ratio;
    value[SUM_LOG_RATIO] = found.power[0];
    value[SUM_ABS_LOG_RATIO] = found.abs_log_ratio;
    value[SUM_SQ_LOG_RATIO] = found.power[1];
    for (int k = 0; k < RESIDUAL_SUM; k++) sums->value[k] += __builtin_convertvector(value[k], vd);
    for (int lag = 0; lag < NUM_LAGS; lag++)
        sums->value[RESIDUAL_SUM + lag] += __builtin_convertvector(found.residual[lag], vd);
    sums->max_abs_log_ratio = NAME(larger)(found.max_abs, sums->max_abs_log_ratio);
    sums->max_inference = NAME(larger)(found.max_inference, sums->max_inference);
    sums->num_clean += n;
    return 1;
}

/* Tokens from `first` on of the segment [start, stop), none from `last` on; how many. A clean block needs its
 * partners, so the few tokens at either end of a segment, which lack some, are taken by themselves. */
static INLINE int NAME(stats_block)(const struct tokens *of, int64_t start, int64_t stop, int64_t first, int64_t last,
                                    const struct limits *at, struct NAME(sums) *sums) {
    int n = last - first < BLOCK ? (int)(last - first) : BLOCK;
    if (first - MAX_LAG < start) {
        n = n < LANES ? n : LANES;
    } else {
        int64_t inner = stop - MAX_LAG - first;
        int whole = (inner < n ? (int)inner : n) / LANES * LANES;
        if (whole > 0 && NAME(clean_block)(of, first, whole, at, sums)) return whole;
    }
    NAME(any_block)(of, start, stop, first, n, at, sums);
    return n;
}

/* One chunk [first, last) of the segment [start, stop) to one row of the table. */
static void NAME(stats_chunk)(const struct tokens *of, int64_t start, int64_t stop, int64_t first, int64_t last,
                              const struct limits *at, double *row) {
    struct NAME(sums) sums;
    memset(&sums, 0, sizeof sums);
    sums.max_inference = NAME(splat)(-INFINITY);
    for (int64_t j = first; j < last;) j += NAME(stats_block)(of, start, stop, j, last, at, &sums);
    int64_t counts[NUM_COUNTS];
    for (int k = 0; k < NUM_COUNTS; k++) {
        counts[k] = NAME(count)(sums.count[k]);
        if (k != NUM_ZEROS && k != NUM_CONFIDENT) counts[k] += sums.num_clean;
    }
    row[0] = (double)counts[COUNT];
    row[1] = (double)counts[NUM_COMPARED];
    for (int k = 0; k < RESIDUAL_SUM; k++) row[2 + k] = NAME(sum)(sums.value[k]);
    row[MAX_ABS_COLUMN] = NAME(largest)(sums.max_abs_log_ratio);
    row[MAX_INFERENCE_COLUMN] = NAME(largest)(sums.max_inference);
    row[11] = (double)counts[NUM_ZEROS];
    row[12] = (double)counts[NUM_CONFIDENT];
    row[13] = (double)(counts[COUNT] - counts[NUM_TRAINER_FINE]);
    row[14] = (double)(counts[COUNT] - counts[NUM_INFERENCE_FINE]);
    for (int lag = 0; lag < NUM_LAGS; lag++) {
        row[15 + lag] = NAME(sum)(sums.value[RESIDUAL_SUM + lag]);
        row[15 + NUM_LAGS + lag] = (double)counts[NUM_PAIRS + lag];
    }
}
