/* Where keys and values lie: in pages, or still among the packed new ones. */
#include <string.h>

#include "attention_call.h"

const float *kf_at(const kf_packed *packed, int64_t head, int64_t token)
{
    return (const float *)(uintptr_t)packed->at + head * packed->head_stride + token * packed->token_stride;
}

/* A key in a page, and how many positions on from it lie behind it. Its value is page_size rows further. */
typedef struct {
    float *key;
    int32_t run;
} place;

static place find(const kf_call *call, const kf_row *row, int32_t head, int32_t position)
{
    const kf_layer *layer = call->layer;
    int32_t slot = layer->window ? position % layer->window : position, size = layer->page_size;
    int64_t block = call->rows->tables[row->table + slot / size];
    float *page = (float *)(uintptr_t)layer->pages + block * layer->block_stride;
    place found = {page + ((int64_t)head * 2 * size + slot % size) * layer->head_dim, size - slot % size};
    if (layer->window && layer->window - slot < found.run)
        found.run = layer->window - slot;
    return found;
}

/* Of a chunk longer than the ring only the last tokens are kept. */
void kf_write_row(const kf_call *call, const kf_row *row, int32_t head)
{
    const kf_layer *layer = call->layer;
    int64_t to_value = (int64_t)layer->page_size * layer->head_dim;
    size_t bytes = sizeof(float) * (size_t)layer->head_dim;
    int32_t i = layer->window && row->count > layer->window ? row->count - layer->window : 0;
    while (i < row->count) {
        place to = find(call, row, head, row->start + i);
        for (int32_t n = 0; n < to.run && i < row->count; n++, i++) {
            float *key = to.key + (int64_t)n * layer->head_dim;
            memcpy(key, kf_at(call->keys, head, row->token + i), bytes);
            memcpy(key + to_value, kf_at(call->values, head, row->token + i), bytes);
        }
    }
}

/* Lays what is in pages: positions begin... before `end`, of which there is at least one. Returns how many. */
static int32_t lay_cached(kf_tile *tile, const kf_call *call, const kf_row *row, int32_t head, int32_t begin,
                          int32_t end)
{
    const kf_layer *layer = call->layer;
    int64_t to_value = (int64_t)layer->page_size * layer->head_dim;
    int32_t i = 0;
    while (begin + i < end) {
        place from = find(call, row, head, begin + i);
        for (int32_t n = 0; n < from.run && begin + i < end; n++, i++) {
            tile->keys[i] = from.key + (int64_t)n * layer->head_dim;
            tile->values[i] = tile->keys[i] + to_value;
        }
    }
    return i;
}

/* The keys at positions begin... up to the end of their tile, or up to `end`: none if that is not behind `begin`. */
void kf_lay_tile(kf_tile *tile, const kf_call *call, const kf_row *row, int32_t head, int32_t begin, int32_t end)
{
    int32_t size = kf_copies_tiles(call, row) ? COPIED_TILE : TILE;
    int32_t tile_end = (begin / size + 1) * size, stop = tile_end < end ? tile_end : end;
    int32_t in_pages = row->count == 1 || stop < row->start ? stop : row->start;
    int32_t i = lay_cached(tile, call, row, head, begin, in_pages);
    for (; begin + i < stop; i++) {
        int32_t token = row->token + begin + i - row->start;
        tile->keys[i] = kf_at(call->keys, head, token);
        tile->values[i] = kf_at(call->values, head, token);
    }
    tile->first = begin;
    tile->count = i;
    for (; i % (2 * MOST_LANES); i++)
        tile->keys[i] = tile->keys[i - 1];
}
