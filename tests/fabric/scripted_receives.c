/* A landing over a provider that consumes a posted receive for each immediate, as verbs does and nothing on a machine
 * without a NIC: the core's own drain, with libfabric's tables of calls answered by a script. */
#include "internal.h"

#include <stdlib.h>

enum { RECEIVES = 512 };

static struct {
    kf_engine *engine;
    kf_endpoint *landing;
    kf_port *port;
    void *posted[RECEIVES]; /* oldest first, as the provider holds them */
    int count, room, refusal, arriving;
} script;

static ssize_t script_recv(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t from, void *context) {
    if (script.refusal && script.count >= script.room) return script.refusal;
    script.posted[script.count++] = context;
    return 0;
}

/* Each immediate takes the oldest receive; without one it has to wait. */
static ssize_t script_read(struct fid_cq *cq, void *entries, size_t capacity) {
    struct fi_cq_data_entry *entry = entries;
    size_t n = 0;
    for (; n < capacity && script.arriving && script.count; n++, script.arriving--, script.count--) {
        entry[n] = (struct fi_cq_data_entry){
            .op_context = script.posted[0], .flags = FI_REMOTE_CQ_DATA | FI_RMA | FI_REMOTE_WRITE, .data = 1};
        memmove(script.posted, script.posted + 1, (size_t)(script.count - 1) * sizeof *script.posted);
    }
    return n ? (ssize_t)n : -FI_EAGAIN;
}

static struct fi_ops_msg msg_ops = {.size = sizeof msg_ops, .recv = script_recv};
static struct fi_ops_cq cq_ops = {.size = sizeof cq_ops, .read = script_read};
static struct fid_ep ep = {.msg = &msg_ops};
static struct fid_cq cq = {.ops = &cq_ops};

static void script_open(void) {
    memset(&script, 0, sizeof script);
    script.engine = calloc(1, sizeof *script.engine);
    script.landing = calloc(1, sizeof *script.landing + sizeof *script.port);
    script.port = script.landing->ports = (kf_port *)(script.landing + 1);
    script.port->endpoint = script.landing;
    kf_node_init(&script.engine->ready_endpoints);
    kf_node_init(&script.landing->ready);
    kf_node_init(&script.landing->batches);
    script.landing->landing = true;
    script.port->ep = &ep;
    script.port->cq = &cq;
    script.port->receives = calloc(RECEIVES, sizeof *script.port->receives);
    for (int i = 0; i < RECEIVES; i++) kf_receive_consumed(script.port, &script.port->receives[i]);
}

static void script_close(void) {
    free(script.port->receives);
    free(script.landing);
    free(script.engine);
}

/* The provider takes receives up to `room` and answers `refusal` (0: it takes all) to more. */
static void script_provider(int room, int refusal) { script.room = room, script.refusal = refusal; }
static void script_arrive(int immediates) { script.arriving += immediates; }
static void script_drain(void) { kf_drain(script.engine, script.port, 1); }
static int script_posted(void) { return script.count; }
static int script_failed(void) { return script.landing->failed ? script.landing->error.code : 0; }
static int script_seen(void) {
    return (int)(script.engine->counters.immediates_counted + script.engine->counters.stale_immediates);
}
