/* From scores to weights, for the variants of kf_attention_tiles. */
#include <math.h>

#include "attention_tile.h"
#include "vector.h"

enum { LINE = 16 }; /* floats in a cache line */

/* Some of a tile's keys, by their number in it. */
typedef struct {
    int begin, end;
} span;

INLINE int round_up(int count, int multiple)
{
    return (count + multiple - 1) / multiple * multiple;
}

INLINE span visible(const kf_queries *queries, int query, const kf_tile *tile)
{
    int last = queries->position[query] - tile->first;
    int first = queries->window ? last - queries->window + 1 : 0;
    return (span){first > 0 ? first : 0, last < tile->count ? last + 1 : tile->count};
}

INLINE void apply_softcap(float *score, int count, float scaling, float softcap)
{
    for (int i = 0; i < count; i += LANES) {
        vec s = load(score + i) * scaling;
        if (softcap != 0.0f)
            s = hyperbolic_tangent(s / softcap) * softcap;
        store(score + i, s);
    }
}

INLINE void fill(float *score, int begin, int end, float value)
{
    for (int i = begin; i < end; i++)
        score[i] = value;
}

INLINE float largest_of(const float *score, int count)
{
    vec largest = load(score);
    for (int i = LANES; i < count; i += LANES)
        largest = larger(largest, load(score + i));
    return largest_lane(largest);
}
