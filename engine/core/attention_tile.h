/* The part of attention that is compiled for each variant: some queries of one KV head over a few keys. */
#ifndef KVFERRY_ENGINE_ATTENTION_TILE_H
#define KVFERRY_ENGINE_ATTENTION_TILE_H
#include <stdint.h>

enum {
    MOST_LANES = 16, /* of a vector */
    TILE = 32,       /* keys; tiles begin at multiples of it */
    QUERIES = 32,    /* at most, of a unit of work */
};

/* Keys at positions `first`... and their values. `keys` is filled up to a multiple of MOST_LANES. */
typedef struct {
    int32_t first, count;
    const float *keys[TILE];
    const float *values[TILE];
} kf_tile;

/* Softmax in progress, for `count` queries: exponentials are taken relative to `largest`, the largest score so far;
 * `sum` (its lanes together) is that of the exponentials, `output` that of the values weighted with them. */
typedef struct {
    int32_t count, head_dim, window;
    float scaling, softcap;
    int32_t position[QUERIES];
    const float *query[QUERIES];
    float *output[QUERIES];
    float largest[QUERIES], sum[QUERIES][MOST_LANES];
} kf_queries;

/* Adds a tile to all queries that see some of it; what `next` points to is fetched into the cache meanwhile. */
typedef void kf_attend_tile(kf_queries *queries, const kf_tile *tile, const kf_tile *next);

kf_attend_tile kf_attend_tile_portable, kf_attend_tile_avx2, kf_attend_tile_avx512;
#endif
