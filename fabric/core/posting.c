/* Posting writes and draining completion queues. */
#include "internal.h"

#include <stdio.h>

#define KF_QUANTUM 8             /* writes that one endpoint posts before the next has its turn */
#define KF_CQ_BATCH 64           /* completions read by one call */
#define KF_CQ_ROUNDS 8           /* calls before the next queue has its turn */
#define KF_BACKOFF_MIN_NS 20000  /* after FI_EAGAIN, doubling to: */
#define KF_BACKOFF_MAX_NS 1000000
#define KF_RECONNECT_SHARE 10    /* of connect_timeout, for a connection that was there before */

static bool kf_may_post(const kf_engine *engine, const kf_endpoint *endpoint) {
    if (!kf_linked(&endpoint->queue) || endpoint->outstanding >= engine->options.endpoint_cap) return false;
    return !endpoint->outstanding || engine->counters.outstanding < (int64_t)engine->options.domain_cap;
}

static ssize_t kf_post_write(kf_engine *engine, kf_endpoint *endpoint, kf_batch *batch, kf_operation *operation) {
    if (endpoint->sender) return kf_post_locally(endpoint->sender, batch, operation), 0;
    uint64_t source = batch->writes[batch->posted].source, target = batch->writes[batch->posted].target;
    struct iovec local = {.iov_base = (void *)source, .iov_len = batch->length};
    struct fi_rma_iov remote = {.addr = target, .len = batch->length, .key = batch->target_key};
    struct fi_msg_rma message = {
        .msg_iov = &local, .desc = &batch->source_desc, .iov_count = 1, .addr = endpoint->peer,
        .rma_iov = &remote, .rma_iov_count = 1, .context = operation, .data = batch->immediate};
    uint64_t done = engine->delivery_complete ? FI_DELIVERY_COMPLETE : FI_TRANSMIT_COMPLETE;
    return fi_writemsg(endpoint->ep, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION | done);
}

static void kf_posted(kf_engine *engine, kf_endpoint *endpoint, kf_batch *batch, int64_t now) {
    if (!batch->posted++) batch->first_posted_ns = now;
    batch->last_posted_ns = now;
    batch->outstanding++;
    endpoint->outstanding++;
    endpoint->was_connected = true;
    endpoint->backoff = endpoint->retry_at = endpoint->blocked_since = 0;
    engine->counters.outstanding++;
    engine->counters.writes_posted++;
    engine->counters.bytes_posted += (int64_t)batch->length;
}

/* FI_EAGAIN: the transmit queue is full, which ends with a completion; or not connected yet, which ends with a
 * connection or, after connect_timeout, with a failure; or the connection was lost and `net` tries it anew, which is
 * not waited for as long: a landing that was closed never answers again. */
static void kf_postpone(kf_engine *engine, kf_endpoint *endpoint, int64_t now) {
    engine->counters.post_retries++;
    if (!endpoint->blocked_since || endpoint->outstanding) endpoint->blocked_since = now;
    endpoint->backoff = endpoint->backoff ? endpoint->backoff * 2 : KF_BACKOFF_MIN_NS;
    if (endpoint->backoff > KF_BACKOFF_MAX_NS) endpoint->backoff = KF_BACKOFF_MAX_NS;
    endpoint->retry_at = now + endpoint->backoff;
    int64_t patience = engine->options.connect_timeout_ns / (endpoint->was_connected ? KF_RECONNECT_SHARE : 1);
    if (endpoint->outstanding || now - endpoint->blocked_since < patience) return;
    kf_error error;
    kf_set_error(&error, "fi_writemsg", FI_ETIMEDOUT);
    kf_fail_endpoint(engine, endpoint, &error);
}

/* Posts up to a quantum; true if anything was posted or ended. */
static bool kf_post_some(kf_engine *engine, kf_endpoint *endpoint, int64_t now) {
    bool moved = false;
    for (int i = 0; i < KF_QUANTUM && endpoint->retry_at <= now && kf_may_post(engine, endpoint); i++) {
        kf_batch *batch = KF_OWNER(endpoint->queue.next, kf_batch, place);
        if (batch->posted < batch->count) {
            kf_operation *operation = endpoint->free_operations;
            operation->batch = batch;
            ssize_t rc = kf_post_write(engine, endpoint, batch, operation);
            if (rc == -FI_EAGAIN) return kf_postpone(engine, endpoint, now), moved;
            if (rc) {
                kf_error error;
                kf_set_error(&error, "fi_writemsg", (int)rc);
                return kf_fail_endpoint(engine, endpoint, &error), true;
            }
            endpoint->free_operations = operation->next_free;
            kf_posted(engine, endpoint, batch, now);
        }
        if (batch->posted == batch->count) kf_leave_queue(batch);
        kf_end_if_done(engine, batch);
        moved = true;
    }
    return moved;
}

/* Round robin: each endpoint a quantum, until none can post; the first one goes to the back for the next call. */
bool kf_post_all(kf_engine *engine, int64_t now) {
    bool any = false, moved = true;
    while (moved) {
        moved = false;
        for (kf_node *node = engine->endpoints.next; node != &engine->endpoints; node = node->next) {
            kf_endpoint *endpoint = KF_OWNER(node, kf_endpoint, link);
            moved |= kf_post_some(engine, endpoint, now);
            if (endpoint->sender) kf_ring_receiver(endpoint->sender);
        }
        any |= moved;
    }
    kf_node *first = engine->endpoints.next;
    kf_unlink(first);
    kf_append(&engine->endpoints, first);
    return any;
}

/* When to try again the earliest postponed endpoint; INT64_MAX: none. */
int64_t kf_next_retry(const kf_engine *engine) {
    int64_t earliest = INT64_MAX;
    for (kf_node *node = engine->endpoints.next; node != &engine->endpoints; node = node->next) {
        kf_endpoint *endpoint = KF_OWNER(node, kf_endpoint, link);
        if (endpoint->retry_at && kf_may_post(engine, endpoint) && endpoint->retry_at < earliest)
            earliest = endpoint->retry_at;
    }
    return earliest;
}

void kf_completed(kf_engine *engine, kf_endpoint *endpoint, kf_operation *operation, const kf_error *error,
                  int64_t now) {
    kf_batch *batch = operation->batch;
    operation->next_free = endpoint->free_operations;
    endpoint->free_operations = operation;
    endpoint->outstanding--;
    endpoint->retry_at = endpoint->backoff = 0;
    engine->counters.outstanding--;
    batch->outstanding--;
    batch->completed_ns = now;
    if (error) {
        engine->counters.writes_failed++;
        kf_fail_batch(engine, batch, error);
        kf_fail_endpoint(engine, endpoint, error);
    } else {
        engine->counters.writes_completed++;
        batch->completed++;
        kf_end_if_done(engine, batch);
    }
}

static bool kf_is_operation(const kf_endpoint *endpoint, const void *context) {
    return !endpoint->landing && context != NULL;
}

/* A failed write breaks its endpoint: verbs has it so, and tcp;ofi_rxm loses the connection. */
static void kf_read_failure(kf_engine *engine, kf_endpoint *endpoint, int64_t now) {
    struct fi_cq_err_entry entry = {0};
    if (fi_cq_readerr(endpoint->cq, &entry, 0) != 1) return;
    kf_error error;
    kf_set_error(&error, "fi_cq_read", entry.err);
    const char *words = fi_cq_strerror(endpoint->cq, entry.prov_errno, entry.err_data, NULL, 0);
    if (words && entry.prov_errno) snprintf(error.provider, sizeof error.provider, "%s", words);
    if (kf_is_operation(endpoint, entry.op_context))
        kf_completed(engine, endpoint, entry.op_context, &error, now);
    else
        kf_fail_endpoint(engine, endpoint, &error);
}

static void kf_read_success(kf_engine *engine, kf_endpoint *endpoint, const struct fi_cq_data_entry *entry,
                            int64_t now) {
    if (entry->flags & FI_REMOTE_CQ_DATA) {
        kf_count_immediate(engine, endpoint, (uint32_t)entry->data, now);
    } else if (kf_is_operation(endpoint, entry->op_context)) {
        kf_completed(engine, endpoint, entry->op_context, NULL, now);
    }
    if (endpoint->receives) kf_receive_consumed(endpoint, entry->op_context);
}

/* What was consumed before this round, and what the provider did not take then: no receive is lost. */
static void kf_repost_receives(kf_engine *engine, kf_endpoint *landing) {
    int rc = landing->idle_receives && !landing->failed ? kf_post_receives(landing) : 0;
    if (!rc) return;
    kf_error error;
    kf_set_error(&error, "fi_recv", rc);
    kf_fail_endpoint(engine, landing, &error);
}

bool kf_drain(kf_engine *engine, kf_endpoint *endpoint, int64_t now) {
    struct fi_cq_data_entry entries[KF_CQ_BATCH];
    bool any = false;
    for (int round = 0; round < KF_CQ_ROUNDS; round++) {
        kf_repost_receives(engine, endpoint);
        ssize_t count = fi_cq_read(endpoint->cq, entries, KF_CQ_BATCH);
        if (count == -FI_EAVAIL)
            kf_read_failure(engine, endpoint, now);
        else if (count <= 0)
            break;
        for (ssize_t i = 0; i < count; i++) kf_read_success(engine, endpoint, &entries[i], now);
        any = true;
    }
    return any;
}

bool kf_drain_all(kf_engine *engine, int64_t now) {
    bool any = false;
    for (kf_node *node = engine->endpoints.next; node != &engine->endpoints; node = node->next) {
        kf_endpoint *endpoint = KF_OWNER(node, kf_endpoint, link);
        if (endpoint->cq) any |= kf_drain(engine, endpoint, now);
        if (endpoint->sender) any |= kf_drain_sender(engine, endpoint, now);
        if (endpoint->receiver) any |= kf_drain_receiver(engine, endpoint);
    }
    return any;
}
