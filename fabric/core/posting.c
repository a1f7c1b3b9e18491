/* Posting writes and draining completion queues. */
#include "internal.h"

#include <stdio.h>

#define KF_QUANTUM 8             /* writes that one endpoint posts before the next has its turn */
#define KF_PASSED 64             /* batches that wait for a rail, before those behind them are not looked at */
#define KF_CQ_BATCH 64           /* completions read by one call */
#define KF_CQ_ROUNDS 8           /* calls before the next queue has its turn */
#define KF_BACKOFF_MIN_NS 20000  /* after FI_EAGAIN, doubling to: */
#define KF_BACKOFF_MAX_NS 1000000
#define KF_RECONNECT_SHARE 10    /* of connect_timeout, for a connection that was there before */

static int64_t kf_engine_cap(const kf_engine *engine) {
    int64_t rails = engine->options.rail_count ? engine->options.rail_count : 1;
    return rails * engine->options.domain_cap;
}

/* What those that have anything to post, or on its way, may each have outstanding whatever the others have: peers that
 * stand still with all of the cap must not slow down one that lives. */
static int64_t kf_fair_share(const kf_engine *engine) {
    int64_t busy = 0;
    for (const kf_node *node = engine->endpoints.next; node != &engine->endpoints; node = node->next) {
        const kf_endpoint *endpoint = KF_OWNER(node, kf_endpoint, link);
        busy += endpoint->outstanding || kf_linked(&endpoint->queue);
    }
    int64_t share = busy ? kf_engine_cap(engine) / busy : 0;
    return share ? share : 1;
}

static bool kf_may_post(const kf_engine *engine, const kf_endpoint *endpoint) {
    bool room = endpoint->outstanding < engine->share || engine->counters.outstanding < kf_engine_cap(engine);
    return room || kf_all_is_held(endpoint);
}

static bool kf_port_is_open(const kf_engine *engine, const kf_port *port, int64_t now) {
    return !port->lost && port->outstanding < engine->options.endpoint_cap && port->retry_at <= now;
}

/* The way of the next write: those that can take it take turns. NULL: none can now. */
static const kf_way *kf_next_way(const kf_engine *engine, kf_endpoint *endpoint, kf_batch *batch, int64_t now) {
    for (uint32_t i = 0; i < batch->way_count; i++) {
        const kf_way *way = &batch->ways[endpoint->turn++ % batch->way_count];
        bool open = kf_port_is_open(engine, &endpoint->ports[way->lane.rail], now);
        if (open && !kf_way_is_lost(endpoint, way)) return way;
    }
    return NULL;
}

/* Which write of the batch is next: first those that were taken back. */
static uint64_t kf_next_write(const kf_batch *batch) { return batch->again ? batch->again->write : batch->posted; }

static ssize_t kf_post_write(kf_engine *engine, kf_port *port, kf_batch *batch, const kf_way *way) {
    kf_local_sender *sender = port->endpoint->sender;
    uint64_t next = port->free_operations->write = kf_next_write(batch);
    if (sender) return kf_post_locally(sender, batch, port->free_operations), 0;
    fi_addr_t peer;
    int rc = kf_find_peer(engine, port, way->lane.remote, &peer);
    if (rc) return rc;
    uint64_t source = batch->writes[next].source, target = batch->writes[next].target;
    void *desc = way->source_desc;
    struct iovec local = {.iov_base = (void *)source, .iov_len = batch->length};
    struct fi_rma_iov remote = {.addr = target, .len = batch->length, .key = way->lane.key};
    struct fi_msg_rma message = {
        .msg_iov = &local, .desc = &desc, .iov_count = 1, .addr = peer, .rma_iov = &remote, .rma_iov_count = 1,
        .context = port->free_operations, .data = batch->immediate};
    return fi_writemsg(port->ep, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION | kf_promise(engine, port, batch));
}

static void kf_posted(kf_engine *engine, kf_port *port, kf_batch *batch, const kf_way *way, int64_t now) {
    kf_operation *operation = port->free_operations;
    port->free_operations = operation->next;
    operation->batch = batch;
    port->numbered++;
    if (batch->again) batch->again = batch->again->next;
    port->remotes |= 1u << way->lane.remote;
    kf_begin_tally(port, batch->immediate);
    batch->posted++;
    if (!batch->first_posted_ns) batch->first_posted_ns = now;
    batch->last_posted_ns = now;
    batch->outstanding++;
    port->endpoint->outstanding++;
    port->outstanding++;
    port->was_connected = true;
    if (port->rail) port->rail->posted++;
    port->backoff = port->retry_at = port->blocked_since = 0;
    engine->counters.outstanding++;
    engine->counters.writes_posted++;
    engine->counters.bytes_posted += (int64_t)batch->length;
}

/* FI_EAGAIN: the transmit queue is full, which ends with a completion; or not connected yet, which ends with a
 * connection or, after connect_timeout, with a failure; or the connection was lost and `net` tries it anew, which is
 * not waited for as long: a landing that was closed never answers again. */
static void kf_postpone(kf_engine *engine, kf_port *port, int64_t now) {
    engine->counters.post_retries++;
    bool awaits = port->outstanding && !kf_all_is_held(port->endpoint); /* of what is held nothing more is heard */
    if (!port->blocked_since || awaits) port->blocked_since = now;
    port->backoff = port->backoff ? port->backoff * 2 : KF_BACKOFF_MIN_NS;
    if (port->backoff > KF_BACKOFF_MAX_NS) port->backoff = KF_BACKOFF_MAX_NS;
    port->retry_at = now + port->backoff;
    int64_t patience = engine->options.connect_timeout_ns / (port->was_connected ? KF_RECONNECT_SHARE : 1);
    if (awaits || now - port->blocked_since < patience) return;
    kf_error error;
    kf_set_error(&error, "fi_writemsg", FI_ETIMEDOUT);
    kf_fail_port(engine, port, &error);
}

/* Posts one write of the batch, on whichever rail can take it; true if one was posted. */
static bool kf_post_one(kf_engine *engine, kf_batch *batch, int64_t now) {
    kf_endpoint *endpoint = batch->endpoint;
    const kf_way *way;
    while (!batch->stopped && (way = kf_next_way(engine, endpoint, batch, now))) {
        kf_port *port = &endpoint->ports[way->lane.rail];
        ssize_t rc = kf_post_write(engine, port, batch, way);
        if (!rc) return kf_posted(engine, port, batch, way, kf_now()), true;
        if (rc == -FI_EAGAIN) {
            kf_postpone(engine, port, now);
            continue;
        }
        kf_error error;
        kf_set_error(&error, "fi_writemsg", (int)rc);
        kf_fail_port(engine, port, &error);
    }
    if (!batch->stopped && kf_has_no_way(endpoint, batch)) {
        kf_error error;
        kf_set_error(&error, "fi_writemsg", FI_EHOSTUNREACH);
        kf_fail_endpoint(engine, endpoint, &error);
    }
    return false;
}

static bool kf_any_port_is_open(const kf_engine *engine, const kf_endpoint *endpoint, int64_t now) {
    for (uint32_t i = 0; i < endpoint->port_count; i++)
        if (kf_port_is_open(engine, &endpoint->ports[i], now)) return true;
    return false;
}

/* Posts up to a quantum, batch after batch; where the rails of one are busy, those behind it that have others overtake
 * it. True if anything was posted or ended. */
static bool kf_post_some(kf_engine *engine, kf_endpoint *endpoint, int64_t now) {
    int moved = 0, passed = 0;
    kf_node *node = endpoint->queue.next;
    while (moved < KF_QUANTUM && passed < KF_PASSED && node != &endpoint->queue && kf_may_post(engine, endpoint) &&
           kf_any_port_is_open(engine, endpoint, now)) {
        kf_batch *batch = KF_OWNER(node, kf_batch, place);
        bool posted = batch->posted < batch->count && kf_post_one(engine, batch, now);
        if (endpoint->failed) return true;
        bool done = batch->posted == batch->count;
        if (done || !posted) node = node->next;
        if (done) {
            kf_leave_queue(batch);
            kf_end_if_done(engine, batch);
        }
        moved += posted || done;
        passed += !posted && !done;
    }
    return moved;
}

/* Round robin: each endpoint a quantum, until none can post; the first one goes to the back for the next call. */
bool kf_post_all(kf_engine *engine, int64_t now) {
    bool any = false, moved = true;
    engine->share = kf_fair_share(engine);
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

/* When to try again the earliest postponed port; INT64_MAX: none. */
int64_t kf_next_retry(const kf_engine *engine) {
    int64_t earliest = INT64_MAX;
    for (kf_node *node = engine->endpoints.next; node != &engine->endpoints; node = node->next) {
        kf_endpoint *endpoint = KF_OWNER(node, kf_endpoint, link);
        if (!kf_linked(&endpoint->queue) || !kf_may_post(engine, endpoint)) continue;
        for (uint32_t i = 0; i < endpoint->port_count; i++) {
            const kf_port *port = &endpoint->ports[i];
            bool waits = port->retry_at && !port->lost && port->outstanding < engine->options.endpoint_cap;
            if (waits && port->retry_at < earliest) earliest = port->retry_at;
        }
    }
    return earliest;
}

/* It is not in flight any more. Returns whose it was. */
kf_batch *kf_take_operation(kf_engine *engine, kf_port *port, kf_operation *operation) {
    kf_batch *batch = operation->batch;
    operation->batch = NULL;
    port->outstanding--;
    port->endpoint->outstanding--;
    engine->counters.outstanding--;
    batch->outstanding--;
    return batch;
}

/* One that failed is in doubt, with its port, or its endpoint's failure. */
void kf_completed(kf_engine *engine, kf_port *port, kf_operation *operation, const kf_error *error, int64_t now) {
    if (error) kf_fail_port(engine, port, error);
    if (error && port->doubt) return;
    kf_batch *batch = kf_take_operation(engine, port, operation);
    operation->next = port->free_operations;
    port->free_operations = operation;
    port->retry_at = port->backoff = 0;
    batch->completed_ns = now;
    if (error) {
        engine->counters.writes_failed++;
        kf_fail_batch(engine, batch, error);
    } else {
        kf_tally_one(port, batch->immediate);
        engine->counters.writes_completed++;
        batch->completed++;
        kf_end_if_done(engine, batch);
    }
}

static bool kf_is_operation(const kf_port *port, const void *context) {
    return !port->endpoint->landing && context != NULL;
}

/* A failed write breaks its endpoint: verbs has it so, and tcp;ofi_rxm loses the connection. */
static void kf_read_failure(kf_engine *engine, kf_port *port, int64_t now) {
    struct fi_cq_err_entry entry = {0};
    if (fi_cq_readerr(port->cq, &entry, 0) != 1) return;
    kf_error error;
    kf_set_error(&error, "fi_cq_read", entry.err);
    const char *words = fi_cq_strerror(port->cq, entry.prov_errno, entry.err_data, NULL, 0);
    if (words && entry.prov_errno) snprintf(error.provider, sizeof error.provider, "%s", words);
    if (kf_is_operation(port, entry.op_context))
        kf_completed(engine, port, entry.op_context, &error, now);
    else
        kf_fail_port(engine, port, &error);
}

static void kf_read_success(kf_engine *engine, kf_port *port, const struct fi_cq_data_entry *entry, int64_t now) {
    if (entry->flags & FI_REMOTE_CQ_DATA) {
        port->was_connected = true;
        uint32_t immediate = (uint32_t)entry->data;
        if (kf_count_immediate(engine, port->endpoint, immediate, now)) kf_tally_one(port, immediate);
    } else if (kf_is_operation(port, entry->op_context)) {
        kf_handed_over(engine, port, entry->op_context, now);
    }
    if (port->receives) kf_receive_consumed(port, entry->op_context);
}

/* What was consumed before this round, and what the provider did not take then: no receive is lost. */
static void kf_repost_receives(kf_engine *engine, kf_port *port) {
    int rc = port->idle_receives && !port->endpoint->failed && !port->lost ? kf_post_receives(port) : 0;
    if (!rc) return;
    kf_error error;
    kf_set_error(&error, "fi_recv", rc);
    kf_fail_port(engine, port, &error);
}

bool kf_drain(kf_engine *engine, kf_port *port, int64_t now) {
    struct fi_cq_data_entry entries[KF_CQ_BATCH];
    bool any = false;
    for (int round = 0; round < KF_CQ_ROUNDS; round++) {
        kf_repost_receives(engine, port);
        ssize_t count = fi_cq_read(port->cq, entries, KF_CQ_BATCH);
        if (count == -FI_EAVAIL)
            kf_read_failure(engine, port, now);
        else if (count <= 0)
            break;
        now = kf_now(); /* reading may take its time: some providers move bytes meanwhile */
        for (ssize_t i = 0; i < count; i++) kf_read_success(engine, port, &entries[i], now);
        any = true;
    }
    return any;
}

/* Of a port that posts nothing more, or whose endpoint is closed: until its queue is empty. */
void kf_drain_all_of(kf_engine *engine, kf_port *port) {
    for (size_t left = kf_cq_size(engine, port->endpoint->landing); left && kf_drain(engine, port, kf_now()); left--) {
    }
}

bool kf_drain_all(kf_engine *engine, int64_t now) {
    bool any = false;
    for (kf_node *node = engine->endpoints.next; node != &engine->endpoints; node = node->next) {
        kf_endpoint *endpoint = KF_OWNER(node, kf_endpoint, link);
        for (uint32_t i = 0; i < endpoint->port_count; i++)
            if (endpoint->ports[i].ep) any |= kf_drain(engine, &endpoint->ports[i], now);
        if (endpoint->sender) any |= kf_drain_sender(engine, endpoint, now);
        if (endpoint->receiver) any |= kf_drain_receiver(engine, endpoint);
    }
    return any;
}
