/* Body of the variants of kf_attend_tile; ATTEND_TILE names the one that is being compiled. */
#include <math.h>

#include "attention_tile.h"
#include "vector.h"

enum {
    GROUP = 3, /* queries at once: with four keys, or four vectors of a value, twelve sums stay in registers */
    LINE = 16, /* floats in a cache line */
};

/* Some of a tile's keys, by their number in it. */
typedef struct {
    int begin, end;
} span;

INLINE int round_up(int count, int multiple)
{
    return (count + multiple - 1) / multiple * multiple;
}

INLINE void fetch(const float *row, int head_dim)
{
    for (int d = 0; d < head_dim; d += LINE)
        __builtin_prefetch(row + d);
}

INLINE span visible(const kf_queries *queries, int query, const kf_tile *tile)
{
    int last = queries->position[query] - tile->first;
    int first = queries->window ? last - queries->window + 1 : 0;
    return (span){first > 0 ? first : 0, last < tile->count ? last + 1 : tile->count};
}

/* parts[j]: the scores of query j, each in LANES / 4 parts, as fold4 leaves them. */
INLINE void multiply_keys(float (*parts)[TILE * LANES / 4], const float *const *query, const int group, int head_dim,
                          const kf_tile *tile)
{
    for (int i = 0; i < tile->count; i += 4) {
        const float *const *key = tile->keys + i;
        vec sum[GROUP][4] = {0};
        for (int d = 0; d < head_dim; d += LANES) {
            vec q[GROUP];
            for (int j = 0; j < group; j++)
                q[j] = load(query[j] + d);
            for (int k = 0; k < 4; k++) {
                vec one = load(key[k] + d);
                for (int j = 0; j < group; j++)
                    sum[j][k] += q[j] * one;
            }
        }
        for (int j = 0; j < group; j++)
            store(parts[j] + i * (LANES / 4), fold4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]));
    }
}

INLINE void add_parts(float *score, const float *parts, int count)
{
    for (int i = 0; i < count; i += 4) {
        quad sum = *(const quad *)(parts + i * (LANES / 4));
        for (int lane = 4; lane < LANES; lane += 4)
            sum += *(const quad *)(parts + i * (LANES / 4) + lane);
        *(quad *)(score + i) = sum;
    }
}

INLINE void bend(float *score, int count, float scaling, float softcap)
{
    for (int i = 0; i < count; i += LANES) {
        vec s = load(score + i) * scaling;
        if (softcap != 0.0f)
            s = hyperbolic_tangent(s / softcap) * softcap;
        store(score + i, s);
    }
}

INLINE void hide(float *score, int begin, int end)
{
    for (int i = begin; i < end; i++)
        score[i] = -INFINITY;
}

INLINE float largest_of(const float *score, int count)
{
    vec largest = load(score);
    for (int i = LANES; i < count; i += LANES)
        largest = larger(largest, load(score + i));
    return largest_lane(largest);
}

/* Scores become weights; returns their sum. */
INLINE float exponentials(float *score, int count, float largest)
{
    vec sum = {0};
    for (int i = 0; i < count; i += LANES) {
        vec weight = exponential(load(score + i) - largest);
        store(score + i, weight);
        sum += weight;
    }
    return sum_lanes(sum);
}

/* From the parts of one query's scores to its weights, 0 where it does not see. Returns what its output so far is
 * worth, now that the largest score may be another. */
INLINE float weigh(float *weight, const float *parts, kf_queries *queries, int query, const kf_tile *tile)
{
    int padded = round_up(tile->count, LANES);
    span seen = visible(queries, query, tile);
    if (seen.begin >= seen.end) {
        for (int i = 0; i < padded; i += LANES)
            store(weight + i, (vec){0});
        return 1.0f;
    }
    add_parts(weight, parts, tile->count);
    bend(weight, padded, queries->scaling, queries->softcap);
    hide(weight, 0, seen.begin);
    hide(weight, seen.end, padded);
    float before = queries->largest[query], now = largest_of(weight, padded);
    now = before > now ? before : now;
    float fade = exponential(splat(before - now))[0];
    queries->largest[query] = now;
    queries->sum[query] = queries->sum[query] * fade + exponentials(weight, padded, now);
    return fade;
}

/* `vectors` of each value, from dimension `d` on. */
INLINE void add_values(float *const *output, const int group, const float *fade, float (*weight)[TILE],
                       const kf_tile *tile, int d, const int vectors)
{
    vec sum[GROUP][4];
    for (int j = 0; j < group; j++)
        for (int v = 0; v < vectors; v++)
            sum[j][v] = load(output[j] + d + v * LANES) * fade[j];
    for (int i = 0; i < tile->count; i++) {
        vec share[GROUP];
        for (int j = 0; j < group; j++)
            share[j] = splat(weight[j][i]);
        for (int v = 0; v < vectors; v++) {
            vec value = load(tile->values[i] + d + v * LANES);
            for (int j = 0; j < group; j++)
                sum[j][v] += share[j] * value;
        }
    }
    for (int j = 0; j < group; j++)
        for (int v = 0; v < vectors; v++)
            store(output[j] + d + v * LANES, sum[j][v]);
}

INLINE void attend_group(kf_queries *queries, int begin, const int group, const kf_tile *tile)
{
    float parts[GROUP][TILE * LANES / 4], weight[GROUP][TILE], fade[GROUP];
    float *const *output = queries->output + begin;
    int d = 0;
    multiply_keys(parts, queries->query + begin, group, queries->head_dim, tile);
    for (int j = 0; j < group; j++)
        fade[j] = weigh(weight[j], parts[j], queries, begin + j, tile);
    for (; d + 4 * LANES <= queries->head_dim; d += 4 * LANES)
        add_values(output, group, fade, weight, tile, d, 4);
    for (; d < queries->head_dim; d += LANES)
        add_values(output, group, fade, weight, tile, d, 1);
}

TARGET void ATTEND_TILE(kf_queries *queries, const kf_tile *tile, const kf_tile *next)
{
    for (int i = 0; i < next->count; i++) {
        fetch(next->keys[i], queries->head_dim);
        fetch(next->values[i], queries->head_dim);
    }
    int i = 0;
    for (; queries->count - i >= 3 && queries->count - i != 4; i += 3)
        attend_group(queries, i, 3, tile);
    for (; queries->count - i >= 2; i += 2)
        attend_group(queries, i, 2, tile);
    if (i < queries->count)
        attend_group(queries, i, 1, tile);
}
