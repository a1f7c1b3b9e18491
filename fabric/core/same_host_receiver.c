/* The receiving side of the same-host path: checks descriptors, copies, counts. To close it is the fence. */
#define _GNU_SOURCE
#include "same_host.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define KF_TURN_WRITES 64       /* taken before the next endpoint has its turn */
#define KF_TURN_BYTES (1 << 20) /* copied before that; a larger write takes several turns */

int kf_open_local_receiver(kf_engine *engine, kf_endpoint *endpoint, kf_error *error) {
    kf_local_receiver *receiver = endpoint->receiver = calloc(1, sizeof *receiver);
    if (!receiver) return kf_set_error(error, "calloc", ENOMEM), -ENOMEM;
    receiver->socket = -1;
    receiver->listener = kf_listen_locally(receiver->name, sizeof receiver->name);
    if (receiver->listener < 0) return kf_set_error(error, "bind", receiver->listener), receiver->listener;
    return kf_watch_fd(engine, receiver->listener, error);
}

static void kf_close_fd(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* From here on nothing is read. The ring is unmapped last: its sender sees first why. */
static void kf_stop_reading(kf_local_receiver *receiver) {
    for (size_t i = 0; i < receiver->region_count; i++) kf_unmap(&receiver->regions[i]);
    receiver->region_count = 0;
    receiver->ring = NULL;
    kf_close_fd(&receiver->listener);
    kf_close_fd(&receiver->socket);
    kf_unmap(&receiver->ring_map);
}

static void kf_fail_receiver(kf_engine *engine, kf_endpoint *landing, int code, const char *why) {
    kf_local_receiver *receiver = landing->receiver;
    if (receiver->ring) __atomic_store_n(&receiver->ring->receiver.refused, (uint32_t)code, __ATOMIC_RELEASE);
    kf_stop_reading(receiver);
    kf_error error;
    kf_set_error(&error, "same-host read", code);
    snprintf(error.provider, sizeof error.provider, "%s", why);
    kf_fail_endpoint(engine, landing, &error);
}

static int kf_take_ring(kf_local_receiver *receiver, const kf_packet *offer, int file) {
    uint64_t slots = offer->length;
    if (receiver->ring || !slots || slots > KF_RING_SLOTS_MAX || slots & (slots - 1)) return -EPROTO;
    kf_packet whole = {.length = kf_ring_bytes(slots)};
    int rc = kf_map_sealed(file, &whole, PROT_READ | PROT_WRITE, &receiver->ring_map);
    if (rc) return rc;
    receiver->ring = (kf_ring *)receiver->ring_map.base;
    receiver->slots = slots;
    return 0;
}

static int kf_take_region(kf_local_receiver *receiver, const kf_packet *offer, int file) {
    if (receiver->region_count == KF_OFFERED_REGIONS_MAX) return -EPROTO;
    kf_mapping *regions = realloc(receiver->regions, (receiver->region_count + 1) * sizeof *regions);
    if (!regions) return -ENOMEM;
    receiver->regions = regions;
    int rc = kf_map_sealed(file, offer, PROT_READ, &regions[receiver->region_count]);
    if (!rc) receiver->region_count++;
    return rc;
}

static int kf_take_offer(kf_local_receiver *receiver, const kf_packet *packet, int file) {
    if (packet->kind == KF_WAKE) return 0;
    if (file < 0) return -EPROTO;
    if (packet->kind == KF_OFFER_RING) return kf_take_ring(receiver, packet, file);
    return packet->kind == KF_OFFER_REGION ? kf_take_region(receiver, packet, file) : -EPROTO;
}

/* One peer has this landing: who came first. */
static void kf_accept_sender(kf_engine *engine, kf_endpoint *landing) {
    kf_local_receiver *receiver = landing->receiver;
    int socket = kf_accept_locally(receiver->listener);
    if (socket < 0) return;
    kf_error error;
    receiver->socket = socket;
    receiver->joined = true;
    kf_close_fd(&receiver->listener);
    if (kf_watch_fd(engine, socket, &error)) kf_fail_receiver(engine, landing, error.code, "epoll_ctl");
}

/* Once what it had posted is copied: a peer that closed its endpoint did not fail, one that vanished did. */
static void kf_sender_gone(kf_engine *engine, kf_endpoint *landing) {
    kf_local_receiver *receiver = landing->receiver;
    receiver->gone = false;
    if (receiver->ring && __atomic_load_n(&receiver->ring->sender.closed, __ATOMIC_ACQUIRE))
        kf_stop_reading(receiver);
    else
        kf_fail_receiver(engine, landing, ECONNRESET, "the sender's process has ended");
}

/* Reads the sockets: a sender that connects, offers, wakes us, or is gone. */
void kf_look_at_sender(kf_engine *engine, kf_endpoint *landing) {
    kf_local_receiver *receiver = landing->receiver;
    if (receiver->listener >= 0) kf_accept_sender(engine, landing);
    for (int i = 0; i < KF_LOOKS && receiver->socket >= 0; i++) {
        kf_packet packet;
        int file = -1, rc = kf_receive_packet(receiver->socket, &packet, &file);
        if (rc == -EAGAIN || rc == -EINTR) return;
        if (rc == -ECONNRESET) {
            kf_close_fd(&receiver->socket);
            receiver->gone = true;
            return;
        }
        if (!rc) rc = kf_take_offer(receiver, &packet, file);
        if (file >= 0) close(file);
        if (!rc) continue;
        engine->cannot_map = true;
        kf_fail_receiver(engine, landing, -rc, "the sender offers what cannot be mapped");
    }
}

static const char *kf_find_source(const kf_local_receiver *receiver, const kf_descriptor *descriptor) {
    for (size_t i = 0; i < receiver->region_count; i++) {
        const kf_mapping *region = &receiver->regions[i];
        if (region->number != descriptor->source_region) continue;
        uint64_t offset = descriptor->source_offset;
        bool inside = offset <= region->length && descriptor->length <= region->length - offset;
        return inside ? region->base + offset : NULL;
    }
    return NULL;
}

static char *kf_find_target(const kf_engine *engine, const kf_descriptor *descriptor) {
    for (const kf_node *node = engine->regions.next; node != &engine->regions; node = node->next) {
        const kf_region *region = KF_OWNER(node, kf_region, link);
        uint64_t offset = descriptor->target - region->base; /* huge where the target is below */
        if (region->key != descriptor->target_key || region->device) continue;
        bool inside = offset <= region->length && descriptor->length <= region->length - offset;
        if (inside) return (char *)region->address + offset; /* else another's: keys are of a rail, and may recur */
    }
    return NULL;
}

/* Copies up to `room` bytes of the current descriptor; how many, or -1 where it was refused. */
static int64_t kf_copy(kf_engine *engine, kf_endpoint *landing, uint64_t room) {
    kf_local_receiver *receiver = landing->receiver;
    const kf_descriptor *current = &receiver->current;
    const char *source = kf_find_source(receiver, current);
    if (!source) { /* its region may have been offered just now */
        kf_look_at_sender(engine, landing);
        if (!receiver->ring) return -1;
        source = kf_find_source(receiver, current);
    }
    char *target = kf_find_target(engine, current);
    if (!source || !target) {
        kf_fail_receiver(engine, landing, source ? EACCES : EINVAL,
                         source ? "a descriptor leaves our registered memory" : "a descriptor leaves what was offered");
        return -1;
    }
    uint64_t left = current->length - receiver->copied, bytes = left < room ? left : room;
    memcpy(target + receiver->copied, source + receiver->copied, bytes);
    receiver->copied += bytes;
    return (int64_t)bytes;
}

/* Our own copy of the next descriptor: the sender may change its ring while we work. */
static bool kf_next_descriptor(kf_engine *engine, kf_endpoint *landing) {
    kf_local_receiver *receiver = landing->receiver;
    kf_ring *ring = receiver->ring;
    if (!ring || __atomic_load_n(&ring->sender.closed, __ATOMIC_ACQUIRE)) return false;
    if (receiver->copied) return true;
    uint64_t waiting = __atomic_load_n(&ring->sender.posted, __ATOMIC_ACQUIRE) - receiver->done;
    if (waiting > receiver->slots) {
        kf_fail_receiver(engine, landing, EPROTO, "the ring says that more was posted than it holds");
        return false;
    }
    if (waiting) receiver->current = ring->descriptors[receiver->done & (receiver->slots - 1)];
    return waiting != 0;
}

/* False if the sender has taken its memory back meanwhile: what was copied may be anything, and does not count. */
static bool kf_count_copied(kf_engine *engine, kf_endpoint *landing) {
    kf_local_receiver *receiver = landing->receiver;
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* what we read of its memory before what it says of it */
    if (__atomic_load_n(&receiver->ring->sender.closed, __ATOMIC_RELAXED)) return false;
    kf_count_immediate(engine, landing, receiver->current.immediate, kf_now());
    receiver->copied = 0;
    __atomic_store_n(&receiver->ring->receiver.done, ++receiver->done, __ATOMIC_RELEASE);
    return true;
}

static void kf_wake_sender(kf_local_receiver *receiver) {
    kf_ring *ring = receiver->ring;
    if (!ring || receiver->socket < 0) return;
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* what we did before what it says of itself: see kf_sender_may_sleep */
    uint64_t wake_at = __atomic_load_n(&ring->sender.wake_at, __ATOMIC_RELAXED);
    if (!wake_at || receiver->done < wake_at) return;
    if (!__atomic_exchange_n(&ring->sender.wake_at, 0, __ATOMIC_SEQ_CST)) return;
    kf_packet wake = {.kind = KF_WAKE};
    kf_send_packet(receiver->socket, &wake, -1); /* no room: enough is there to wake it. Closed: the next look tells */
}

/* One turn of copying; true if anything was. */
bool kf_drain_receiver(kf_engine *engine, kf_endpoint *landing) {
    kf_local_receiver *receiver = landing->receiver;
    uint64_t room = KF_TURN_BYTES;
    bool any = false;
    for (int i = 0; i < KF_TURN_WRITES && room && kf_next_descriptor(engine, landing); i++) {
        int64_t bytes = kf_copy(engine, landing, room);
        if (bytes < 0) return true;
        room -= (uint64_t)bytes;
        any = true;
        if (receiver->copied == receiver->current.length && !kf_count_copied(engine, landing)) break;
    }
    if (any) kf_wake_sender(receiver);
    if (!any && receiver->gone) kf_sender_gone(engine, landing);
    return any;
}

/* True if the sender will wake us. */
bool kf_receiver_may_sleep(kf_local_receiver *receiver) {
    kf_ring *ring = receiver->ring;
    if (!ring) return true;
    __atomic_store_n(&ring->receiver.sleeps, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    bool more = __atomic_load_n(&ring->sender.posted, __ATOMIC_ACQUIRE) != receiver->done;
    return !more || __atomic_load_n(&ring->sender.closed, __ATOMIC_RELAXED);
}

/* The fence. The copying is done by this thread, so none is under way. */
void kf_close_local_receiver(kf_endpoint *landing) {
    kf_local_receiver *receiver = landing->receiver;
    landing->receiver = NULL;
    if (!receiver) return;
    kf_stop_reading(receiver);
    free(receiver->regions);
    free(receiver);
}
