/* Vectors of LANES floats, for kernels that are compiled once for each variant. Whoever includes this has defined
 * LANES (4, 8 or 16) and TARGET, the attribute that names the variant's instruction set.
 */
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline)) TARGET

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef float vec_in_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Lane numbers of two vectors, side by side, for SHUFFLE. QUADS: four lanes each. */
#if LANES == 4
#define EVEN_LANES 0, 2, 4, 6
#define ODD_LANES 1, 3, 5, 7
#elif LANES == 8
#define EVEN_LANES 0, 2, 8, 10, 4, 6, 12, 14
#define ODD_LANES 1, 3, 9, 11, 5, 7, 13, 15
#define EVEN_QUADS 0, 1, 2, 3, 8, 9, 10, 11
#define ODD_QUADS 4, 5, 6, 7, 12, 13, 14, 15
#else
#define EVEN_LANES 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define ODD_LANES 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#define EVEN_QUADS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD_QUADS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#endif

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif

INLINE vec load(const float *from)
{
    return *(const vec_in_memory *)from;
}

INLINE void store(float *to, vec value)
{
    *(vec_in_memory *)to = value;
}

INLINE vec splat(float value)
{
    return value - (vec){0};
}

INLINE vec choose(ivec mask, vec yes, vec no)
{
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* A NaN in `b` survives. */
INLINE vec larger(vec a, vec b)
{
    return choose(a > b, a, b);
}

/* In every four lanes the sums of neighbours: a0+a1, a2+a3, b0+b1, b2+b3. */
INLINE vec add_pairs(vec a, vec b)
{
    return SHUFFLE(a, b, EVEN_LANES) + SHUFFLE(a, b, ODD_LANES);
}

/* In every four lanes one partial sum of each of a, b, c, d. */
INLINE vec fold4(vec a, vec b, vec c, vec d)
{
    return add_pairs(add_pairs(a, b), add_pairs(c, d));
}

#if LANES > 4
/* As add_pairs, with four lanes for one. */
INLINE vec add_quads(vec a, vec b)
{
    return SHUFFLE(a, b, EVEN_QUADS) + SHUFFLE(a, b, ODD_QUADS);
}
#endif

/* `part`: LANES / 4 results of fold4. Lane i: the whole sum of the i-th vector that was folded. */
INLINE vec join_parts(const vec *part)
{
#if LANES == 4
    return part[0];
#elif LANES == 8
    return add_quads(part[0], part[1]);
#else
    return add_quads(add_quads(part[0], part[1]), add_quads(part[2], part[3]));
#endif
}

INLINE float sum_lanes(vec value)
{
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += value[i];
    return sum;
}

INLINE float largest_lane(vec value)
{
    float largest = value[0];
    for (int i = 1; i < LANES; i++)
        largest = largest > value[i] ? largest : value[i];
    return largest;
}

/* e^x = 2^n * e^r with |r| <= ln(2) / 2; e^r by the polynomial of degree 5 whose relative error is least. 0 below -87,
 * wrong above 89. Relative error under 2e-7. */
INLINE vec exponential_below_89(vec x)
{
    const float to_exponent = 12582912.0f + 127; /* 1.5 * 2^23: a sum with it is an integer, in its lowest bits */
    vec shifted = x * 1.44269504f + to_exponent, n = shifted - to_exponent;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec power = (vec)((ivec)shifted << 23), series = 0.008290306f * r + 0.041897975f;
    series = series * r + 0.16667637f;
    series = series * r + 0.4999915f;
    series = series * r + 0.9999997f;
    series = series * r + 1.0f;
    return (vec)((ivec)(series * power) & ~(x < -87.0f));
}

/* The same; infinite above 89. */
INLINE vec exponential(vec x)
{
    return exponential_below_89(choose(x > 89.0f, splat(89.0f), x));
}

INLINE vec hyperbolic_tangent(vec x)
{
    return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
}
