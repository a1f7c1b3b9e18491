/* The part of attention that is compiled for each variant: some queries of one KV head over a few keys. */
#ifndef KVFERRY_ENGINE_ATTENTION_TILE_H
#define KVFERRY_ENGINE_ATTENTION_TILE_H
#include <stdint.h>

enum {
    MOST_LANES = 16,    /* of a vector */
    TILE = 32,          /* keys; tiles begin at multiples of their size */
    COPIED_TILE = 64,   /* keys of a tile that is copied */
    MOST_QUERIES = 192, /* of a unit of work */
};

/* Keys at positions `first`... and their values. `keys` is filled up to a multiple of 2 * MOST_LANES. */
typedef struct {
    int32_t first, count;
    const float *keys[COPIED_TILE];
    const float *values[COPIED_TILE];
} kf_tile;

/* Softmax in progress, for `count` queries: exponentials are taken relative to `largest`, the largest score so far;
 * `sum` (its lanes together) is that of the exponentials, `output` that of the values weighted with them. */
typedef struct {
    int32_t count, head_dim, window;
    float scaling, softcap;
    int32_t position[MOST_QUERIES];
    const float *query[MOST_QUERIES];
    float *output[MOST_QUERIES];
    float largest[MOST_QUERIES], sum[MOST_QUERIES][MOST_LANES];
} kf_queries;

/* Both add a tile to all queries that see some of it, and meanwhile fetch what `next` points to into the cache. Their
 * results differ in the last bits. */
typedef struct {
    /* For few queries: keys and values are read where they lie. */
    void (*add_tile)(kf_queries *queries, const kf_tile *tile, const kf_tile *next);
    /* For many: they are copied first. `copy`: room for 2 * COPIED_TILE * head_dim floats. */
    void (*add_copied_tile)(kf_queries *queries, const kf_tile *tile, const kf_tile *next, float *copy);
} kf_attention_tiles;

extern const kf_attention_tiles kf_attention_portable, kf_attention_avx2, kf_attention_avx512;
#endif
