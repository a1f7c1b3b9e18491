/* What the files of attention share: one call, and how a row is cut into units of work.
 *
 * A unit is a block of a row's queries over a piece of its keys, for each KV head. The queries of one KV head are
 * counted token by token: number n is its query head n mod `share` of token n div `share`.
 */
#ifndef KVFERRY_ENGINE_ATTENTION_CALL_H
#define KVFERRY_ENGINE_ATTENTION_CALL_H
#include "attention.h"
#include "attention_tile.h"

typedef struct {
    const kf_layer *layer;
    const kf_rows *rows;
    const kf_packed *query, *keys, *values;
    const kf_scores *scores;
    const float *sinks;
    float *output;
    const kf_attention_tiles *tiles;
    int32_t share; /* query heads of a KV head */
    int32_t block; /* queries in the largest block */
    int32_t units;
    float *copies;  /* of tiles: one for each thread */
    float *partial; /* for units of rows in pieces: [units][kv heads][block][head_dim output, largest, sum] */
} kf_call;

/* `first`: the first position that the row sees. A piece is a range of positions that begins at a multiple of its
 * length, and the row alone decides how long it is: so neither its neighbours nor the number of threads change in what
 * order its numbers are added up. */
typedef struct {
    int32_t first, end;
    int32_t piece; /* its length */
    int32_t pieces, blocks;
    int32_t block; /* its queries; the last block may have fewer */
} kf_cut;

/* attention_places.c */
const float *kf_at(const kf_packed *packed, int64_t head, int64_t token);
void kf_write_row(const kf_call *call, const kf_row *row, int32_t head);
void kf_lay_tile(kf_tile *tile, const kf_call *call, const kf_row *row, int32_t head, int32_t begin, int32_t end);

/* attention_units.c */
kf_cut kf_cut_row(const kf_call *call, const kf_row *row);
int kf_copies_tiles(const kf_call *call, const kf_row *row);
int64_t kf_copy_size(const kf_call *call); /* in floats */
void kf_attend_unit(const kf_call *call, int32_t number, int32_t head, float *copy);
void kf_join_pieces(const kf_call *call, int32_t number, int32_t head);
#endif
