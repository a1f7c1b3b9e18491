/* Batches of writes: queueing, stopping, ending. */
#include "internal.h"

#include <stdlib.h>

static kf_batch *kf_new_batch(kf_endpoint *endpoint, int64_t handle, const kf_writes *writes) {
    size_t ways_at = sizeof(kf_batch) + writes->count * sizeof(kf_write_pair);
    kf_batch *batch = calloc(1, ways_at + writes->lane_count * sizeof(kf_way));
    if (!batch) return NULL;
    batch->handle = handle;
    batch->endpoint = endpoint;
    const kf_region *region = writes->source_region;
    batch->source_number = region->number;
    batch->source_base = region->address;
    batch->ways = (kf_way *)((char *)batch + ways_at);
    batch->way_count = writes->lane_count;
    for (uint32_t i = 0; i < writes->lane_count; i++) {
        struct fid_mr *mr = region->mrs[writes->lanes[i].rail];
        batch->ways[i].lane = writes->lanes[i];
        batch->ways[i].source_desc = mr ? fi_mr_desc(mr) : NULL;
    }
    batch->length = writes->length;
    batch->count = writes->count;
    batch->immediate = writes->immediate;
    for (uint64_t i = 0; i < writes->count; i++) {
        batch->writes[i].source = writes->source + writes->source_indices[i] * writes->source_stride;
        batch->writes[i].target = writes->target + writes->target_indices[i] * writes->target_stride;
    }
    kf_node_init(&batch->place);
    kf_node_init(&batch->ready);
    kf_append(&endpoint->batches, &batch->of_endpoint);
    return batch;
}

/* word_address 0: post now. Returns NULL only without memory. */
kf_batch *kf_write(kf_engine *engine, kf_endpoint *endpoint, int64_t handle, const kf_writes *writes,
                   uint64_t word_address, uint64_t threshold) {
    KF_GUARD(engine);
    kf_batch *batch = kf_new_batch(endpoint, handle, writes);
    if (!batch) return NULL;
    batch->threshold = threshold;
    kf_error error;
    if (endpoint->sender && kf_offer_region(endpoint->sender, writes->source_region, &error))
        kf_fail_endpoint(engine, endpoint, &error);
    if (endpoint->failed) {
        kf_fail_batch(engine, batch, &endpoint->error);
    } else if (!word_address) {
        kf_append(&endpoint->queue, &batch->place);
    } else if (!kf_arm(engine, batch, word_address)) {
        kf_unlink(&batch->of_endpoint);
        kf_free_batch(batch);
        return NULL;
    }
    return batch;
}

/* An endpoint that has nothing left to post is not blocked: the next batch starts with all its patience. */
void kf_leave_queue(kf_batch *batch) {
    kf_endpoint *endpoint = batch->endpoint;
    kf_unlink(&batch->place);
    if (kf_linked(&endpoint->queue)) return;
    for (uint32_t i = 0; i < endpoint->port_count; i++) {
        kf_port *port = &endpoint->ports[i];
        port->backoff = port->retry_at = port->blocked_since = 0;
    }
}

/* Nothing more of it will be posted. */
void kf_stop_batch(kf_engine *engine, kf_batch *batch) {
    batch->stopped = true;
    kf_release_held(engine, batch);
    if (batch->doubtful) kf_leave_doubt(engine, batch);
    if (batch->word)
        kf_disarm(engine, batch);
    else
        kf_leave_queue(batch);
}

void kf_fail_batch(kf_engine *engine, kf_batch *batch, const kf_error *error) {
    if (!batch->failed) {
        batch->failed = true;
        batch->error = *error;
        kf_mark_ready(&engine->ready_batches, &batch->ready);
    }
    kf_stop_batch(engine, batch);
    kf_end_if_done(engine, batch);
}

void kf_end_if_done(kf_engine *engine, kf_batch *batch) {
    if (batch->ended || batch->outstanding || !(batch->stopped || batch->posted == batch->count)) return;
    batch->ended = true;
    kf_unlink(&batch->of_endpoint);
    kf_mark_ready(&engine->ready_batches, &batch->ready);
}

void kf_free_batch(kf_batch *batch) {
    kf_unlink(&batch->ready);
    free(batch);
}

void kf_cancel(kf_engine *engine, kf_batch *batch, int64_t *posted, int64_t *completed) {
    KF_GUARD(engine);
    *posted = (int64_t)batch->posted;
    *completed = (int64_t)batch->completed;
    if (batch->ended) return;
    batch->cancelled = true;
    kf_stop_batch(engine, batch);
    kf_end_if_done(engine, batch);
}
