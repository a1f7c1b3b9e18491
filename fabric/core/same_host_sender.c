/* The sending side of the same-host path: offers memory, puts descriptors into the ring, hears what was copied. */
#define _GNU_SOURCE
#include "same_host.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>


static uint64_t kf_power_of_two(uint64_t at_least) {
    uint64_t power = 1;
    while (power < at_least) power *= 2;
    return power;
}

static int kf_offer_ring(const kf_engine *engine, kf_local_sender *sender, const char *name, size_t size, int ring,
                         kf_error *error) {
    sender->socket = kf_dial_locally(name, size);
    if (sender->socket < 0) return kf_set_error(error, "connect", sender->socket), sender->socket;
    kf_packet offer = {.kind = KF_OFFER_RING, .length = sender->slots};
    int rc = kf_send_packet(sender->socket, &offer, ring);
    return rc ? kf_set_error(error, "sendmsg", rc), rc : kf_watch_fd(engine, sender->socket, error);
}

/* The ring first: a receiver that we connect to and then leave for the provider's way would take us for dead. */
static int kf_open_sender(const kf_engine *engine, kf_local_sender *sender, const char *name, size_t size,
                          kf_error *error) {
    sender->slots = kf_power_of_two(engine->options.endpoint_cap);
    sender->sent = calloc(sender->slots, sizeof *sender->sent);
    if (!sender->sent) return kf_set_error(error, "calloc", ENOMEM), -ENOMEM;
    int rc = kf_create_ring(sender->slots, &sender->ring_map);
    if (rc) return kf_set_error(error, "memfd_create", rc), rc;
    int file = (int)sender->ring_map.number;
    sender->ring = (kf_ring *)sender->ring_map.base;
    rc = kf_offer_ring(engine, sender, name, size, file, error);
    close(file);
    return rc;
}

/* Connects at once. Not 0, with the reason, where no process of this user listens there: it is on another host, in
 * another network namespace, or gone. */
int kf_open_local_sender(kf_engine *engine, kf_endpoint *endpoint, const char *name, size_t size, kf_error *error) {
    endpoint->sender = calloc(1, sizeof *endpoint->sender);
    if (!endpoint->sender) return kf_set_error(error, "calloc", ENOMEM), -ENOMEM;
    endpoint->sender->socket = -1;
    return kf_open_sender(engine, endpoint->sender, name, size, error);
}

static bool kf_was_offered(const kf_local_sender *sender, uint64_t number) {
    for (size_t i = sender->offered_count; i > 0; i--)
        if (sender->offered[i - 1] == number) return true;
    return false;
}

/* Gives the receiver a region that it is to read from, once. */
int kf_offer_region(kf_local_sender *sender, const kf_region *region, kf_error *error) {
    if (sender->socket < 0 || kf_was_offered(sender, region->number)) return 0;
    uint64_t *offered = realloc(sender->offered, (sender->offered_count + 1) * sizeof *offered);
    if (!offered) return kf_set_error(error, "realloc", ENOMEM), -ENOMEM;
    sender->offered = offered;
    offered[sender->offered_count++] = region->number;
    kf_packet offer = {.kind = KF_OFFER_REGION, .number = region->number, .offset = region->file_offset,
                       .length = region->length};
    int rc = kf_send_packet(sender->socket, &offer, region->file);
    if (rc) kf_set_error(error, "sendmsg", rc);
    return rc;
}

/* There is room: never more than the endpoint's cap is outstanding. */
void kf_post_locally(kf_local_sender *sender, const kf_batch *batch, kf_operation *operation) {
    uint64_t slot = sender->posted % sender->slots;
    sender->ring->descriptors[slot] = (kf_descriptor){
        .source_region = batch->source_number,
        .source_offset = batch->writes[batch->posted].source - batch->source_base,
        .target_key = batch->ways[0].lane.key,
        .target = batch->writes[batch->posted].target,
        .length = batch->length,
        .immediate = batch->immediate};
    sender->sent[slot] = operation;
    __atomic_store_n(&sender->ring->sender.posted, ++sender->posted, __ATOMIC_RELEASE);
}

/* Wakes a receiver that sleeps. One that looks on its own is left alone. */
void kf_ring_receiver(kf_local_sender *sender) {
    if (sender->rung == sender->posted) return;
    sender->rung = sender->posted;
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* what we posted before what it says of itself: see kf_receiver_may_sleep */
    if (!__atomic_load_n(&sender->ring->receiver.sleeps, __ATOMIC_RELAXED)) return;
    if (!__atomic_exchange_n(&sender->ring->receiver.sleeps, 0, __ATOMIC_SEQ_CST)) return;
    kf_packet wake = {.kind = KF_WAKE};
    kf_send_packet(sender->socket, &wake, -1); /* no room: enough is there to wake it. Closed: the next look tells */
}

/* True if the receiver will wake us: half of what is outstanding is still to be copied. */
bool kf_sender_may_sleep(kf_local_sender *sender) {
    uint64_t outstanding = sender->posted - sender->acknowledged;
    uint64_t wake_at = outstanding ? sender->acknowledged + (outstanding + 1) / 2 : 0;
    if (sender->socket < 0) return true;
    __atomic_store_n(&sender->ring->sender.wake_at, wake_at, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return !outstanding || __atomic_load_n(&sender->ring->receiver.done, __ATOMIC_ACQUIRE) < wake_at;
}

static void kf_complete_next(kf_engine *engine, kf_endpoint *endpoint, const kf_error *error, int64_t now) {
    kf_local_sender *sender = endpoint->sender;
    kf_operation *operation = sender->sent[sender->acknowledged++ % sender->slots];
    kf_completed(engine, &endpoint->ports[0], operation, error, now);
}

/* The receiver reads no more: its socket is closed, by a fence, a refusal or its end. */
static void kf_receiver_gone(kf_engine *engine, kf_endpoint *endpoint, int code, int64_t now) {
    kf_local_sender *sender = endpoint->sender;
    close(sender->socket);
    sender->socket = -1;
    uint32_t refused = __atomic_load_n(&sender->ring->receiver.refused, __ATOMIC_ACQUIRE) & INT32_MAX;
    kf_error error;
    kf_set_error(&error, "same-host write", refused ? (int)refused : code);
    if (refused) snprintf(error.provider, sizeof error.provider, "the receiver refused a descriptor and all behind it");
    while (sender->acknowledged < sender->posted) kf_complete_next(engine, endpoint, &error, now);
    kf_fail_endpoint(engine, endpoint, &error);
}

/* Ends what was copied. */
bool kf_drain_sender(kf_engine *engine, kf_endpoint *endpoint, int64_t now) {
    kf_local_sender *sender = endpoint->sender;
    if (sender->socket < 0) return false;
    uint64_t done = __atomic_load_n(&sender->ring->receiver.done, __ATOMIC_ACQUIRE);
    if (done - sender->acknowledged > sender->posted - sender->acknowledged) {
        kf_receiver_gone(engine, endpoint, EPROTO, now);
        return true;
    }
    bool any = sender->acknowledged < done;
    if (any) now = kf_now(); /* they may have been posted, and copied, since this turn began */
    while (sender->acknowledged < done) kf_complete_next(engine, endpoint, NULL, now);
    return any;
}

/* Reads the socket: it was woken, or the receiver has closed its end. */
void kf_look_at_receiver(kf_engine *engine, kf_endpoint *endpoint, int64_t now) {
    kf_packet packet;
    int file = -1, rc = 0;
    for (int i = 0; i < KF_LOOKS && endpoint->sender->socket >= 0 && !rc; i++) {
        rc = kf_receive_packet(endpoint->sender->socket, &packet, &file);
        if (!rc && file >= 0) close(file);
    }
    if (!rc || rc == -EAGAIN || rc == -EINTR) return;
    kf_drain_sender(engine, endpoint, now); /* what was copied until then */
    if (endpoint->sender->socket >= 0) kf_receiver_gone(engine, endpoint, -rc, now);
}

/* What is still read from our memory does not count, once this returned. */
void kf_close_local_sender(kf_endpoint *endpoint) {
    kf_local_sender *sender = endpoint->sender;
    endpoint->sender = NULL;
    if (!sender) return;
    if (sender->ring) __atomic_store_n(&sender->ring->sender.closed, 1, __ATOMIC_SEQ_CST);
    if (sender->socket >= 0) close(sender->socket);
    kf_unmap(&sender->ring_map);
    free(sender->sent);
    free(sender->offered);
    free(sender);
}
