/* Attention over paged KV, float32. One call serves one layer for the short rows of a forward: it writes their new KV
 * into pages and attends, causally, over what each row sees.
 *
 * A page holds, for each KV head, page_size keys and then page_size values of head_dim floats. Strides are in floats.
 * What a row's output is depends on nothing but the row: neither on its neighbours nor on the number of threads.
 */
#ifndef KVFERRY_ENGINE_ATTENTION_H
#define KVFERRY_ENGINE_ATTENTION_H
#include <stdint.h>

typedef struct {
    uint64_t pages; /* address of this layer's page in block 0 */
    int64_t block_stride;
    int32_t page_size, kv_heads, head_dim;
    int32_t window; /* 0: full attention, else the table is a ring: position p lies in slot p mod window */
} kf_layer;

typedef struct {
    int32_t start, count; /* positions of the row's new tokens */
    int32_t token;        /* the first of them among the packed ones */
    int32_t table;        /* where the row's block table begins among the tables */
    int32_t unit;         /* filled in: the first of the row's units of work */
} kf_row;

typedef struct {
    kf_row *rows;
    int32_t num_rows;
    const int32_t *tables;
} kf_rows;

typedef struct {
    uint64_t at; /* address; [heads][tokens][head_dim], the last dimension dense */
    int64_t head_stride, token_stride;
} kf_packed;

typedef struct {
    float scaling;
    float softcap;  /* 0: none */
    uint64_t sinks; /* address, [heads]; 0: none */
    int32_t heads;  /* of the query: a multiple of the KV heads */
} kf_scores;

/* `packed`: query, keys and values of the forward's tokens. `output`: [tokens][heads][head_dim], of these the rows'
 * tokens are written. `variant`: one that kf_runs_variant says runs with head_dim. Returns 0, or -1 where there is no
 * memory for intermediate results (then nothing was written). */
int kf_attend(const kf_layer *layer, const kf_rows *rows, const kf_packed *packed, const kf_scores *scores,
              uint64_t output, int threads, int variant);
#endif
