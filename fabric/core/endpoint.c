/* Endpoints: one completion queue and one address vector each, so that closing one leaves nothing behind. */
#include "same_host.h"

#include <sched.h>
#include <stdlib.h>

#define KF_POSTED_RECEIVES 512
#define KF_QUIET_POLLS 50
#define KF_QUIET_NS 10000000
#define KF_SETTLE_NS 500000000

/* Providers without wait objects (efa) get a queue without a descriptor, which is looked at between naps. */
static int kf_open_cq(kf_engine *engine, kf_endpoint *endpoint, kf_error *error) {
    struct fi_cq_attr attr = {.size = kf_cq_size(engine, endpoint->landing),
                              .format = FI_CQ_FORMAT_DATA,
                              .wait_obj = engine->wait_set ? FI_WAIT_SET : FI_WAIT_FD,
                              .wait_set = engine->wait_set};
    int rc = fi_cq_open(engine->domain, &attr, &endpoint->cq, NULL);
    if (!rc && engine->wait_set) return 0;
    if (!rc) return kf_watch(engine, &endpoint->cq->fid, error);
    attr.wait_obj = FI_WAIT_NONE;
    attr.wait_set = NULL;
    rc = fi_cq_open(engine->domain, &attr, &endpoint->cq, NULL);
    if (rc) return kf_set_error(error, "fi_cq_open", rc), rc;
    engine->without_descriptors = true;
    return 0;
}

static int kf_open_ep(kf_engine *engine, kf_endpoint *endpoint, kf_error *error) {
    struct fi_av_attr attr = {.type = FI_AV_UNSPEC, .count = 4};
    int rc = fi_av_open(engine->domain, &attr, &endpoint->av, NULL);
    if (rc) return kf_set_error(error, "fi_av_open", rc), rc;
    rc = fi_endpoint(engine->domain, engine->info, &endpoint->ep, NULL);
    if (rc) return kf_set_error(error, "fi_endpoint", rc), rc;
    rc = fi_ep_bind(endpoint->ep, &endpoint->av->fid, 0);
    if (!rc) rc = fi_ep_bind(endpoint->ep, &endpoint->cq->fid, FI_TRANSMIT | FI_RECV);
    if (rc) return kf_set_error(error, "fi_ep_bind", rc), rc;
    rc = fi_enable(endpoint->ep);
    if (rc) return kf_set_error(error, "fi_enable", rc), rc;
    return 0;
}

static int kf_open_operations(kf_engine *engine, kf_endpoint *endpoint, kf_error *error) {
    uint32_t count = engine->options.endpoint_cap;
    endpoint->operations = calloc(count, sizeof *endpoint->operations);
    if (!endpoint->operations) return kf_set_error(error, "calloc", ENOMEM), -ENOMEM;
    for (uint32_t i = 0; i < count; i++) {
        endpoint->operations[i].next_free = endpoint->free_operations;
        endpoint->free_operations = &endpoint->operations[i];
    }
    return 0;
}

static void kf_add_idle(kf_endpoint *landing, kf_receive *receive) {
    receive->next_idle = landing->idle_receives;
    landing->idle_receives = receive;
}

/* The context of a completion on a landing; it is no receive of ours where the provider consumes none. */
void kf_receive_consumed(kf_endpoint *landing, void *context) {
    kf_receive *receive = context, *first = landing->receives;
    if (first && receive >= first && receive < first + KF_POSTED_RECEIVES) kf_add_idle(landing, receive);
}

/* Posts what is idle, as many as the provider takes now. Returns 0, or the negative FI_E... value of a failure. */
int kf_post_receives(kf_endpoint *landing) {
    for (kf_receive *receive; (receive = landing->idle_receives); landing->idle_receives = receive->next_idle) {
        int rc = (int)fi_recv(landing->ep, NULL, 0, NULL, FI_ADDR_UNSPEC, receive);
        if (rc) return rc == -FI_EAGAIN ? 0 : rc;
    }
    return 0;
}

/* With FI_RX_CQ_DATA each immediate consumes a receive; as many are kept posted as the provider takes. */
static int kf_open_receives(kf_engine *engine, kf_endpoint *landing, kf_error *error) {
    if (!(engine->info->mode & FI_RX_CQ_DATA)) return 0;
    landing->receives = calloc(KF_POSTED_RECEIVES, sizeof *landing->receives);
    if (!landing->receives) return kf_set_error(error, "calloc", ENOMEM), -ENOMEM;
    for (int i = 0; i < KF_POSTED_RECEIVES; i++) kf_add_idle(landing, &landing->receives[i]);
    int rc = kf_post_receives(landing);
    if (rc) kf_set_error(error, "fi_recv", rc);
    return rc;
}

/* Frees everything of an endpoint that holds no batch any more, also one that was only half opened. */
static void kf_free_endpoint(kf_endpoint *endpoint) {
    if (endpoint->ep) fi_close(&endpoint->ep->fid);
    if (endpoint->cq) fi_close(&endpoint->cq->fid);
    if (endpoint->av) fi_close(&endpoint->av->fid);
    kf_close_local_sender(endpoint);
    kf_close_local_receiver(endpoint);
    free(endpoint->operations);
    free(endpoint->receives);
    free(endpoint);
}

static kf_endpoint *kf_new_endpoint(int64_t id, bool landing, kf_error *error) {
    kf_endpoint *endpoint = calloc(1, sizeof *endpoint);
    if (!endpoint) return kf_set_error(error, "calloc", ENOMEM), NULL;
    endpoint->id = id;
    endpoint->landing = landing;
    kf_node_init(&endpoint->link);
    kf_node_init(&endpoint->ready);
    kf_node_init(&endpoint->batches);
    kf_node_init(&endpoint->queue);
    return endpoint;
}

/* `failed`: to open it. */
static kf_endpoint *kf_add_endpoint(kf_engine *engine, kf_endpoint *endpoint, int failed) {
    if (failed) return kf_free_endpoint(endpoint), NULL;
    kf_append(&engine->endpoints, &endpoint->link);
    engine->counters.endpoints++;
    return endpoint;
}

static int kf_open_with_provider(kf_engine *engine, kf_endpoint *endpoint, kf_error *error) {
    if (kf_open_cq(engine, endpoint, error) || kf_open_ep(engine, endpoint, error)) return -1;
    return endpoint->landing ? kf_open_receives(engine, endpoint, error) : 0;
}

/* `same_host`: a peer on this host may also come by way of shared memory. */
kf_endpoint *kf_open_landing(kf_engine *engine, int64_t id, int same_host, kf_error *error) {
    kf_endpoint *landing = kf_new_endpoint(id, true, error);
    if (!landing) return NULL;
    int failed = engine->domain ? kf_open_with_provider(engine, landing, error) : 0;
    if (!failed && same_host) failed = kf_open_local_receiver(engine, landing, error);
    return kf_add_endpoint(engine, landing, failed);
}

/* `address` came from another machine: one that is not of our format makes an endpoint that has failed. */
kf_endpoint *kf_connect(kf_engine *engine, int64_t id, const void *address, size_t size, kf_error *error) {
    kf_error failure;
    kf_set_error(&failure, "fi_av_insert", FI_EINVAL);
    if (!engine->domain || size != engine->address_size) return kf_connect_failed(engine, id, &failure, error);
    kf_endpoint *endpoint = kf_new_endpoint(id, false, error);
    if (!endpoint) return NULL;
    int failed = kf_open_operations(engine, endpoint, error) || kf_open_with_provider(engine, endpoint, error);
    if (!kf_add_endpoint(engine, endpoint, failed)) return NULL;
    if (fi_av_insert(endpoint->av, address, 1, &endpoint->peer, 0, NULL) != 1)
        kf_fail_endpoint(engine, endpoint, &failure);
    return endpoint;
}

/* NULL, with the reason, where no process of this user listens under that name on this host. */
kf_endpoint *kf_connect_same_host(kf_engine *engine, int64_t id, const char *name, size_t size, kf_error *error) {
    kf_endpoint *endpoint = kf_new_endpoint(id, false, error);
    if (!endpoint) return NULL;
    int failed = kf_open_operations(engine, endpoint, error);
    if (!failed) failed = kf_open_local_sender(engine, endpoint, name, size, error);
    return kf_add_endpoint(engine, endpoint, failed);
}

/* An endpoint that has failed before it was anything: its writes end with `why`. */
kf_endpoint *kf_connect_failed(kf_engine *engine, int64_t id, const kf_error *why, kf_error *error) {
    kf_endpoint *endpoint = kf_new_endpoint(id, false, error);
    if (!endpoint) return NULL;
    kf_fail_endpoint(engine, kf_add_endpoint(engine, endpoint, 0), why);
    return endpoint;
}

/* NULL where peers do not come that way. */
const char *kf_same_host_name(const kf_endpoint *landing) {
    return landing->receiver ? landing->receiver->name : NULL;
}

/* Whether it writes by way of shared memory, or is written to that way since its peer has come. */
int kf_is_same_host(const kf_endpoint *endpoint) {
    return endpoint->sender || (endpoint->receiver && endpoint->receiver->joined);
}

int kf_endpoint_address(kf_endpoint *endpoint, void *address, size_t *size, kf_error *error) {
    int rc = fi_getname(&endpoint->ep->fid, address, size);
    if (rc) kf_set_error(error, "fi_getname", rc);
    return rc;
}

/* The peer is gone or refuses: everything that was not posted yet fails with the same reason. */
void kf_fail_endpoint(kf_engine *engine, kf_endpoint *endpoint, const kf_error *error) {
    if (endpoint->failed) return;
    endpoint->failed = true;
    endpoint->error = *error;
    kf_mark_ready(&engine->ready_endpoints, &endpoint->ready);
    kf_node *node = endpoint->batches.next;
    while (node != &endpoint->batches) {
        kf_batch *batch = KF_OWNER(node, kf_batch, of_endpoint);
        node = node->next; /* a batch that ends leaves this list */
        if (batch->posted < batch->count) kf_fail_batch(engine, batch, error);
    }
}

static void kf_end_batch_of_closed(kf_engine *engine, kf_batch *batch) {
    kf_stop_batch(engine, batch);
    batch->cancelled = true;
    engine->counters.outstanding -= (int64_t)batch->outstanding;
    batch->outstanding = 0;
    kf_end_if_done(engine, batch);
    batch->endpoint = NULL;
}

/* Receives what a dead peer left on its connection, until nothing more came for a while: fi_close of ofi_rxm crashes
 * (1.17) in the middle of an arriving write. The providers without that flaw need none of it. */
static void kf_settle_landing(kf_engine *engine, kf_endpoint *landing) {
    int64_t now = kf_now(), quiet_since = now, deadline = now + KF_SETTLE_NS;
    for (int polls = 0; now < deadline && (polls < KF_QUIET_POLLS || now - quiet_since < KF_QUIET_NS); polls++) {
        if (kf_drain(engine, landing, now)) {
            quiet_since = now;
            polls = 0;
        }
        sched_yield();
        now = kf_now();
    }
}

/* For a landing this is the fence. fi_close comes first and is synchronous: after it the provider neither writes
 * for the peer nor reads our sources. Batches end here; completions still in the queue are dropped with it.
 *
 * Returns 0, or the negative FI_E... value of fi_close: then nothing is fenced and no batch ends. The provider may
 * have freed its endpoint all the same (ofi_rxm), or half of it (net): it is neither closed again nor used, and what
 * it may still write to is not freed. */
int kf_close_endpoint(kf_engine *engine, kf_endpoint *endpoint, kf_error *error) {
    bool settle = endpoint->ep && endpoint->landing && kf_closes_dead_only(engine) && !kf_is_same_host(endpoint);
    kf_close_local_sender(endpoint);
    kf_close_local_receiver(endpoint);
    if (settle) kf_settle_landing(engine, endpoint);
    int rc = endpoint->ep ? fi_close(&endpoint->ep->fid) : 0;
    if (endpoint->landing) kf_drop_expectations(engine, endpoint);
    kf_unlink(&endpoint->ready);
    kf_unlink(&endpoint->link);
    if (rc) return kf_set_error(error, "fi_close", rc), rc;
    endpoint->ep = NULL;
    while (kf_linked(&endpoint->batches))
        kf_end_batch_of_closed(engine, KF_OWNER(endpoint->batches.next, kf_batch, of_endpoint));
    kf_free_endpoint(endpoint);
    engine->counters.endpoints--;
    return 0;
}
