/* Body of the variants of kf_attention_tiles; ATTENTION_TILES names the one that is being compiled. */
#include "attention_softmax.h"

#include "attention_copied_kernel.h"

enum { GROUP = 3 }; /* queries at once: with four keys, or four vectors of a value, twelve sums stay in registers */

static const kf_tile NOTHING;

INLINE void fetch(const float *row, int head_dim)
{
    for (int d = 0; d < head_dim; d += LINE)
        __builtin_prefetch(row + d);
}

/* Rows of TILE scores, one for each query of the group. */
INLINE void multiply_keys(float (*score)[TILE], const float *const *query, const int group, int head_dim,
                          const kf_tile *tile, const kf_tile *next)
{
    for (int i = 0; i < tile->count; i += LANES) {
        vec part[GROUP][LANES / 4];
        for (int quarter = 0; quarter < LANES / 4; quarter++) {
            const float *const *key = tile->keys + i + 4 * quarter;
            vec sum[GROUP][4] = {0};
            for (int k = i + 4 * quarter; k < i + 4 * quarter + 4 && k < next->count; k++)
                fetch(next->keys[k], head_dim);
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
                part[j][quarter] = fold4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
        }
        for (int j = 0; j < group; j++)
            store(score[j] + i, join_parts(part[j]));
    }
}

/* From the scores of the group's queries to their weights, 0 where a query does not see. Returns, by query, what its
 * output so far is worth now that the largest score may be another. */
INLINE vec weigh(float (*score)[TILE], const int group, kf_queries *queries, int begin, const kf_tile *tile)
{
    int padded = round_up(tile->count, LANES);
    float shift[GROUP] = {0};
    vec decline = {0};
    for (int j = 0; j < group; j++) {
        span seen = visible(queries, begin + j, tile);
        if (seen.begin >= seen.end) {
            fill(score[j], 0, padded, -INFINITY);
            continue;
        }
        apply_softcap(score[j], padded, queries->scaling, queries->softcap);
        fill(score[j], 0, seen.begin, -INFINITY);
        fill(score[j], seen.end, padded, -INFINITY);
        float before = queries->largest[begin + j], now = largest_of(score[j], padded);
        now = before > now ? before : now;
        decline[j] = before - now;
        queries->largest[begin + j] = shift[j] = now;
    }
    vec rescale = exponential(decline);
    for (int j = 0; j < group; j++) {
        vec sum = load(queries->sum[begin + j]) * rescale[j];
        for (int i = 0; i < padded; i += LANES) {
            vec weight = exponential(load(score[j] + i) - shift[j]);
            store(score[j] + i, weight);
            sum += weight;
        }
        store(queries->sum[begin + j], sum);
    }
    return rescale;
}

/* `vectors` of each value, from dimension `d` on. */
INLINE void add_values(float *const *output, const int group, vec rescale, float (*weight)[TILE], const kf_tile *tile,
                        const kf_tile *next, int d, const int vectors)
{
    vec sum[GROUP][4];
    for (int j = 0; j < group; j++)
        for (int v = 0; v < vectors; v++)
            sum[j][v] = load(output[j] + d + v * LANES) * rescale[j];
    for (int i = 0; i < tile->count; i++) {
        vec share[GROUP];
        if (i < next->count)
            fetch(next->values[i] + d, vectors * LANES);
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

INLINE void attend_group(kf_queries *queries, int begin, const int group, const kf_tile *tile,
                         const kf_tile *next)
{
    float score[GROUP][TILE], *const *output = queries->output + begin;
    int d = 0;
    multiply_keys(score, queries->query + begin, group, queries->head_dim, tile, next);
    vec rescale = weigh(score, group, queries, begin, tile);
    for (; d + 4 * LANES <= queries->head_dim; d += 4 * LANES)
        add_values(output, group, rescale, score, tile, next, d, 4);
    for (; d < queries->head_dim; d += LANES)
        add_values(output, group, rescale, score, tile, next, d, 1);
}

static TARGET void add_tile(kf_queries *queries, const kf_tile *tile, const kf_tile *next)
{
    for (int i = 0; i < queries->count;) {
        int left = queries->count - i, group = left >= 3 && left != 4 ? 3 : left >= 2 ? 2 : 1;
        const kf_tile *fetched = i ? &NOTHING : next;
        if (group == 3)
            attend_group(queries, i, 3, tile, fetched);
        else if (group == 2)
            attend_group(queries, i, 2, tile, fetched);
        else
            attend_group(queries, i, 1, tile, fetched);
        i += group;
    }
}

const kf_attention_tiles ATTENTION_TILES = {add_tile, add_copied_tile};
