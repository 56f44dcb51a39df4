/* The CPU kernels of rlbatch_kernels: statistics of aligned logprobs, and softmax over rows of logits.
 *
 * Plain C11 with the vector extension of gcc and clang; no header of Python or torch. Called through ctypes from
 * c_library.py, which has checked every argument. No kernel's result depends, to the bit, on the number of
 * threads, on the other rows or on the other segments. Nothing is kept between calls.
 */

#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline, unused))
#define NOINLINE __attribute__((noinline, unused))
#define EXPORT __attribute__((visibility("default")))

/* Raised with every change of what is exported; c_library.py refuses another one. */
enum { INTERFACE = 4 };

static const float LOG2_E = 1.44269504f;
/* ln 2 = LN2_HIGH + LN2_LOW; the first has 15 bits, so that its product with a small whole number is exact. */
static const float LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 1.42860682e-6f;
/* 1.5 * 2^23: adding it leaves the nearest whole number in the low bits of the sum. */
static const float ROUND = 12582912.0f;
static const double LOG2_E_DOUBLE = 1.4426950408889634;

/* Below this power of two a term is nothing beside the largest, which is 1. */
static const float MIN_POWER = -126.0f;

/* tanh x is x + x * u * p(u), u = x^2, below this: p interpolates at the Chebyshev nodes, relative error 2e-8. */
static const float TANH_SERIES_BELOW = 0.625f;
static const float OF_TANH[5] = {-0.33333329f, 0.13332770f, -0.053850910f, 0.020997179f, -0.0060967147f};
/* From here on tanh is 1 in float32, and its derivative below 1e-27. */
static const float TANH_IS_1 = 32.0f;

/* dtypes of logits, as c_library.py numbers them. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* Columns between two folds into float64: they stay in the first cache between their maximum and their sum. */
enum { COLUMNS = 1024 };
/* Bytes ahead of a row's reading, and elements ahead in the two streams of the statistics: a page of 4 KiB, at
 * whose end a processor's own prefetching stops. 512 took 6 to 14 % longer in seven runs, 1536 6 %. */
enum { PREFETCH_BYTES = 2048, PREFETCH = 1024 };

/* |log_ratio| below which a short series gives k3; there k3 is below 0.035. */
static const float SMALL = 0.25f;

/* The series of k3 and of (ratio - 1)^2 in log_ratio: factors of its first, second, ... power. */
enum { NUM_POWERS = 7 };
static const float OF_K3[NUM_POWERS] = {0, 1.0f / 2, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040};
static const float OF_SQUARE[NUM_POWERS] = {0, 1, 1, 14.0f / 24, 30.0f / 120, 62.0f / 720, 126.0f / 5040};

/* Tokens that one lane adds up in float32 before it is folded into float64. */
enum { LANE_TOKENS = 64 };
/* Tokens of a segment that are one window, counted from its start. */
enum { WINDOW = 64 };
/* Tokens between two entries in the table of partial results: whole windows. */
enum { CHUNK = 1 << 16 };

/* Columns of the table, in the order of STAT_COLUMNS. */
enum { MAX_LAG = 2, NUM_LAGS = 2 * MAX_LAG + 1 };
enum { MAX_ABS_COLUMN = 9, MAX_INFERENCE_COLUMN = 10, LAGS_COLUMN = 15 };
enum {
    FIRST_COMPARED_COLUMN = LAGS_COLUMN + 2 * NUM_LAGS, FIRST_ABS_COLUMN, MAX_WINDOW_COLUMN, MAX_GAIN_COLUMN,
    NUM_COLUMNS
};

static int is_maximum(int column) {
    return column == MAX_ABS_COLUMN || column == MAX_INFERENCE_COLUMN || column == MAX_WINDOW_COLUMN ||
           column == MAX_GAIN_COLUMN;
}

/* Sums in float, which stand side by side in the table from column 2 on; then those of the lags. */
enum {
    SUM_LOG_RATIO, SUM_ABS_LOG_RATIO, SUM_SQ_LOG_RATIO, SUM_K3, SUM_K3_CAPPED, SUM_RATIO, SUM_SQ_RATIO,
    RESIDUAL_SUM, NUM_VALUES = RESIDUAL_SUM + NUM_LAGS
};
enum {
    COUNT, NUM_COMPARED, NUM_ZEROS, NUM_CONFIDENT, NUM_TRAINER_FINE, NUM_INFERENCE_FINE,
    NUM_PAIRS, NUM_COUNTS = NUM_PAIRS + NUM_LAGS
};

/* The numbers of stats.py that decide what is counted. */
struct limits {
    float max_exponent, k3_cap, zero_needs_below, confident_from, disagrees_by, residual_clip, window_least;
};

/* What is written of each token: its ratio, or the gradient of a policy loss to the trainer's logprob, as
 * per_token.py defines them and numbers them. */
enum { RATIO = 0, CLIP = 1, CAP = 2 };
struct written {
    float *out;
    const float *advantages; /* NULL for RATIO */
    int64_t kind;
    float low, high;
};

/* One row of the batch. */
struct tokens {
    const float *trainer, *inference;
    const uint8_t *mask;
    struct written written; /* out NULL where nothing is written */
};

static struct written written_from(struct written from, int64_t offset) {
    if (from.out) from.out += offset;
    if (from.advantages) from.advantages += offset;
    return from;
}

/* One row's softmax so far. */
struct softmax {
    float maximum, target;
    double total, weighted; /* sums of 2^power and of 2^power * power, power = (logit - maximum) * scale */
    int64_t above;          /* logits larger than the target's */
};

/* What is done to logits before the softmax, in this order; see shaping.py. */
struct shaping {
    float logit_scale, soft_cap; /* a cap of 0: none */
    float scale_over_cap, one_over_cap;
    const uint8_t *vocab_mask; /* of a row's columns; NULL: every one counts */
};

/* What a row's gradient is made of: 2^power * (constant + slope * power). */
struct slope {
    float maximum, scale, constant, slope;
};

#include "levels.h"

/* ---- the processor ---- */

struct level {
    const char *name;
    void (*stats_chunk)(const struct tokens *, int64_t, int64_t, int64_t, int64_t, const struct limits *, double *);
    void (*softmax_add)(const char *, int, int64_t, float, int, const struct shaping *, struct softmax *);
    void (*softmax_gradient)(const char *, int, int64_t, const struct slope *, const struct shaping *, char *, int);
    float (*shape_one)(const char *, int, int64_t, int64_t, const struct shaping *, float *);
};

static const struct level LEVELS[] = {
    {"baseline", stats_chunk_baseline, softmax_add_baseline, softmax_gradient_baseline, shape_one_baseline},
#ifdef HAVE_X86_LEVELS
    {"avx2", stats_chunk_avx2, softmax_add_avx2, softmax_gradient_avx2, shape_one_avx2},
    {"avx512", stats_chunk_avx512, softmax_add_avx512, softmax_gradient_avx512, shape_one_avx512},
#endif
};

#ifdef HAVE_X86_LEVELS
/* Not every compiler's __builtin_cpu_supports knows the name "f16c". */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

EXPORT int rlb_interface(void) { return INTERFACE; }

/* How many levels this processor has; the last one is the best. */
EXPORT int rlb_num_levels(void) {
#ifdef HAVE_X86_LEVELS
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
          __builtin_cpu_supports("bmi2") && has_f16c()))
        return 1;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 3;
    return 2;
#else
    return 1;
#endif
}

EXPORT const char *rlb_level_name(int level) { return LEVELS[level].name; }

/* ---- threads ---- */

/* Items 0..num_items, each done wholly by whichever thread claims it. */
struct work {
    void (*item)(const void *job, int64_t index);
    const void *job;
    int64_t num_items, next;
};

static void work_off(void *argument) {
    struct work *work = argument;
    for (;;) {
        int64_t index = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (index >= work->num_items) return;
        work->item(work->job, index);
    }
}

static void *work_off_thread(void *argument) {
    work_off(argument);
    return NULL;
}

/* The OpenMP runtime that torch has loaded, where it is one with this entry. Its threads wait for work by
 * spinning, so threads of our own would have to share the cores with them. */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

enum { MAX_THREADS = 256 };

static void run(struct work work, int threads) {
    if (threads > work.num_items) threads = (int)work.num_items;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads <= 1) {
        work_off(&work);
        return;
    }
    if (GOMP_parallel) {
        GOMP_parallel(work_off, &work, (unsigned)threads, 0);
        return;
    }
    pthread_t started[MAX_THREADS];
    int num_started = 0;
    /* Where no more can be started those that run do all the work. */
    while (num_started < threads - 1 &&
           pthread_create(&started[num_started], NULL, work_off_thread, &work) == 0)
        num_started++;
    work_off(&work);
    for (int k = 0; k < num_started; k++) pthread_join(started[k], NULL);
}

/* ---- statistics ---- */

struct stats_job {
    struct tokens batch;
    int64_t stride;
    const int64_t *segments; /* [G, 4]: row, start, stop, turn */
    const int64_t *first_chunk; /* [G + 1] */
    int64_t num_segments;
    const struct limits *limits;
    const struct level *level;
    double *partial; /* [chunks, NUM_COLUMNS] */
};

static void stats_item(const void *argument, int64_t chunk) {
    const struct stats_job *job = argument;
    int64_t low = 0, high = job->num_segments;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (job->first_chunk[middle] <= chunk) low = middle;
        else high = middle;
    }
    const int64_t *segment = job->segments + 4 * low;
    int64_t offset = segment[0] * job->stride, start = segment[1], stop = segment[2];
    int64_t first = start + (chunk - job->first_chunk[low]) * CHUNK;
    int64_t last = stop - first < CHUNK ? stop : first + CHUNK;
    struct tokens row = {job->batch.trainer + offset, job->batch.inference + offset, job->batch.mask + offset,
                         written_from(job->batch.written, offset)};
    job->level->stats_chunk(&row, start, stop, first, last, job->limits, job->partial + chunk * NUM_COLUMNS);
}

static void add_row(double *to, const double *row) {
    for (int k = 0; k < NUM_COLUMNS; k++) {
        if (!is_maximum(k)) to[k] += row[k];
        else if (row[k] > to[k]) to[k] = row[k];
    }
}

/* The table [G, NUM_COLUMNS]; tensors [B, T] contiguous; `written` may be NULL. 0, or 1 where memory could not be had. */
EXPORT int rlb_alignment_stats(const float *trainer, const float *inference, const uint8_t *mask,
                               const struct written *written, int64_t stride, const int64_t *segments,
                               int64_t num_segments, const struct limits *limits, double *table, int level,
                               int threads) {
    int64_t *first_chunk = malloc((size_t)(num_segments + 1) * sizeof *first_chunk);
    if (!first_chunk) return 1;
    first_chunk[0] = 0;
    for (int64_t g = 0; g < num_segments; g++) {
        int64_t length = segments[4 * g + 2] - segments[4 * g + 1];
        first_chunk[g + 1] = first_chunk[g] + (length > CHUNK ? (length + CHUNK - 1) / CHUNK : 1);
    }
    int64_t num_chunks = first_chunk[num_segments];
    double *partial = malloc((size_t)(num_chunks ? num_chunks : 1) * NUM_COLUMNS * sizeof *partial);
    if (!partial) {
        free(first_chunk);
        return 1;
    }
    struct tokens batch = {trainer, inference, mask, written ? *written : (struct written){0}};
    struct stats_job job = {batch, stride, segments, first_chunk, num_segments, limits, &LEVELS[level], partial};
    run((struct work){stats_item, &job, num_chunks, 0}, threads);
    for (int64_t g = 0; g < num_segments; g++) {
        double *row = table + g * NUM_COLUMNS;
        memcpy(row, partial + first_chunk[g] * NUM_COLUMNS, NUM_COLUMNS * sizeof *row);
        for (int64_t c = first_chunk[g] + 1; c < first_chunk[g + 1]; c++) add_row(row, partial + c * NUM_COLUMNS);
    }
    free(first_chunk);
    free(partial);
    return 0;
}

/* How many positions of [B, T] outside of all segments are trained. Segments in the order of their starts; they may
 * overlap. */
EXPORT int64_t rlb_count_outside(const uint8_t *mask, int64_t num_positions, int64_t stride, const int64_t *segments,
                                 int64_t num_segments) {
    int64_t count = 0, until = 0;
    for (int64_t g = 0; g <= num_segments; g++) {
        const int64_t *segment = segments + 4 * g;
        int64_t start = g < num_segments ? segment[0] * stride + segment[1] : num_positions;
        for (int64_t j = until; j < start; j++) count += mask[j] != 0;
        if (g < num_segments && segment[0] * stride + segment[2] > until) until = segment[0] * stride + segment[2];
    }
    return count;
}

/* ---- softmax ---- */

/* Rows of logits; N of them, each with its own target and temperature. */
struct rows {
    const char *logits;
    int64_t dtype;
    const int64_t *offsets; /* [N] elements from `logits` to the row's first column */
    int64_t num_rows, num_columns, first_column;
    const int64_t *target_ids;  /* [N] */
    const double *temperature;  /* [N] */
    const struct shaping *shaping; /* NULL: logits are taken as they are */
};

/* The state of the rows, read and written. */
struct state {
    double *maximum, *total, *target, *weighted; /* [N]; weighted NULL where it is not asked for */
    int64_t *above;                              /* [N] or NULL */
};

/* What a row's gradient is made of (softmax.Coefficients, its slope in powers of two), and where it goes. */
struct upstream {
    const double *at_target, *constant, *slope; /* [N]; slope NULL where it is 0 */
    char *out;
    const int64_t *out_offsets; /* [N] */
    int64_t out_dtype;
};

static float element(const char *row, int64_t dtype, int64_t at) {
    if (dtype == FLOAT32) return ((const float *)row)[at];
    uint16_t half;
    memcpy(&half, row + 2 * at, sizeof half);
    ints_baseline halves = {half};
    if (dtype == FLOAT16) return widen_float16_baseline(halves)[0];
    return ((floats_baseline)(halves << 16))[0];
}

static void put_element(char *row, int64_t dtype, int64_t at, float value) {
    char tail[sizeof(floats_baseline)];
    size_t width = dtype == FLOAT32 ? 4 : 2;
    write_baseline(tail, (int)dtype, 0, splat_baseline(value));
    memcpy(row + (size_t)at * width, tail, width);
}

/* One logit as the softmax takes it, and the derivative of that to what it was. */
static float shaped_element(const struct level *level, const struct rows *rows, const char *row, int64_t at,
                            float *slope) {
    *slope = 1.0f;
    if (!rows->shaping) return element(row, rows->dtype, at);
    return level->shape_one(row, (int)rows->dtype, at, rows->num_columns, rows->shaping, slope);
}

static const char *row_of(const struct rows *rows, int64_t index) {
    return rows->logits + rows->offsets[index] * (rows->dtype == FLOAT32 ? 4 : 2);
}

struct softmax_job {
    const struct rows *rows;
    const struct state *state;
    const struct upstream *upstream;
    const struct level *level;
};

static void forward_item(const void *argument, int64_t index) {
    const struct softmax_job *job = argument;
    const struct rows *rows = job->rows;
    const struct state *state = job->state;
    const char *row = row_of(rows, index);
    int64_t column = rows->target_ids[index] - rows->first_column;
    float slope;
    if (column >= 0 && column < rows->num_columns)
        state->target[index] = shaped_element(job->level, rows, row, column, &slope);
    int full = state->weighted != NULL;
    float scale = (float)(LOG2_E_DOUBLE / rows->temperature[index]);
    struct softmax s = {(float)state->maximum[index], (float)state->target[index], state->total[index],
                        full ? state->weighted[index] * LOG2_E_DOUBLE : 0.0, 0};
    job->level->softmax_add(row, (int)rows->dtype, rows->num_columns, scale, full, rows->shaping, &s);
    state->maximum[index] = s.maximum;
    state->total[index] = s.total;
    if (full) {
        state->weighted[index] = s.weighted / LOG2_E_DOUBLE;
        state->above[index] += s.above;
    }
}

static void backward_item(const void *argument, int64_t index) {
    const struct softmax_job *job = argument;
    const struct rows *rows = job->rows;
    const struct upstream *up = job->upstream;
    const char *row = row_of(rows, index);
    char *out = up->out + up->out_offsets[index] * (up->out_dtype == FLOAT32 ? 4 : 2);
    double maximum = job->state->maximum[index], scale = LOG2_E_DOUBLE / rows->temperature[index];
    double constant = up->constant[index], slope = up->slope ? up->slope[index] : 0.0;
    int64_t column = rows->target_ids[index] - rows->first_column;
    int here = column >= 0 && column < rows->num_columns;
    /* Read before the row is written, which may be in place. */
    float of_shaped = 1.0f;
    double power = here ? (shaped_element(job->level, rows, row, column, &of_shaped) - maximum) * scale : 0.0;
    struct slope g = {(float)maximum, (float)scale, (float)constant, (float)slope};
    job->level->softmax_gradient(row, (int)rows->dtype, rows->num_columns, &g, rows->shaping, out,
                                 (int)up->out_dtype);
    if (!here) return;
    double p = exp2(power), spread = power < MIN_POWER ? 0.0 : slope * power;
    double to_shaped = p * (constant + spread) + up->at_target[index];
    put_element(out, up->out_dtype, column, (float)(to_shaped * of_shaped));
}

/* Take in the columns [first_column, first_column + num_columns) of every row. */
EXPORT void rlb_softmax_forward(const struct rows *rows, const struct state *state, int level, int threads) {
    struct softmax_job job = {rows, state, NULL, &LEVELS[level]};
    run((struct work){forward_item, &job, rows->num_rows, 0}, threads);
}

/* Write the gradient of every column: 2^power * (constant + slope * power), and `at_target` more at the target. */
EXPORT void rlb_softmax_backward(const struct rows *rows, const struct state *state, const struct upstream *upstream,
                                 int level, int threads) {
    struct softmax_job job = {rows, state, upstream, &LEVELS[level]};
    run((struct work){backward_item, &job, rows->num_rows, 0}, threads);
}
