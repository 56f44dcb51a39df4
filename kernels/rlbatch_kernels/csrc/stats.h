/* alignment_stats: one chunk of one segment. Included once a processor level. */

#undef BLOCK
#define BLOCK (LANE_TOKENS * LANES)

/* Sums over the tokens of a chunk, lane by lane: float32 within a block, float64 between blocks. */
struct NAME(sums) {
    vd value[NUM_VALUES];
    vi count[NUM_COUNTS];
    vf max_abs_log_ratio, max_inference;
    double max_window_residual, max_window_lag_gain;
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

/* Sums at each lag, and how many pairs they are of. */
struct NAME(residuals) {
    vf value[NUM_LAGS];
    vi pairs[NUM_LAGS];
};

/* The residuals of a block: each inference logprob beside the trainer's at every lag. */
static INLINE struct NAME(residuals) NAME(residuals_of)(const float *trainer, const float *inference, int vectors,
                                                        float clip) {
    struct NAME(residuals) sums;
    memset(&sums, 0, sizeof sums);
    for (int v = 0; v < vectors; v++) {
        vf i = NAME(load)(inference + v * LANES);
        for (int lag = 0; lag < NUM_LAGS; lag++) {
            vf apart = NAME(absolute)(i - NAME(load)(trainer + v * LANES + lag));
            /* False where either is NaN: no pair. */
            vi paired = apart == apart;
            vf kept = NAME(select)(apart < clip, apart, NAME(splat)(clip));
            sums.value[lag] += (vf)((vi)kept & paired);
            sums.pairs[lag] -= paired;
        }
    }
    return sums;
}

/* Up to LANES tokens from `j` on; those beyond n are 0, and not trained. */
static INLINE void NAME(load_tokens)(const struct tokens *of, int64_t j, int n, vf *t, vf *i, vi *mask) {
    if (n >= LANES) {
        *t = NAME(load)(of->trainer + j);
        *i = NAME(load)(of->inference + j);
        *mask = NAME(load_mask)(of->mask + j);
        return;
    }
    float trainer[LANES] = {0}, inference[LANES] = {0};
    uint8_t trained[LANES] = {0};
    memcpy(trainer, of->trainer + j, (size_t)n * sizeof *trainer);
    memcpy(inference, of->inference + j, (size_t)n * sizeof *inference);
    memcpy(trained, of->mask + j, (size_t)n);
    *t = NAME(load)(trainer);
    *i = NAME(load)(inference);
    *mask = NAME(load_mask)(trained);
}

/* How many of n tokens from `first` on are compared, and the sum of their |log_ratio|. */
static NOINLINE double NAME(sum_of_sizes)(const struct tokens *of, int64_t first, int n, int64_t *compared) {
    vf total = {0};
    vi count = {0};
    for (int done = 0; done < n; done += LANES) {
        vf t, i;
        vi mask;
        NAME(load_tokens)(of, first + done, n - done, &t, &i, &mask);
        vi both = mask & NAME(finite)(t) & NAME(finite)(i);
        total += (vf)((vi)NAME(absolute)(t - i) & both);
        count -= both;
    }
    *compared = NAME(count)(count);
    return NAME(total_of)(total);
}

/* The window from `first` on of a segment up to `stop`, whose pairs are all inside it: taken in where it is loud. */
static NOINLINE void NAME(window)(const struct tokens *of, int64_t first, int64_t stop, const struct limits *at,
                                  struct NAME(sums) *sums) {
    int n = stop - first < WINDOW ? (int)(stop - first) : WINDOW;
    int64_t compared;
    /* No mean is larger without the clip; rounded down, for sums in another order must not fall short of it. */
    if (NAME(sum_of_sizes)(of, first, n, &compared) < 0.999 * at->window_least * (double)compared) return;
    float trainer[WINDOW + LANES + 2 * MAX_LAG], inference[WINDOW + LANES];
    for (int j = 0; j < WINDOW + LANES + 2 * MAX_LAG; j++) trainer[j] = NAN;
    for (int j = 0; j < n; j += LANES) {
        vf t, i, nan = NAME(splat)(NAN);
        vi mask;
        NAME(load_tokens)(of, first + j, n - j, &t, &i, &mask);
        NAME(store)(trainer + MAX_LAG + j, NAME(select)(mask & NAME(finite)(t), t, nan));
        NAME(store)(inference + j, NAME(select)(mask & NAME(finite)(i), i, nan));
    }
    struct NAME(residuals) found = NAME(residuals_of)(trainer, inference, (n + LANES - 1) / LANES, at->residual_clip);
    double mean[NUM_LAGS], other = INFINITY;
    for (int lag = 0; lag < NUM_LAGS; lag++) {
        int64_t pairs = NAME(count)(found.pairs[lag]);
        mean[lag] = pairs ? NAME(total_of)(found.value[lag]) / (double)pairs : INFINITY;
        if (lag != MAX_LAG && mean[lag] < other) other = mean[lag];
    }
    double zero = mean[MAX_LAG];
    if (zero == INFINITY || zero < at->window_least) return;
    if (zero > sums->max_window_residual) sums->max_window_residual = zero;
    if (1 - other / zero > sums->max_window_lag_gain) sums->max_window_lag_gain = 1 - other / zero;
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
    vf maxima[2] = {{0}, NAME(splat)(-INFINITY)};
    for (int done = 0; done < n; done += LANES) {
        struct written from = written_from(of->written, first + done), to = from;
        float advantages[LANES] = {0}, out[LANES];
        int left = n - done < LANES ? n - done : LANES, is_tail = left < LANES;
        vf t, i;
        vi mask;
        NAME(load_tokens)(of, first + done, left, &t, &i, &mask);
        if (is_tail && from.out) to.out = out;
        if (is_tail && from.advantages)
            to.advantages = memcpy(advantages, from.advantages, (size_t)left * sizeof *advantages);
        NAME(stats_of)(t, i, mask, at, value, count, maxima, trainer + MAX_LAG + done, inference + done, to);
        if (is_tail && from.out) memcpy(from.out, out, (size_t)left * sizeof *out);
    }
    for (int k = 0; k < MAX_LAG; k++) {
        trainer[k] = NAME(partner)(of, first - MAX_LAG + k, start, stop);
        trainer[MAX_LAG + n + k] = NAME(partner)(of, first + n + k, start, stop);
    }
    struct NAME(residuals) found = NAME(residuals_of)(trainer, inference, (n + LANES - 1) / LANES, at->residual_clip);
    for (int k = 0; k < RESIDUAL_SUM; k++) sums->value[k] += __builtin_convertvector(value[k], vd);
    for (int k = 0; k < NUM_PAIRS; k++) sums->count[k] += count[k];
    for (int lag = 0; lag < NUM_LAGS; lag++) {
        sums->value[RESIDUAL_SUM + lag] += __builtin_convertvector(found.value[lag], vd);
        sums->count[NUM_PAIRS + lag] += found.pairs[lag];
    }
    sums->max_abs_log_ratio = NAME(larger)(maxima[0], sums->max_abs_log_ratio);
    sums->max_inference = NAME(larger)(maxima[1], sums->max_inference);
    /* No mean is above its largest term. */
    if (!NAME(any)(maxima[0] >= at->window_least)) return;
    for (int64_t j = first - (first - start) % WINDOW; j < first + n; j += WINDOW)
        NAME(window)(of, j, stop, at, sums);
}

/* What a clean block adds, told apart from what any block adds by its first pass. */
struct NAME(clean) {
    vf power[NUM_POWERS]; /* power[k]: the sum of log_ratio^(k + 1) */
    vf abs_log_ratio, residual[NUM_LAGS], max_abs, max_inference;
    vf max_window_mean; /* of |log_ratio|, lane by lane: a window's own is at most that of its loudest lane */
};

static INLINE int NAME(all_trained)(const uint8_t *mask, int n) {
    uint8_t all = 1;
    for (int j = 0; j < n; j++) all &= mask[j] != 0;
    return all;
}

/* Tokens whose partners at every lag are there, at most a window of them: all that needs no exponential. Lag 0 is
 * left out: where no |log_ratio| reaches the clip its residuals are the |log_ratio| themselves. */
static INLINE void NAME(clean_tokens)(const float *trainer, const float *inference, int n, float clip,
                                      struct NAME(clean) *to, vf *mean) {
    vf total = {0};
    for (int j = 0; j < n; j += LANES) {
        __builtin_prefetch(trainer + j + PREFETCH);
        __builtin_prefetch(inference + j + PREFETCH);
        vf i = NAME(load)(inference + j), d = NAME(load)(trainer + j) - i, size = NAME(absolute)(d);
        vf square = d * d, cube = square * d;
        to->power[0] += d;
        to->power[1] += square;
        to->power[2] += square * d;
        to->power[3] += square * square;
        to->power[4] += square * cube;
        to->power[5] += cube * cube;
        to->power[6] += cube * (square * square);
        total += size;
        to->max_abs = NAME(larger)(size, to->max_abs);
        to->max_inference = NAME(larger)(i, to->max_inference);
        for (int lag = 0; lag < NUM_LAGS; lag++) {
            if (lag == MAX_LAG) continue;
            vf apart = i - NAME(load)(trainer + j + lag - MAX_LAG);
            to->residual[lag] += NAME(clipped)(apart, NAME(splat)(clip));
        }
    }
    to->abs_log_ratio += total;
    *mean = total * ((float)LANES / (float)n);
    to->max_window_mean = NAME(larger)(*mean, to->max_window_mean);
}

/* One pass over n tokens of a clean block, the first of which is number `at` of its window; and the mean |log_ratio|
 * of each window's tokens in the block. */
static INLINE void NAME(clean_pass)(const float *trainer, const float *inference, int n, int at, float clip,
                                    struct NAME(clean) *to, vf *means) {
    struct NAME(clean) sums = *to;
    int j = 0;
    if (at > 0) {
        j = WINDOW - at < n ? WINDOW - at : n;
        NAME(clean_tokens)(trainer, inference, j, clip, &sums, means++);
    }
    for (; j + WINDOW <= n; j += WINDOW)
        NAME(clean_tokens)(trainer + j, inference + j, WINDOW, clip, &sums, means++);
    if (j < n) NAME(clean_tokens)(trainer + j, inference + j, n - j, clip, &sums, means);
    *to = sums;
}

/* Those windows of a clean block that have a lane of at least `least`. */
static NOINLINE void NAME(loud_windows)(const struct tokens *of, int64_t start, int64_t stop, int64_t first, int n,
                                        const vf *means, float least, const struct limits *at,
                                        struct NAME(sums) *sums) {
    for (int64_t j = first - (first - start) % WINDOW; j < first + n; j += WINDOW)
        if (NAME(any)(*means++ >= least)) NAME(window)(of, j, stop, at, sums);
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
static INLINE int NAME(clean_block)(const struct tokens *of, int64_t start, int64_t stop, int64_t first, int n,
                                    const struct limits *at, struct NAME(sums) *sums) {
    const float *trainer = of->trainer + first, *inference = of->inference + first;
    if (!NAME(all_trained)(of->mask + first, n)) return 0;
    for (int k = 1; k <= MAX_LAG; k++)
        if (!of->mask[first - k] || !isfinite(trainer[-k]) || !of->mask[first + n + k - 1] ||
            !isfinite(trainer[n + k - 1]))
            return 0;
    struct NAME(clean) found = {.max_inference = NAME(splat)(-INFINITY)};
    vf means[BLOCK / WINDOW];
    NAME(clean_pass)(trainer, inference, n, (int)((first - start) % WINDOW), at->residual_clip, &found, means);
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
    /* Less a little, for sums in another order must not fall short of it. */
    float least = 0.999f * at->window_least;
    if (NAME(any)(found.max_window_mean >= least))
        NAME(loud_windows)(of, start, stop, first, n, means, least, at, sums);
    return 1;
}

/* Tokens from `first` on of the segment [start, stop), none from `last` on; how many. A clean block needs its
 * partners, so the few tokens at either end of a segment, which lack some, are taken by themselves. Blocks end
 * where windows do. */
static INLINE int NAME(stats_block)(const struct tokens *of, int64_t start, int64_t stop, int64_t first, int64_t last,
                                    const struct limits *at, struct NAME(sums) *sums) {
    int most = BLOCK - (int)((first - start) % WINDOW), n = last - first < most ? (int)(last - first) : most;
    if (first - MAX_LAG < start) {
        n = n < LANES ? n : LANES;
    } else {
        int64_t inner = stop - MAX_LAG - first;
        int whole = (inner < n ? (int)inner : n) / LANES * LANES;
        if (whole > 0 && NAME(clean_block)(of, start, stop, first, whole, at, sums)) return whole;
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
        row[LAGS_COLUMN + lag] = NAME(sum)(sums.value[RESIDUAL_SUM + lag]);
        row[LAGS_COLUMN + NUM_LAGS + lag] = (double)counts[NUM_PAIRS + lag];
    }
    int64_t compared = 0;
    int n = first > start ? 0 : stop - start < WINDOW ? (int)(stop - start) : WINDOW;
    row[FIRST_ABS_COLUMN] = NAME(sum_of_sizes)(of, start, n, &compared);
    row[FIRST_COMPARED_COLUMN] = (double)compared;
    row[MAX_WINDOW_COLUMN] = sums.max_window_residual;
    row[MAX_GAIN_COLUMN] = sums.max_window_lag_gain;
}
