/* One unit of work, and the joining of units that share their queries. */
#include <math.h>
#include <string.h>

#include "attention_call.h"

enum {
    DECODE_PIECE = 256, /* positions in a piece of a row with one query: several threads may share a long row */
    CHUNK_PIECE = 1024, /* of a row with more queries */
};

kf_cut kf_cut_row(const kf_call *call, const kf_row *row)
{
    int32_t window = call->layer->window;
    kf_cut cut = {.end = row->start + row->count, .piece = row->count == 1 ? DECODE_PIECE : CHUNK_PIECE};
    cut.first = window && row->start - window + 1 > 0 ? row->start - window + 1 : 0;
    cut.pieces = (cut.end - 1) / cut.piece - cut.first / cut.piece + 1;
    cut.blocks = (row->count * call->share + call->block - 1) / call->block;
    return cut;
}

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

static float *partial_of(const kf_call *call, int32_t unit, int32_t head, int32_t i)
{
    int64_t number = ((int64_t)unit * call->layer->kv_heads + head) * call->block + i;
    return call->partial + number * (call->layer->head_dim + 2);
}

static float *output_of(const kf_call *call, const kf_row *row, int32_t head, int32_t query)
{
    int64_t token = row->token + query / call->share;
    int64_t query_head = head * call->share + query % call->share;
    return call->output + (token * call->scores->heads + query_head) * call->layer->head_dim;
}

/* The weighted sum of values becomes the output. A sink is a score without a value. */
static void finish(const kf_call *call, float *output, float largest, float sum, int32_t query_head)
{
    float fade = 1.0f;
    if (call->sinks) {
        float sink = call->sinks[query_head], most = sink > largest ? sink : largest;
        fade = expf(largest - most);
        sum = sum * fade + expf(sink - most);
    }
    for (int32_t d = 0; d < call->layer->head_dim; d++)
        output[d] *= fade / sum;
}

/* All but where their outputs go. */
static void take_queries(kf_queries *queries, const kf_call *call, const kf_row *row, int32_t head, int32_t begin)
{
    int32_t left = row->count * call->share - begin;
    memset(queries->sum, 0, sizeof queries->sum);
    queries->count = left < call->block ? left : call->block;
    queries->head_dim = call->layer->head_dim;
    queries->window = call->layer->window;
    queries->scaling = call->scores->scaling;
    queries->softcap = call->scores->softcap;
    for (int32_t i = 0; i < queries->count; i++) {
        int32_t token = (begin + i) / call->share;
        queries->position[i] = row->start + token;
        queries->query[i] = kf_at(call->query, head * call->share + (begin + i) % call->share, row->token + token);
        queries->largest[i] = -INFINITY;
    }
}

static void run_tiles(kf_queries *queries, const kf_call *call, const kf_row *row, int32_t head, int32_t begin,
                      int32_t end)
{
    kf_tile tiles[2];
    int current = 0;
    kf_lay_tile(&tiles[0], call, row, head, begin, end);
    while (tiles[current].count) {
        const kf_tile *tile = &tiles[current];
        kf_lay_tile(&tiles[!current], call, row, head, tile->first + tile->count, end);
        call->attend_tile(queries, tile, &tiles[!current]);
        current = !current;
    }
}

void kf_attend_unit(const kf_call *call, int32_t unit, int32_t head)
{
    const kf_row *row = row_of(call, unit);
    kf_cut cut = kf_cut_row(call, row);
    int32_t first = (unit - row->unit) / cut.pieces * call->block, window = call->layer->window;
    int32_t begin = ((unit - row->unit) % cut.pieces + cut.first / cut.piece) * cut.piece, end = begin + cut.piece;
    kf_queries queries;
    take_queries(&queries, call, row, head, first);
    for (int32_t i = 0; i < queries.count; i++) {
        queries.output[i] = cut.pieces == 1 ? output_of(call, row, head, first + i) : partial_of(call, unit, head, i);
        memset(queries.output[i], 0, sizeof(float) * (size_t)queries.head_dim);
    }
    int32_t seen_from = window ? queries.position[0] - window + 1 : 0;
    int32_t seen_to = queries.position[queries.count - 1] + 1;
    run_tiles(&queries, call, row, head, begin > seen_from ? begin : seen_from, end < seen_to ? end : seen_to);
    for (int32_t i = 0; i < queries.count; i++) {
        float *output = queries.output[i], sum = 0.0f;
        for (int32_t lane = 0; lane < MOST_LANES; lane++)
            sum += queries.sum[i][lane];
        if (cut.pieces == 1) {
            finish(call, output, queries.largest[i], sum, head * call->share + (first + i) % call->share);
        } else {
            output[queries.head_dim] = queries.largest[i];
            output[queries.head_dim + 1] = sum;
        }
    }
}

static void join_query(const kf_call *call, const kf_row *row, const kf_cut *cut, int32_t unit, int32_t head,
                       int32_t i)
{
    int32_t dim = call->layer->head_dim, query = (unit - row->unit) / cut->pieces * call->block + i;
    float largest = -INFINITY, sum = 0.0f, *output = output_of(call, row, head, query);
    for (int32_t piece = 0; piece < cut->pieces; piece++)
        largest = fmaxf(largest, partial_of(call, unit + piece, head, i)[dim]);
    memset(output, 0, sizeof(float) * (size_t)dim);
    for (int32_t piece = 0; piece < cut->pieces; piece++) {
        const float *partial = partial_of(call, unit + piece, head, i);
        float fade = expf(partial[dim] - largest);
        sum += partial[dim + 1] * fade;
        for (int32_t d = 0; d < dim; d++)
            output[d] += partial[d] * fade;
    }
    finish(call, output, largest, sum, head * call->share + query % call->share);
}

/* Called for every unit: the first of those that share their queries joins them all. */
void kf_join_pieces(const kf_call *call, int32_t unit, int32_t head)
{
    const kf_row *row = row_of(call, unit);
    kf_cut cut = kf_cut_row(call, row);
    if (cut.pieces == 1 || (unit - row->unit) % cut.pieces)
        return;
    int32_t left = row->count * call->share - (unit - row->unit) / cut.pieces * call->block;
    for (int32_t i = 0; i < left && i < call->block; i++)
        join_query(call, row, &cut, unit, head, i);
}
