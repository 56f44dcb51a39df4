/* Arithmetic on LANES float32 at once, in the vectors that gcc and clang compile for any processor.
 *
 * Included once a processor level by levels.h, with NAME(x) giving each level names of its own. Sums run lane by
 * lane, so their order is fixed.
 */

#undef vf
#undef vi
#undef vd
#define vf NAME(floats)
#define vi NAME(ints)
#define vd NAME(doubles)
typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef double vd __attribute__((vector_size(8 * LANES)));

static INLINE vf NAME(splat)(float value) { return (vf){0} + value; }

static INLINE vf NAME(select)(vi where, vf yes, vf no) { return (vf)((where & (vi)yes) | (~where & (vi)no)); }

static INLINE vf NAME(absolute)(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* Where NaN or infinite: False. */
static INLINE vi NAME(finite)(vf x) { return ((vi)x & 0x7fffffff) < 0x7f800000; }

/* The larger one, and the smaller one; where x is NaN the other. Compilers see no maximum in a selection. */
static INLINE vf NAME(larger)(vf x, vf other) {
#ifdef VECTOR_MAX
    return (vf)VECTOR_MAX(x, other);
#else
    return NAME(select)(x > other, x, other);
#endif
}

static INLINE vf NAME(smaller)(vf x, vf other) {
#ifdef VECTOR_MIN
    return (vf)VECTOR_MIN(x, other);
#else
    return NAME(select)(x < other, x, other);
#endif
}

/* |x|, at most `most`; where x is NaN the latter. */
static INLINE vf NAME(clipped)(vf x, vf most) {
#ifdef VECTOR_CLIPPED
    return (vf)VECTOR_CLIPPED(x, most);
#else
    return NAME(smaller)(NAME(absolute)(x), most);
#endif
}

/* Whether a comparison holds in any lane. */
static INLINE int NAME(any)(vi where) {
#ifdef VECTOR_SIGNS
    return VECTOR_SIGNS(where) != 0;
#else
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= where[lane];
    return found != 0;
#endif
}

/* Halves onto halves: a few additions that wait for each other, not LANES of them. */
static INLINE double NAME(sum)(vd lanes) {
    double left[LANES];
    memcpy(left, &lanes, sizeof left);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) left[lane] += left[lane + half];
    return left[0];
}

static INLINE double NAME(total_of)(vf lanes) { return NAME(sum)(__builtin_convertvector(lanes, vd)); }

static INLINE int64_t NAME(count)(vi lanes) {
    int64_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += lanes[lane];
    return total;
}

static INLINE float NAME(largest)(vf lanes) {
    float found = lanes[0];
    for (int lane = 1; lane < LANES; lane++) found = lanes[lane] > found ? lanes[lane] : found;
    return found;
}

/* 2^(n + r), relative error 1e-7, from |r| <= 1/2 and n in the low bits of n + ROUND. The polynomial interpolates
 * (2^r - 1) / r at the Chebyshev nodes; n is added to its exponent. */
static INLINE vf NAME(power)(vf shifted, vf r) {
    vf p = r * 1.5453163e-4f + 1.3390863e-3f;
    p = p * r + 9.618083e-3f;
    p = p * r + 5.550357e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.931472e-1f;
    p = p * r + 1.0f;
    return (vf)((vi)p + ((vi)shifted << 23));
}

/* 2^x for -126 <= x < 127; NaN for NaN. */
static INLINE vf NAME(exp2)(vf x) {
    vf shifted = x + ROUND;
    return NAME(power)(shifted, x - (shifted - ROUND));
}

/* e^x for |x| <= 64, as exact: x - n * ln 2 in two steps, of which the first is exact. */
static INLINE vf NAME(exp)(vf x) {
    vf shifted = x * LOG2_E + ROUND, n = shifted - ROUND;
    return NAME(power)(shifted, ((x - n * LN2_HIGH) - n * LN2_LOW) * LOG2_E);
}

static INLINE vf NAME(load)(const float *from) {
    vf x;
    memcpy(&x, from, sizeof x);
    return x;
}

static INLINE void NAME(store)(float *to, vf x) { memcpy(to, &x, sizeof x); }

/* Loops rather than __builtin_convertvector, which gcc 12 takes apart into single elements. */
static INLINE vi NAME(load_mask)(const uint8_t *from) {
    int32_t wide[LANES];
    for (int lane = 0; lane < LANES; lane++) wide[lane] = from[lane] ? -1 : 0;
    vi x;
    memcpy(&x, wide, sizeof x);
    return x;
}

static INLINE vi NAME(load_halves)(const char *from) {
    uint16_t halves[LANES];
    int32_t wide[LANES];
    memcpy(halves, from, sizeof halves);
    for (int lane = 0; lane < LANES; lane++) wide[lane] = halves[lane];
    vi x;
    memcpy(&x, wide, sizeof x);
    return x;
}

static INLINE void NAME(store_halves)(char *to, vi x) {
    int32_t wide[LANES];
    uint16_t halves[LANES];
    memcpy(wide, &x, sizeof wide);
    for (int lane = 0; lane < LANES; lane++) halves[lane] = (uint16_t)wide[lane];
    memcpy(to, halves, sizeof halves);
}

/* float16 -> float32, exact. Multiplying by 2^112 moves the exponent and makes subnormals normal. */
static INLINE vf NAME(widen_float16)(vi half) {
    vi bits = (half & 0x7fff) << 13;
    vf finite = (vf)bits * 0x1p112f;
    vf value = NAME(select)((half & 0x7c00) == 0x7c00, (vf)(bits | 0x7f800000), finite);
    return (vf)((vi)value | ((half & 0x8000) << 16));
}

/* float32 -> float16, to the nearest, ties to even. */
static INLINE vi NAME(narrow_float16)(vf x) {
    vi bits = (vi)x & 0x7fffffff;
    /* Adding 1/2 rounds to multiples of 2^-24, the unit of the subnormals. */
    vi tiny = (vi)((vf)bits + 0.5f) - 0x3f000000;
    vi normal = ((bits + 0xfff + ((bits >> 13) & 1)) >> 13) - (112 << 10);
    vi subnormal = bits < 0x38800000;
    vi half = (subnormal & tiny) | (~subnormal & normal);
    vi huge = bits >= 0x477ff000;
    half = (huge & 0x7c00) | (~huge & half);
    vi nan = bits > 0x7f800000;
    half = (nan & 0x7e00) | (~nan & half);
    return half | (((vi)x >> 16) & 0x8000);
}

/* float32 -> bfloat16, to the nearest, ties to even. */
static INLINE vi NAME(narrow_bfloat16)(vf x) {
    vi bits = (vi)x;
    vi rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vi nan = (bits & 0x7fffffff) > 0x7f800000;
    return ((nan & 0x7fc0) | (~nan & rounded)) & 0xffff;
}

/* LANES elements of `dtype` from element `at`, as float32. */
static INLINE vf NAME(read)(const char *row, int dtype, int64_t at) {
    if (dtype == FLOAT32) return NAME(load)((const float *)row + at);
    vi halves = NAME(load_halves)(row + 2 * at);
    return dtype == BFLOAT16 ? (vf)(halves << 16) : NAME(widen_float16)(halves);
}

static INLINE void NAME(write)(char *row, int dtype, int64_t at, vf x) {
    if (dtype == FLOAT32) NAME(store)((float *)row + at, x);
    else NAME(store_halves)(row + 2 * at, dtype == BFLOAT16 ? NAME(narrow_bfloat16)(x) : NAME(narrow_float16)(x));
}
