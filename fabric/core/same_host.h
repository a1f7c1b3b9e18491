/* The same-host path: what the two processes share.
 *
 * The sender offers, over a Unix socket, a ring of descriptors and read-only files of its memory. To post is to put a
 * descriptor into the ring; the receiver takes it, checks it against its own regions, copies the bytes itself, counts
 * the immediate and acknowledges by an index. A sender that has stopped, or is dead, writes nothing: to stop reading
 * is the fence.
 *
 *     sender:   descriptors[posted % slots] = ...; posted++          receiver:  copy, count, done++
 *               |<------------- slots ------------->|
 *      ... done | under way ... posted | free
 *
 * Nothing in the ring is trusted: each side keeps its own index, and checks the other's against it. The files are
 * sealed against shrinking, so that no mapping can be cut off under the reader.
 */
#ifndef KVFERRY_FABRIC_SAME_HOST_H
#define KVFERRY_FABRIC_SAME_HOST_H

#include "internal.h"

#define KF_RING_SLOTS_MAX 65536
#define KF_OFFERED_REGIONS_MAX 4096
#define KF_CACHE_LINE 64
#define KF_LOOKS 64 /* packets read by one look */

typedef struct {
    uint64_t source_region; /* as offered */
    uint64_t source_offset;
    uint64_t target_key;
    uint64_t target;
    uint64_t length;
    uint32_t immediate, unused[5];
} kf_descriptor;

typedef struct {
    struct {
        _Alignas(KF_CACHE_LINE) uint64_t posted;
        uint64_t wake_at; /* the sender sleeps until `done` is that far; 0: it does not sleep */
        uint32_t closed;  /* it takes its memory back: what is read from now on does not count */
    } sender;
    struct {
        _Alignas(KF_CACHE_LINE) uint64_t done;
        uint32_t refused; /* why the descriptor at `done` was, and all behind it: a positive errno value */
        uint32_t sleeps;  /* it wants to be woken; whoever wakes it sets 0 */
    } receiver;
    _Alignas(KF_CACHE_LINE) kf_descriptor descriptors[];
} kf_ring;

enum kf_packet_kind { KF_OFFER_RING = 1, KF_OFFER_REGION, KF_WAKE };

/* An offer comes with one descriptor. Ring: `length` slots. Region: `length` bytes from `offset` of the file, which
 * descriptors call `number`. */
typedef struct {
    uint64_t kind, number, offset, length;
} kf_packet;

/* Part of a file, mapped; `base` is the byte at the offset that was asked for. */
typedef struct {
    uint64_t number, length;
    char *base;
    void *map;
    size_t map_bytes;
} kf_mapping;

struct kf_local_sender {
    int socket; /* -1: the receiver has closed it */
    kf_mapping ring_map;
    kf_ring *ring;
    uint64_t slots, posted, acknowledged, rung; /* rung: what the receiver was told of */
    kf_operation **sent;                        /* by slot */
    uint64_t *offered;                          /* numbers of regions */
    size_t offered_count;
};

struct kf_local_receiver {
    char name[KF_SAME_HOST_NAME];
    int listener, socket; /* -1: closed */
    kf_mapping ring_map;
    kf_ring *ring; /* NULL: nothing was offered yet, or it is over */
    uint64_t slots, done, copied;
    kf_descriptor current; /* the one at `done`, once `copied` of it is not 0 */
    kf_mapping *regions;
    size_t region_count;
    bool joined; /* a sender has connected, now or before */
    bool gone;   /* its socket is closed, which has not been dealt with */
};

static inline size_t kf_ring_bytes(uint64_t slots) { return sizeof(kf_ring) + slots * sizeof(kf_descriptor); }

/* same_host_socket.c: each returns 0 or more, or a negative errno value */
int kf_listen_locally(char *name, size_t size);
int kf_dial_locally(const char *name, size_t size);
int kf_accept_locally(int listener);
int kf_send_packet(int socket, const kf_packet *packet, int file);
int kf_receive_packet(int socket, kf_packet *packet, int *file);

/* same_host_memory.c */
int kf_create_ring(uint64_t slots, kf_mapping *mapping);
int kf_map_sealed(int file, const kf_packet *offer, int protection, kf_mapping *mapping);
void kf_unmap(kf_mapping *mapping);

#endif
