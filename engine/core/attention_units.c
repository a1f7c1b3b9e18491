/* One unit of work, and the joining of units that share their queries. */
#include <math.h>
#include <string.h>

#include "attention_call.h"

enum {
    DECODE_PIECE = 256, /* positions in a piece of a row with one query: several threads may share a long row */
    CHUNK_PIECE = 1024, /* of a row with some queries, */
    FEW_QUERIES = 32,   /* at most; one with more has enough blocks for all threads, and is not cut into pieces */
    WORTH_A_COPY = 24,  /* queries of a KV head for which a tile is copied */
    MANY_QUERIES = 768, /* of a KV head: there are enough blocks for all threads though they are large */
};

static int32_t piece_of(const kf_row *row)
{
    return row->count == 1 ? DECODE_PIECE : row->count <= FEW_QUERIES ? CHUNK_PIECE : INT32_MAX;
}

/* The row alone decides, so that its neighbours do not change its last bits. */
int kf_copies_tiles(const kf_call *call, const kf_row *row)
{
    return row->count > 1 && row->count * call->share >= WORTH_A_COPY;
}

int64_t kf_copy_size(const kf_call *call)
{
    return (int64_t)2 * COPIED_TILE * call->layer->head_dim;
}

/* Whole tokens, if that goes. */
static int32_t block_of(int32_t queries, int32_t share)
{
    int32_t most = queries < MANY_QUERIES ? MOST_QUERIES / 2 : MOST_QUERIES;
    most -= share < most ? most % share : 0;
    return queries < most ? queries : most;
}

kf_cut kf_cut_row(const kf_call *call, const kf_row *row)
{
    int32_t window = call->layer->window;
    kf_cut cut = {.end = row->start + row->count, .piece = piece_of(row)};
    cut.first = window && row->start - window + 1 > 0 ? row->start - window + 1 : 0;
    cut.pieces = (cut.end - 1) / cut.piece - cut.first / cut.piece + 1;
    cut.block = block_of(row->count * call->share, call->share);
    cut.blocks = (row->count * call->share + cut.block - 1) / cut.block;
    return cut;
}

/* `count` queries, from `first` on, over the positions from `begin` on, `length` of them at most. */
typedef struct {
    const kf_row *row;
    int32_t number, head, first, count, piece, pieces, begin, length;
} kf_unit;

static const kf_row *row_of(const kf_call *call, int32_t unit)
{
    int32_t low = 0, high = call->rows->num_rows - 1;
    while (low < high) {
        int32_t middle = (low + high + 1) / 2;
        if (call->rows->rows[middle].unit <= unit)
            low = middle;
        else
            high = middle - 1;
    }
    return &call->rows->rows[low];
}

static int32_t query_head(const kf_call *call, const kf_unit *unit, int32_t i)
{
    return unit->head * call->share + (unit->first + i) % call->share;
}

/* Of the unit that is `on` pieces on. */
static float *partial_of(const kf_call *call, const kf_unit *unit, int32_t on, int32_t i)
{
    int64_t number = ((int64_t)(unit->number + on) * call->layer->kv_heads + unit->head) * call->block + i;
    return call->partial + number * (call->layer->head_dim + 2);
}

static float *output_of(const kf_call *call, const kf_unit *unit, int32_t i)
{
    int64_t token = unit->row->token + (unit->first + i) / call->share;
    return call->output + (token * call->scores->heads + query_head(call, unit, i)) * call->layer->head_dim;
}

/* The weighted sum of values becomes the output. A sink is a score without a value. */
static void finish(const kf_call *call, float *output, float largest, float sum, int32_t head)
{
    float rescale = 1.0f;
    if (call->sinks) {
        float sink = call->sinks[head], most = sink > largest ? sink : largest;
        rescale = expf(largest - most);
        sum = sum * rescale + expf(sink - most);
    }
    for (int32_t d = 0; d < call->layer->head_dim; d++)
        output[d] *= rescale / sum;
}

static kf_unit find_unit(const kf_call *call, int32_t number, int32_t head)
{
    const kf_row *row = row_of(call, number);
    kf_cut cut = kf_cut_row(call, row);
    int32_t block = (number - row->unit) / cut.pieces, piece = (number - row->unit) % cut.pieces;
    int32_t left = row->count * call->share - block * cut.block;
    return (kf_unit){.row = row,
                     .number = number,
                     .head = head,
                     .first = block * cut.block,
                     .count = left < cut.block ? left : cut.block,
                     .piece = piece,
                     .pieces = cut.pieces,
                     .begin = (piece + cut.first / cut.piece) * cut.piece,
                     .length = cut.piece};
}

static void take_queries(kf_queries *queries, const kf_call *call, const kf_unit *unit)
{
    queries->count = unit->count;
    queries->head_dim = call->layer->head_dim;
    queries->window = call->layer->window;
    queries->scaling = call->scores->scaling;
    queries->softcap = call->scores->softcap;
    memset(queries->sum, 0, sizeof queries->sum[0] * (size_t)unit->count);
    for (int32_t i = 0; i < unit->count; i++) {
        int32_t token = (unit->first + i) / call->share;
        queries->position[i] = unit->row->start + token;
        queries->query[i] = kf_at(call->query, query_head(call, unit, i), unit->row->token + token);
        queries->output[i] = unit->pieces == 1 ? output_of(call, unit, i) : partial_of(call, unit, 0, i);
        queries->largest[i] = -INFINITY;
        memset(queries->output[i], 0, sizeof(float) * (size_t)queries->head_dim);
    }
}

/* Tile by tile, over what at least one of the queries sees of the unit's piece. */
static void run_tiles(kf_queries *queries, const kf_call *call, const kf_unit *unit, float *copy)
{
    int32_t window = queries->window, end = queries->position[queries->count - 1] + 1, begin = unit->begin, current = 0;
    if (window && queries->position[0] - window + 1 > begin)
        begin = queries->position[0] - window + 1;
    if (end - unit->begin > unit->length)
        end = unit->begin + unit->length;
    kf_tile tiles[2];
    kf_lay_tile(&tiles[0], call, unit->row, unit->head, begin, end);
    while (tiles[current].count) {
        const kf_tile *tile = &tiles[current];
        kf_lay_tile(&tiles[!current], call, unit->row, unit->head, tile->first + tile->count, end);
        if (kf_copies_tiles(call, unit->row))
            call->tiles->add_copied_tile(queries, tile, &tiles[!current], copy);
        else
            call->tiles->add_tile(queries, tile, &tiles[!current]);
        current = !current;
    }
}

void kf_attend_unit(const kf_call *call, int32_t number, int32_t head, float *copy)
{
    kf_unit unit = find_unit(call, number, head);
    kf_queries queries;
    if (unit.row->count == 1 && unit.piece == unit.pieces - 1)
        kf_write_row(call, unit.row, head); /* only this unit reads it; in a ring, what lay there is out of sight */
    take_queries(&queries, call, &unit);
    run_tiles(&queries, call, &unit, copy);
    for (int32_t i = 0; i < unit.count; i++) {
        float *output = queries.output[i], sum = 0.0f;
        for (int32_t lane = 0; lane < MOST_LANES; lane++)
            sum += queries.sum[i][lane];
        if (unit.pieces == 1) {
            finish(call, output, queries.largest[i], sum, query_head(call, &unit, i));
        } else {
            output[queries.head_dim] = queries.largest[i];
            output[queries.head_dim + 1] = sum;
        }
    }
}

static void join_query(const kf_call *call, const kf_unit *unit, int32_t i)
{
    int32_t dim = call->layer->head_dim;
    float largest = -INFINITY, sum = 0.0f, *output = output_of(call, unit, i);
    for (int32_t piece = 0; piece < unit->pieces; piece++)
        largest = fmaxf(largest, partial_of(call, unit, piece, i)[dim]);
    memset(output, 0, sizeof(float) * (size_t)dim);
    for (int32_t piece = 0; piece < unit->pieces; piece++) {
        const float *partial = partial_of(call, unit, piece, i);
        float rescale = expf(partial[dim] - largest);
        sum += partial[dim + 1] * rescale;
        for (int32_t d = 0; d < dim; d++)
            output[d] += partial[d] * rescale;
    }
    finish(call, output, largest, sum, query_head(call, unit, i));
}

/* Called for every unit: the first of those that share their queries joins them all. */
void kf_join_pieces(const kf_call *call, int32_t number, int32_t head)
{
    kf_unit unit = find_unit(call, number, head);
    if (unit.pieces > 1 && unit.piece == 0)
        for (int32_t i = 0; i < unit.count; i++)
            join_query(call, &unit, i);
}
