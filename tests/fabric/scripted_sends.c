/* A sending endpoint over a provider whose every completion a script gives, in any order. */
#include "internal.h"

#include <stdlib.h>

enum { MOST = 256 };

static struct {
    kf_engine *engine;
    kf_endpoint *endpoint;
    kf_port *port;
    kf_region region;
    kf_batch *batch;
    void *contexts[MOST]; /* of the writes, as they were posted */
    bool asked[MOST];     /* for the peer's acknowledgement */
    int posted;
    void *done[MOST]; /* completions that were not read yet */
    int done_count;
    bool refuses; /* every post, for now */
} script;

static ssize_t script_write(struct fid_ep *ep, const struct fi_msg_rma *message, uint64_t flags) {
    if (script.refuses) return -FI_EAGAIN;
    script.asked[script.posted] = flags & FI_DELIVERY_COMPLETE;
    script.contexts[script.posted++] = message->context;
    return 0;
}

static ssize_t script_read(struct fid_cq *cq, void *entries, size_t capacity) {
    struct fi_cq_data_entry *entry = entries;
    int n = script.done_count;
    for (int i = 0; i < n; i++)
        entry[i] = (struct fi_cq_data_entry){.op_context = script.done[i], .flags = FI_RMA | FI_WRITE};
    script.done_count = 0;
    return n ? n : -FI_EAGAIN;
}

static struct fi_ops_rma rma_ops = {.size = sizeof rma_ops, .writemsg = script_write};
static struct fi_ops_cq cq_ops = {.size = sizeof cq_ops, .read = script_read};
static struct fid_ep ep = {.rma = &rma_ops};
static struct fid_cq cq = {.ops = &cq_ops};

static void script_open_port(int cap) {
    kf_port *port = script.port = script.endpoint->ports = (kf_port *)(script.endpoint + 1);
    port->endpoint = script.endpoint;
    kf_node_init(&port->ready);
    port->ep = &ep;
    port->cq = &cq;
    port->peers = calloc(KF_MAX_RAILS, sizeof *port->peers);
    port->operations = calloc((size_t)cap, sizeof *port->operations);
    for (int i = 0; i < cap; i++) {
        port->operations[i].next = port->free_operations;
        port->free_operations = &port->operations[i];
    }
}

static void script_open(int cap, int in_order, int in_all) {
    memset(&script, 0, sizeof script);
    kf_engine *engine = script.engine = calloc(1, sizeof *engine);
    engine->options = (kf_options){.rail_count = 1, .endpoint_cap = (uint32_t)cap, .domain_cap = (uint32_t)in_all};
    engine->delivery_complete = true;
    engine->in_order = in_order;
    engine->closing = true; /* no relay */
    kf_open_relay(engine);
    kf_node *heads[] = {&engine->endpoints, &engine->words, &engine->ready_endpoints, &engine->ready_batches};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) kf_node_init(heads[i]);
    kf_endpoint *endpoint = script.endpoint = calloc(1, sizeof *endpoint + sizeof *script.port);
    kf_node *nodes[] = {&endpoint->link, &endpoint->ready, &endpoint->batches, &endpoint->queue};
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) kf_node_init(nodes[i]);
    endpoint->port_count = endpoint->address_count = 1;
    script_open_port(cap);
    kf_append(&engine->endpoints, &endpoint->link);
}

static void script_close(void) {
    kf_free_batch(script.batch);
    free(script.port->peers);
    free(script.port->operations);
    free(script.endpoint);
    free(script.engine);
}

/* One batch, posted as far as it goes. */
static void script_queue(int count) {
    uint64_t *indices = calloc((size_t)count, sizeof *indices);
    kf_lane lane = {0};
    kf_writes writes = {.source_indices = indices, .target_indices = indices, .source_region = &script.region,
                        .lanes = &lane, .lane_count = 1, .count = (uint64_t)count, .length = 64, .immediate = 7};
    script.batch = kf_write(script.engine, script.endpoint, 1, &writes, 0, 0);
    free(indices);
    kf_post_all(script.engine, 1);
}

static void script_complete(int write) { script.done[script.done_count++] = script.contexts[write]; }
static void script_go_on(void) {
    kf_drain(script.engine, script.port, 1);
    kf_post_all(script.engine, 1);
}
/* From now on; there is no patience with an endpoint that cannot post. */
static void script_refuse(void) {
    script.refuses = true;
    script_go_on();
}
static void script_cancel(void) {
    int64_t posted, completed;
    kf_cancel(script.engine, script.batch, &posted, &completed);
}
static int script_posted(void) { return script.posted; }
static int script_asked(int write) { return script.asked[write]; }
static int script_outstanding(void) { return (int)script.engine->counters.outstanding; }
static int script_completed(void) { return (int)script.batch->completed; }
static int script_ended(void) { return script.batch->ended; }
static int script_failed(void) { return script.endpoint->failed; }
