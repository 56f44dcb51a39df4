/* Every kernel once a processor level: AVX-512, AVX2, and what the compiler targets anyway (SSE2, NEON, ...).
 *
 * A function's vectors are laid out for the target it is declared with, so each level is compiled from the
 * sources again, not cloned, with as many LANES as its registers hold.
 */

#define NAME(x) x##_baseline
#define LANES 4
#include "lanes.h"
#include "softmax.h"
#include "stats.h"
#undef NAME
#undef LANES

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_X86_LEVELS 1

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2,f16c")
#endif
#define NAME(x) x##_avx2
#define LANES 8
#define VECTOR_MAX(x, y) _mm256_max_ps((__m256)(x), (__m256)(y))
#define VECTOR_MIN(x, y) _mm256_min_ps((__m256)(x), (__m256)(y))
#define VECTOR_SIGNS(x) _mm256_movemask_ps((__m256)(x))
#include "lanes.h"
#include "softmax.h"
#include "stats.h"
#undef NAME
#undef LANES
#undef VECTOR_MAX
#undef VECTOR_MIN
#undef VECTOR_SIGNS
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi2,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define NAME(x) x##_avx512
#define LANES 16
#define VECTOR_MAX(x, y) _mm512_max_ps((__m512)(x), (__m512)(y))
#define VECTOR_MIN(x, y) _mm512_min_ps((__m512)(x), (__m512)(y))
/* The smaller of the two by size, with the sign cleared. */
#define VECTOR_CLIPPED(x, y) _mm512_range_ps((__m512)(x), (__m512)(y), 10)
#define VECTOR_SIGNS(x) _mm512_movepi32_mask((__m512i)(x))
#include "lanes.h"
#include "softmax.h"
#include "stats.h"
#undef NAME
#undef LANES
#undef VECTOR_MAX
#undef VECTOR_MIN
#undef VECTOR_CLIPPED
#undef VECTOR_SIGNS
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
