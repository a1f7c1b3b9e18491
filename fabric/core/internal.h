/* Records shared by the files of the C core. Read this first.
 *
 * A batch waits in exactly one place: a word's armed list, its endpoint's queue, or nowhere (all of it posted or
 * stopped, only completions are awaited). What Python must be told is a flag on the object, and the object is put
 * on one of the engine's `ready_*` lists: events can be delayed by a full array but never lost.
 */
#ifndef KVFERRY_FABRIC_INTERNAL_H
#define KVFERRY_FABRIC_INTERNAL_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "core.h"

#define KF_SLOTS 4096
#define KF_GENERATION_BITS 20
#define KF_GENERATION_MASK ((1u << KF_GENERATION_BITS) - 1)

/* Circular doubly linked list; a head is a node that links to itself when empty. */
typedef struct kf_node {
    struct kf_node *prev, *next;
} kf_node;

#define KF_OWNER(node, type, member) ((type *)((char *)(node) - offsetof(type, member)))

static inline void kf_node_init(kf_node *node) { node->prev = node->next = node; }
static inline bool kf_linked(const kf_node *node) { return node->next != node; }
static inline void kf_insert_after(kf_node *place, kf_node *node) {
    node->prev = place;
    node->next = place->next;
    place->next->prev = node;
    place->next = node;
}
static inline void kf_append(kf_node *head, kf_node *node) { kf_insert_after(head->prev, node); }
static inline void kf_unlink(kf_node *node) {
    node->prev->next = node->next;
    node->next->prev = node->prev;
    kf_node_init(node);
}
static inline void kf_mark_ready(kf_node *head, kf_node *node) {
    if (!kf_linked(node)) kf_append(head, node);
}

/* One write in flight. `context` comes first: the provider gets it as the operation's context and may use it. */
typedef struct kf_operation {
    struct fi_context2 context;
    kf_batch *batch; /* NULL: not in flight */
    uint64_t write;  /* which of the batch it is, or was */
    uint64_t number; /* of the port's writes */
    bool acknowledged; /* its completion is the peer's word that it was delivered */
    struct kf_operation *next; /* that is free, or held, or whose write is to be posted again */
} kf_operation;

/* One posted receive, where the provider consumes one per immediate; its context comes first too. */
typedef struct kf_receive {
    struct fi_context2 context;
    struct kf_receive *next_idle;
} kf_receive;

/* One NIC, or one interface: a domain of its own. */
typedef struct {
    kf_rail_name name;
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_wait *wait_set; /* NULL: each completion queue has its own descriptor */
    int64_t posted;            /* writes */
} kf_rail;

typedef struct kf_local_sender kf_local_sender;
typedef struct kf_local_receiver kf_local_receiver;

struct kf_region {
    struct fid_mr *mrs[KF_MAX_RAILS]; /* NULL: that rail does not reach it */
    uint64_t number, address, length;
    uint64_t key; /* on the first rail that reaches it: the one that peers on this host use */
    uint64_t base; /* what a peer adds its offsets to */
    bool device, dmabuf;
    int file; /* for peers on this host to read from; -1: none */
    uint64_t file_offset;
    kf_node link;
};

/* Writes with one immediate over one port: completed on a sending one, counted on a landing's. */
typedef struct {
    uint32_t generation, count;
} kf_tally;

/* What an endpoint has on one rail; one that writes to this host has one without a rail. */
typedef struct kf_port {
    struct fid_ep *ep;
    kf_endpoint *endpoint;
    kf_rail *rail;
    struct fid_cq *cq;
    struct fid_av *av;
    fi_addr_t *peers; /* by the peer's rail; FI_ADDR_NOTAVAIL: not used yet */
    uint32_t remotes; /* the peer's rails that it has written to, a bit for each */
    bool was_connected, lost; /* lost: failed, while the endpoint goes on with its others; or never to be used */
    bool doubt;       /* lost with writes on their way, of which the peer has not told yet what became */
    int close_failed; /* the negative FI_E... value of fi_close: it is neither closed nor used */
    kf_error error;   /* why it is lost */
    kf_node ready;    /* engine->ready_ports */
    kf_tally *tallies; /* by slot; NULL: it is the endpoint's only port */
    kf_operation *operations, *free_operations;
    kf_operation *held;           /* handed over, and not known to be delivered */
    uint64_t numbered, delivered; /* writes posted; the last one that the peer has acknowledged */
    uint32_t outstanding;
    int64_t retry_at, backoff, blocked_since; /* after FI_EAGAIN; 0: not blocked, or nothing is left to post */
    kf_receive *receives, *idle_receives; /* idle: consumed, or not posted yet */
} kf_port;

/* It writes, or is written to, by way of the provider or of memory that both processes map. A landing waits for its
 * peer on both ways. */
struct kf_endpoint {
    int64_t id;
    kf_port *ports; /* by rail */
    uint32_t port_count;
    kf_local_sender *sender;     /* NULL: by way of the provider */
    kf_local_receiver *receiver; /* NULL: by way of the provider alone */
    bool landing, failed, asks_peer;
    int32_t failed_rail; /* whose failure it was; -1: none's alone */
    uint32_t lost_remotes; /* the peer's rails that it will not take writes on any more, a bit for each */
    kf_error error;
    kf_node link;    /* engine->endpoints */
    kf_node ready;   /* engine->ready_endpoints */
    kf_node batches; /* every batch of this endpoint that has not ended */
    kf_node queue;   /* batches with writes to post now, in order */
    uint32_t outstanding, held; /* held: of those outstanding, see acknowledging.c; those in doubt count as well */
    uint32_t turn; /* whose turn it is: counts the writes, over all batches */
    unsigned char *address; /* of the peer's landing: one on each of its rails, one after the other */
    uint32_t address_count;
};

/* Batches armed on one u64 in memory, by ascending threshold. */
typedef struct kf_word {
    const uint64_t *address;
    kf_node link;
    kf_node armed;
    int64_t waiting_since_ns; /* it fired last, or was armed while nothing waited for it */
    uint64_t fired;           /* its value then; 0: not yet since it was armed so */
    int64_t beat_ns;          /* between two moves, lately; 0: not known */
} kf_word;

typedef struct {
    kf_lane lane;
    void *source_desc;
} kf_way;

typedef struct {
    uint64_t source, target;
} kf_write_pair;

struct kf_batch {
    int64_t handle;
    kf_endpoint *endpoint; /* NULL once that endpoint was closed */
    kf_word *word;         /* NULL once fired, stopped, or never armed */
    uint64_t threshold;
    kf_node place;         /* the word's armed list or the endpoint's queue */
    kf_node of_endpoint;
    kf_node ready;
    kf_way *ways;
    uint32_t way_count, immediate;
    uint64_t source_number, source_base; /* of its region */
    uint64_t length, count, posted, completed, outstanding;
    uint64_t doubtful; /* of those outstanding, on ports in doubt */
    kf_operation *again; /* writes that were taken back (`posted` is without them); by `next` */
    bool stopped, cancelled, failed, failure_reported, ended;
    int64_t first_posted_ns, last_posted_ns, completed_ns;
    kf_error error;
    kf_write_pair writes[];
};

typedef struct {
    kf_endpoint *landing; /* NULL: not armed */
    int64_t handle, count, expected, first_ns, last_ns;
    uint32_t generation;
    bool arrived, over, over_reported;
    kf_node ready;
} kf_slot;

struct kf_engine {
    kf_options options; /* its names belong to the engine */
    kf_rail rails[KF_MAX_RAILS];
    size_t address_size; /* of a port */
    bool delivery_complete;
    bool in_order; /* each write is delivered before those that are posted behind it on its endpoint */
    bool without_descriptors;  /* no descriptor tells of completions: look between naps */
    int epoll_fd, event_fd;
    int woken; /* atomic */
    kf_node regions, endpoints, words;
    kf_node ready_slots, ready_ports, ready_endpoints, ready_batches;
    kf_slot slots[KF_SLOTS];
    kf_counters counters;
    int64_t share; /* that each endpoint may have outstanding, as of the last posting */
    uint64_t regions_made;
    bool cannot_map;   /* what a peer on this host offered: later ones come by way of the provider */
    bool look;         /* a descriptor was readable: it may be a socket of a peer on this host */
    int64_t looked_ns; /* when all of those were read */
    int64_t last_active_ns; /* last posting or completion: sets whether to spin */

    pthread_mutex_t lock; /* of all of this, but `woken` and `entering` */
    pthread_cond_t left;  /* signalled when `away` becomes true */
    pthread_t relay;
    int entering; /* atomic: callers from Python that wait for the lock */
    int depth;    /* of calls from Python within each other */
    bool has_relay, away, closing; /* away: nobody from Python is in here, and there is something to do */
};

int64_t kf_now(void);

/* relay.c: what is called from Python begins with KF_GUARD, and has the engine to itself until it returns. */
void kf_open_relay(kf_engine *engine);
void kf_stop_relay(kf_engine *engine);
void kf_close_relay(kf_engine *engine);
kf_engine *kf_enter(const kf_engine *engine);
void kf_leave(kf_engine **guarded);
#define KF_GUARD(engine) __attribute__((cleanup(kf_leave), unused)) kf_engine *kf_guarded = kf_enter(engine)

/* progress.c */
void kf_set_timer_slack(void);
int64_t kf_turn(kf_engine *engine);

/* provider.c */
void kf_set_error(kf_error *error, const char *call, int code);
int kf_watch_fd(const kf_engine *engine, int fd, kf_error *error);
int kf_watch(kf_engine *engine, struct fid *fid, kf_error *error);
size_t kf_cq_size(const kf_engine *engine, bool landing);

/* device_memory.c */
int kf_register_device(const kf_rail *rail, const kf_memory *memory, uint64_t access, uint64_t key, bool *dmabuf,
                       struct fid_mr **mr);

/* endpoint.c */
void kf_fail_endpoint(kf_engine *engine, kf_endpoint *endpoint, const kf_error *error);
void kf_fail_port(kf_engine *engine, kf_port *port, const kf_error *error);
int kf_find_peer(const kf_engine *engine, kf_port *port, uint32_t remote, fi_addr_t *peer);
int kf_post_receives(kf_port *port);
void kf_receive_consumed(kf_port *port, void *context);

/* doubt.c */
bool kf_way_is_lost(const kf_endpoint *endpoint, const kf_way *way);
bool kf_has_no_way(const kf_endpoint *endpoint, const kf_batch *batch);
bool kf_enter_doubt(kf_engine *engine, kf_port *port, const kf_error *error);
void kf_leave_doubt(kf_engine *engine, kf_batch *batch);
void kf_begin_tally(kf_port *port, uint32_t immediate);
void kf_tally_one(kf_port *port, uint32_t immediate);

/* batch.c */
void kf_leave_queue(kf_batch *batch);
void kf_stop_batch(kf_engine *engine, kf_batch *batch);
void kf_fail_batch(kf_engine *engine, kf_batch *batch, const kf_error *error);
void kf_end_if_done(kf_engine *engine, kf_batch *batch);
void kf_free_batch(kf_batch *batch);

/* words.c */
bool kf_arm(kf_engine *engine, kf_batch *batch, uint64_t word_address);
void kf_disarm(kf_engine *engine, kf_batch *batch);
void kf_fire_words(kf_engine *engine, int64_t now);
int64_t kf_words_nap(const kf_engine *engine, int64_t now);
int64_t kf_growing_nap(int64_t waited_ns);
void kf_free_words(kf_engine *engine);

/* acknowledging.c */
uint64_t kf_promise(const kf_engine *engine, kf_port *port, const kf_batch *batch);
void kf_handed_over(kf_engine *engine, kf_port *port, kf_operation *operation, int64_t now);
bool kf_all_is_held(const kf_endpoint *endpoint);
void kf_release_held(kf_engine *engine, kf_batch *batch);

/* posting.c */
void kf_completed(kf_engine *engine, kf_port *port, kf_operation *operation, const kf_error *error, int64_t now);
kf_batch *kf_take_operation(kf_engine *engine, kf_port *port, kf_operation *operation);
void kf_drain_all_of(kf_engine *engine, kf_port *port);
bool kf_post_all(kf_engine *engine, int64_t now);
bool kf_drain(kf_engine *engine, kf_port *port, int64_t now);
bool kf_drain_all(kf_engine *engine, int64_t now);
int64_t kf_next_retry(const kf_engine *engine);

/* same_host_memory.c */
int kf_open_for_peers(int file);

/* same_host_sender.c */
int kf_open_local_sender(kf_engine *engine, kf_endpoint *endpoint, const char *name, size_t size, kf_error *error);
int kf_offer_region(kf_local_sender *sender, const kf_region *region, kf_error *error);
void kf_post_locally(kf_local_sender *sender, const kf_batch *batch, kf_operation *operation);
void kf_ring_receiver(kf_local_sender *sender);
bool kf_sender_may_sleep(kf_local_sender *sender);
bool kf_drain_sender(kf_engine *engine, kf_endpoint *endpoint, int64_t now);
void kf_look_at_receiver(kf_engine *engine, kf_endpoint *endpoint, int64_t now);
void kf_close_local_sender(kf_endpoint *endpoint);

/* same_host_receiver.c */
int kf_open_local_receiver(kf_engine *engine, kf_endpoint *landing, kf_error *error);
bool kf_drain_receiver(kf_engine *engine, kf_endpoint *landing);
void kf_look_at_sender(kf_engine *engine, kf_endpoint *landing);
bool kf_receiver_may_sleep(kf_local_receiver *receiver);
void kf_close_local_receiver(kf_endpoint *landing);

/* immediates.c */
bool kf_count_immediate(kf_engine *engine, kf_endpoint *landing, uint32_t immediate, int64_t now);
kf_slot *kf_live_slot(kf_engine *engine, const kf_endpoint *landing, uint32_t immediate);
void kf_drop_expectations(kf_engine *engine, kf_endpoint *landing);

#endif
