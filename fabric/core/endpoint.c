/* Endpoints: on each rail one completion queue and one address vector, so that closing one leaves nothing behind. */
#include "same_host.h"

#include <sched.h>
#include <stdlib.h>

#define KF_POSTED_RECEIVES 512
#define KF_QUIET_POLLS 50
#define KF_QUIET_NS 10000000
#define KF_SETTLE_NS 500000000

/* Providers without wait objects (efa) get a queue without a descriptor, which is looked at between naps. */
static int kf_open_cq(kf_engine *engine, kf_port *port, kf_error *error) {
    const kf_rail *rail = port->rail;
    struct fi_cq_attr attr = {.size = kf_cq_size(engine, port->endpoint->landing),
                              .format = FI_CQ_FORMAT_DATA,
                              .wait_obj = rail->wait_set ? FI_WAIT_SET : FI_WAIT_FD,
                              .wait_set = rail->wait_set};
    int rc = fi_cq_open(rail->domain, &attr, &port->cq, NULL);
    if (!rc && rail->wait_set) return 0;
    if (!rc) return kf_watch(engine, &port->cq->fid, error);
    attr.wait_obj = FI_WAIT_NONE;
    attr.wait_set = NULL;
    rc = fi_cq_open(rail->domain, &attr, &port->cq, NULL);
    if (rc) return kf_set_error(error, "fi_cq_open", rc), rc;
    engine->without_descriptors = true;
    return 0;
}

static int kf_open_ep(kf_port *port, kf_error *error) {
    const kf_rail *rail = port->rail;
    struct fi_av_attr attr = {.type = FI_AV_UNSPEC, .count = 4};
    int rc = fi_av_open(rail->domain, &attr, &port->av, NULL);
    if (rc) return kf_set_error(error, "fi_av_open", rc), rc;
    rc = fi_endpoint(rail->domain, rail->info, &port->ep, NULL);
    if (rc) return kf_set_error(error, "fi_endpoint", rc), rc;
    rc = fi_ep_bind(port->ep, &port->av->fid, 0);
    if (!rc) rc = fi_ep_bind(port->ep, &port->cq->fid, FI_TRANSMIT | FI_RECV);
    if (rc) return kf_set_error(error, "fi_ep_bind", rc), rc;
    rc = fi_enable(port->ep);
    if (rc) return kf_set_error(error, "fi_enable", rc), rc;
    return 0;
}

static int kf_open_operations(kf_engine *engine, kf_port *port, kf_error *error) {
    uint32_t count = engine->options.endpoint_cap;
    port->operations = calloc(count, sizeof *port->operations);
    port->peers = calloc(KF_MAX_RAILS, sizeof *port->peers);
    if (!port->operations || !port->peers) return kf_set_error(error, "calloc", ENOMEM), -ENOMEM;
    for (uint32_t i = 0; i < count; i++) {
        port->operations[i].next = port->free_operations;
        port->free_operations = &port->operations[i];
    }
    for (int i = 0; i < KF_MAX_RAILS; i++) port->peers[i] = FI_ADDR_NOTAVAIL;
    return 0;
}

static void kf_add_idle(kf_port *port, kf_receive *receive) {
    receive->next_idle = port->idle_receives;
    port->idle_receives = receive;
}

/* The context of a completion on a landing; it is no receive of ours where the provider consumes none. */
void kf_receive_consumed(kf_port *port, void *context) {
    kf_receive *receive = context, *first = port->receives;
    if (first && receive >= first && receive < first + KF_POSTED_RECEIVES) kf_add_idle(port, receive);
}

/* Posts what is idle, as many as the provider takes now. Returns 0, or the negative FI_E... value of a failure. */
int kf_post_receives(kf_port *port) {
    for (kf_receive *receive; (receive = port->idle_receives); port->idle_receives = receive->next_idle) {
        int rc = (int)fi_recv(port->ep, NULL, 0, NULL, FI_ADDR_UNSPEC, receive);
        if (rc) return rc == -FI_EAGAIN ? 0 : rc;
    }
    return 0;
}

/* With FI_RX_CQ_DATA each immediate consumes a receive; as many are kept posted as the provider takes. */
static int kf_open_receives(kf_port *port, kf_error *error) {
    if (!(port->rail->info->mode & FI_RX_CQ_DATA)) return 0;
    port->receives = calloc(KF_POSTED_RECEIVES, sizeof *port->receives);
    if (!port->receives) return kf_set_error(error, "calloc", ENOMEM), -ENOMEM;
    for (int i = 0; i < KF_POSTED_RECEIVES; i++) kf_add_idle(port, &port->receives[i]);
    int rc = kf_post_receives(port);
    if (rc) kf_set_error(error, "fi_recv", rc);
    return rc;
}

/* A single port needs none: what it counts is what its endpoint counts. */
static int kf_open_tallies(kf_port *port, kf_error *error) {
    if (port->endpoint->port_count == 1) return 0;
    port->tallies = calloc(KF_SLOTS, sizeof *port->tallies);
    return port->tallies ? 0 : (kf_set_error(error, "calloc", ENOMEM), -ENOMEM);
}

/* Frees everything of an endpoint that holds no batch any more, also one that was only half opened. */
static void kf_free_endpoint(kf_endpoint *endpoint) {
    kf_close_local_sender(endpoint);
    kf_close_local_receiver(endpoint);
    for (uint32_t i = 0; i < endpoint->port_count; i++) {
        kf_port *port = &endpoint->ports[i];
        if (port->ep) fi_close(&port->ep->fid);
        if (port->cq) fi_close(&port->cq->fid);
        if (port->av) fi_close(&port->av->fid);
        kf_unlink(&port->ready);
        free(port->tallies);
        free(port->operations);
        free(port->receives);
        free(port->peers);
    }
    free(endpoint->address);
    free(endpoint);
}

static kf_endpoint *kf_new_endpoint(int64_t id, bool landing, uint32_t ports, kf_error *error) {
    kf_endpoint *endpoint = calloc(1, sizeof *endpoint + ports * sizeof(kf_port));
    if (!endpoint) return kf_set_error(error, "calloc", ENOMEM), NULL;
    endpoint->ports = (kf_port *)(endpoint + 1);
    endpoint->id = id;
    endpoint->landing = landing;
    endpoint->failed_rail = -1;
    kf_node_init(&endpoint->link);
    kf_node_init(&endpoint->ready);
    kf_node_init(&endpoint->batches);
    kf_node_init(&endpoint->queue);
    endpoint->port_count = ports;
    for (uint32_t i = 0; i < ports; i++) {
        endpoint->ports[i].endpoint = endpoint;
        kf_node_init(&endpoint->ports[i].ready);
    }
    return endpoint;
}

/* `failed`: to open it. */
static kf_endpoint *kf_add_endpoint(kf_engine *engine, kf_endpoint *endpoint, int failed) {
    if (failed) return kf_free_endpoint(endpoint), NULL;
    kf_append(&engine->endpoints, &endpoint->link);
    engine->counters.endpoints++;
    return endpoint;
}

/* On every rail. */
static int kf_open_ports(kf_engine *engine, kf_endpoint *endpoint, kf_error *error) {
    int rc = 0;
    for (uint32_t i = 0; i < endpoint->port_count && !rc; i++) {
        kf_port *port = &endpoint->ports[i];
        port->rail = &engine->rails[i];
        if (port->lost) continue;
        rc = kf_open_cq(engine, port, error);
        if (!rc) rc = kf_open_ep(port, error);
        if (!rc) rc = kf_open_tallies(port, error);
        if (!rc) rc = endpoint->landing ? kf_open_receives(port, error) : kf_open_operations(engine, port, error);
    }
    return rc;
}

/* `same_host`: a peer on this host may also come by way of shared memory. */
kf_endpoint *kf_open_landing(kf_engine *engine, int64_t id, int same_host, kf_error *error) {
    KF_GUARD(engine);
    kf_endpoint *landing = kf_new_endpoint(id, true, engine->options.rail_count, error);
    if (!landing) return NULL;
    int failed = kf_open_ports(engine, landing, error);
    if (engine->cannot_map && engine->options.rail_count) same_host = false;
    int local = !failed && same_host ? kf_open_local_receiver(engine, landing, error) : 0;
    if (local) kf_close_local_receiver(landing); /* no such sockets here (a sandbox): the provider is left, if any */
    if (local && !engine->options.rail_count) failed = local;
    return kf_add_endpoint(engine, landing, failed);
}

/* Where each endpoint starts to take turns, so that peers that send little do not all use the first rail: a hash. */
static uint32_t kf_first_turn(int64_t id) { return (uint32_t)((uint64_t)id * 0x9e3779b97f4a7c15ull >> 32); }

/* `address` came from another machine: one that is not of our format makes an endpoint that has failed. `without`:
 * rails not to use, a bit for each; not all. `asks_peer`: about writes in doubt, see doubt.c. */
kf_endpoint *kf_connect(kf_engine *engine, int64_t id, const void *address, size_t size, uint32_t without,
                        int asks_peer, kf_error *error) {
    KF_GUARD(engine);
    kf_error failure;
    kf_set_error(&failure, "fi_av_insert", FI_EINVAL);
    size_t count = engine->address_size ? size / engine->address_size : 0;
    bool ours = count && size % engine->address_size == 0 && count <= KF_MAX_RAILS;
    if (!ours) return kf_connect_failed(engine, id, &failure, error);
    kf_endpoint *endpoint = kf_new_endpoint(id, false, engine->options.rail_count, error);
    if (!endpoint) return NULL;
    endpoint->turn = kf_first_turn(id);
    endpoint->asks_peer = asks_peer;
    endpoint->address_count = (uint32_t)count;
    for (uint32_t i = 0; i < endpoint->port_count; i++) endpoint->ports[i].lost = without >> i & 1;
    endpoint->address = malloc(size);
    int failed = endpoint->address ? 0 : -ENOMEM;
    if (failed)
        kf_set_error(error, "malloc", ENOMEM);
    else
        memcpy(endpoint->address, address, size), failed = kf_open_ports(engine, endpoint, error);
    return kf_add_endpoint(engine, endpoint, failed);
}

/* NULL, with the reason, where no process of this user listens under that name on this host. */
kf_endpoint *kf_connect_same_host(kf_engine *engine, int64_t id, const char *name, size_t size, kf_error *error) {
    KF_GUARD(engine);
    kf_endpoint *endpoint = kf_new_endpoint(id, false, 1, error);
    if (!endpoint) return NULL;
    int failed = kf_open_operations(engine, &endpoint->ports[0], error);
    if (!failed) failed = kf_open_local_sender(engine, endpoint, name, size, error);
    return kf_add_endpoint(engine, endpoint, failed);
}

/* An endpoint that has failed before it was anything: its writes end with `why`. */
kf_endpoint *kf_connect_failed(kf_engine *engine, int64_t id, const kf_error *why, kf_error *error) {
    KF_GUARD(engine);
    kf_endpoint *endpoint = kf_new_endpoint(id, false, 0, error);
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

/* Returns 0, or the negative FI_E... value that says why the peer's rail cannot be reached from this port. */
int kf_find_peer(const kf_engine *engine, kf_port *port, uint32_t remote, fi_addr_t *peer) {
    const kf_endpoint *endpoint = port->endpoint;
    if (remote >= endpoint->address_count) return -FI_EINVAL;
    if (port->peers[remote] == FI_ADDR_NOTAVAIL) {
        const void *address = endpoint->address + remote * engine->address_size;
        if (fi_av_insert(port->av, address, 1, &port->peers[remote], 0, NULL) != 1) return -FI_EINVAL;
    }
    *peer = port->peers[remote];
    return 0;
}

/* The addresses of all ports, one after the other; `size`: of the buffer, then of what was written. They must be of one
 * size, so that a peer can tell them apart. */
int kf_endpoint_address(kf_endpoint *endpoint, void *address, size_t *size, kf_error *error) {
    size_t used = 0, first = 0;
    for (uint32_t i = 0; i < endpoint->port_count; i++) {
        size_t left = *size - used;
        int rc = fi_getname(&endpoint->ports[i].ep->fid, (char *)address + used, &left);
        if (!rc && i && left != first) rc = -FI_EADDRNOTAVAIL;
        if (rc) return kf_set_error(error, "fi_getname", rc), rc;
        first = left;
        used += left;
    }
    *size = used;
    return 0;
}

/* The peer is gone or refuses: everything that was not posted yet, or is in doubt, fails with the same reason. */
void kf_fail_endpoint(kf_engine *engine, kf_endpoint *endpoint, const kf_error *error) {
    if (endpoint->failed) return;
    endpoint->failed = true;
    endpoint->error = *error;
    kf_mark_ready(&engine->ready_endpoints, &endpoint->ready);
    kf_node *node = endpoint->batches.next;
    while (node != &endpoint->batches) {
        kf_batch *batch = KF_OWNER(node, kf_batch, of_endpoint);
        node = node->next; /* a batch that ends leaves this list */
        if (batch->posted < batch->count || batch->doubtful) kf_fail_batch(engine, batch, error);
    }
    for (uint32_t i = 0; i < endpoint->port_count; i++) kf_unlink(&endpoint->ports[i].ready);
}

/* Another port that the endpoint can go on with. A landing's that never received says nothing of the peer. */
static bool kf_has_other_port(const kf_port *port) {
    const kf_endpoint *endpoint = port->endpoint;
    for (uint32_t i = 0; i < endpoint->port_count; i++) {
        const kf_port *other = &endpoint->ports[i];
        if (other != port && !other->lost && (!endpoint->landing || other->was_connected)) return true;
    }
    return false;
}

/* One rail is broken. The others take its turns. Whether one of its writes that was posted, or completed without a word
 * of its delivery, has landed and was counted, only the peer can tell, and to repeat it might count it twice: where it
 * can be asked such writes are in doubt until it has answered, see doubt.c; elsewhere the endpoint fails. */
void kf_fail_port(kf_engine *engine, kf_port *port, const kf_error *error) {
    kf_endpoint *endpoint = port->endpoint;
    if (endpoint->failed || port->lost) return;
    port->lost = true;
    bool doubt = port->outstanding || (!endpoint->landing && port->was_connected && !engine->delivery_complete);
    if (kf_has_other_port(port) && (!doubt || kf_enter_doubt(engine, port, error))) {
        engine->counters.rails_lost++;
        port->error = *error;
        if (!endpoint->landing) kf_mark_ready(&engine->ready_ports, &port->ready);
    } else {
        endpoint->failed_rail = endpoint->port_count > 1 ? (int32_t)(port - endpoint->ports) : -1;
        kf_fail_endpoint(engine, endpoint, error);
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
        for (uint32_t i = 0; i < landing->port_count; i++)
            if (kf_drain(engine, &landing->ports[i], now)) {
                quiet_since = now;
                polls = 0;
            }
        sched_yield();
        now = kf_now();
    }
}

/* For a landing this is the fence. fi_close comes first, on every rail, and is synchronous: after it the provider
 * neither writes for the peer nor reads our sources. Batches end here; completions still in the queue are dropped.
 *
 * Returns 0, or the negative FI_E... value of fi_close: then nothing is fenced and no batch ends. The provider may
 * have freed its endpoint all the same (ofi_rxm), or half of it (net): it is neither closed again nor used, and what
 * it may still write to is not freed. */
int kf_close_endpoint(kf_engine *engine, kf_endpoint *endpoint, kf_error *error) {
    KF_GUARD(engine);
    bool settle = endpoint->landing && kf_closes_dead_only(engine) && !kf_is_same_host(endpoint);
    kf_close_local_sender(endpoint);
    kf_close_local_receiver(endpoint);
    if (settle) kf_settle_landing(engine, endpoint);
    int rc = 0;
    for (uint32_t i = 0; i < endpoint->port_count && !rc; i++) {
        kf_port *port = &endpoint->ports[i];
        rc = port->close_failed;
        if (!rc && port->ep) rc = fi_close(&port->ep->fid);
        if (!rc) port->ep = NULL;
    }
    if (endpoint->landing) kf_drop_expectations(engine, endpoint);
    kf_unlink(&endpoint->ready);
    kf_unlink(&endpoint->link);
    for (uint32_t i = 0; i < endpoint->port_count; i++) kf_unlink(&endpoint->ports[i].ready);
    if (rc) return kf_set_error(error, "fi_close", rc), rc;
    while (kf_linked(&endpoint->batches))
        kf_end_batch_of_closed(engine, KF_OWNER(endpoint->batches.next, kf_batch, of_endpoint));
    kf_free_endpoint(endpoint);
    engine->counters.endpoints--;
    return 0;
}
