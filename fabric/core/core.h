/* The C core as Python sees it: flat records and opaque handles. cffi reads this file too (lines that start
 * with '#' are dropped), so it holds plain declarations only.
 *
 * Thread rule: one thread makes every call of an engine; only kf_wake may come from any thread. Between its calls a
 * thread of our own goes on (relay.c); events wait for kf_progress.
 */
#ifndef KVFERRY_FABRIC_CORE_H
#define KVFERRY_FABRIC_CORE_H
#include <stdint.h>
#include <stddef.h>

#define KF_SAME_HOST_NAME 48
enum { KF_MAX_RAILS = 32 };

typedef struct kf_engine kf_engine;
typedef struct kf_region kf_region;
typedef struct kf_endpoint kf_endpoint;
typedef struct kf_batch kf_batch;

typedef struct {
    int32_t code;      /* positive errno or FI_E... value; 0 where there is none */
    char call[40];     /* the libfabric call that failed */
    char text[96];     /* the library's words for the code */
    char provider[160]; /* the provider's own words, or empty */
} kf_error;

typedef struct {
    const char *node;   /* interface address to bind to */
    const char *domain; /* NIC, by the beginning of libfabric's name of its domain; NULL: whichever has `node` */
} kf_rail_name;

typedef struct {
    const char *provider; /* exactly as libfabric spells it; NULL: none, peers are reached on this host alone */
    const kf_rail_name *rails;
    uint32_t rail_count;   /* 1 to KF_MAX_RAILS; 0 without a provider */
    uint32_t endpoint_cap; /* writes outstanding on one rail of an endpoint */
    uint32_t domain_cap;   /* writes outstanding in all, times rails; each may always have its equal share of them */
    int32_t device_memory; /* not 0: only providers that also take memory of CUDA devices */
    int64_t connect_timeout_ns; /* an endpoint that cannot post for this long, with nothing outstanding, failed */
} kf_options;

typedef struct {
    uint64_t address, length;
    uint64_t key; /* that we ask for; the provider may choose its own */
    int32_t cuda_device; /* ordinal; -1: the host's memory */
    int32_t file; /* memfd that the memory is a shared mapping of, from `file_offset` on; -1: none */
    uint64_t file_offset;
    uint32_t rails; /* those that shall reach it: bit r for rail r */
} kf_memory;

/* A way for writes: from our rail to the peer's. */
typedef struct {
    uint32_t rail, remote;
    uint64_t key; /* of the target's memory on the peer's rail */
} kf_lane;

typedef struct {
    uint64_t source; /* address of index 0, offset included */
    uint64_t source_stride;
    const uint64_t *source_indices;
    kf_region *source_region;
    uint64_t target; /* the same on the peer's side, counted from the region's base */
    uint64_t target_stride;
    const uint64_t *target_indices;
    const kf_lane *lanes; /* each next write takes the next lane that can take it; the region is known on all */
    uint32_t lane_count;
    uint64_t count;
    uint64_t length;
    uint32_t immediate;
} kf_writes;

/* An immediate, some of whose writes are in doubt on a rail that was lost. */
typedef struct {
    uint32_t immediate;
    int32_t again;     /* the receiver's answer: not 0: they did not make it whole, and are to be posted again */
    int64_t completed; /* of its writes on that rail those that have completed for the sender */
} kf_doubt;

enum kf_kind {
    KF_WRITES_FAILED = 1,
    KF_WRITES_ENDED,
    KF_ARRIVED,
    KF_OVER_COUNTED,
    KF_ENDPOINT_FAILED,
    KF_RAIL_IN_DOUBT
};

typedef struct {
    int32_t kind;
    int32_t cancelled;
    int64_t id;    /* handle of the batch or expectation, or id of the endpoint */
    int64_t count; /* writes posted, or immediates counted, or the rail that failed (-1: none alone) */
    int64_t completed; /* writes; of a rail in doubt, the peer's rails that it wrote to, a bit for each */
    int64_t bytes;
    int64_t first_ns;
    int64_t last_ns;
    int64_t completed_ns;
    kf_error error; /* code 0: none */
} kf_event;

typedef struct {
    int64_t writes_posted, writes_completed, writes_failed, bytes_posted;
    int64_t immediates_counted, stale_immediates, over_counts, post_retries, rails_lost;
    int64_t outstanding, armed, expectations, endpoints, regions;
    int64_t sleeps; /* times that kf_progress went to sleep */
} kf_counters;

/* provider.c */
uint32_t kf_libfabric_version(void);
int kf_providers(const char *node, char *names, size_t size);
kf_engine *kf_open(const kf_options *options, kf_error *error);
int kf_delivery_complete(const kf_engine *engine);
int kf_closes_dead_only(const kf_engine *engine);
int kf_close(kf_engine *engine, kf_error *error);
int kf_takes_device_memory(const kf_engine *engine);
kf_region *kf_register(kf_engine *engine, const kf_memory *memory, kf_error *error);
int kf_region_is_shared(const kf_region *region); /* peers on this host can be given it to read */
int kf_region_is_dmabuf(const kf_region *region);
uint64_t kf_region_key(const kf_region *region, uint32_t rail);
uint64_t kf_region_base(const kf_region *region);
void kf_deregister(kf_engine *engine, kf_region *region);

/* endpoint.c */
kf_endpoint *kf_open_landing(kf_engine *engine, int64_t id, int same_host, kf_error *error);
kf_endpoint *kf_connect(kf_engine *engine, int64_t id, const void *address, size_t size, uint32_t without,
                        int asks_peer, kf_error *error);
kf_endpoint *kf_connect_same_host(kf_engine *engine, int64_t id, const char *name, size_t size, kf_error *error);
kf_endpoint *kf_connect_failed(kf_engine *engine, int64_t id, const kf_error *why, kf_error *error);
const char *kf_same_host_name(const kf_endpoint *landing);
int kf_is_same_host(const kf_endpoint *endpoint);
int kf_endpoint_address(kf_endpoint *endpoint, void *address, size_t *size, kf_error *error);
int kf_close_endpoint(kf_engine *engine, kf_endpoint *endpoint, kf_error *error);

/* doubt.c */
uint32_t kf_read_doubts(kf_engine *engine, const kf_endpoint *endpoint, uint32_t rail, kf_doubt *doubts,
                        uint32_t capacity);
void kf_settle_rail(kf_engine *engine, kf_endpoint *endpoint, uint32_t rail, const uint32_t *again, uint32_t count);
int kf_fence_rails(kf_engine *engine, kf_endpoint *landing, uint32_t rails, kf_doubt *doubts, uint32_t count,
                   kf_error *error);

/* batch.c */
kf_batch *kf_write(kf_engine *engine, kf_endpoint *endpoint, int64_t handle, const kf_writes *writes,
                   uint64_t word_address, uint64_t threshold);
void kf_cancel(kf_engine *engine, kf_batch *batch, int64_t *posted, int64_t *completed);

/* immediates.c */
int kf_expect(kf_engine *engine, kf_endpoint *landing, int64_t handle, uint32_t immediate, int64_t count);
void kf_revise(kf_engine *engine, uint32_t slot, int64_t count);
int64_t kf_counted(const kf_engine *engine, uint32_t slot);
void kf_forget(kf_engine *engine, const uint32_t *slots, int count);

/* progress.c */
int kf_progress(kf_engine *engine, int64_t timeout_ns, kf_event *events, int capacity);
void kf_wake(kf_engine *engine);
int64_t kf_rail_posted(const kf_engine *engine, uint32_t rail);
void kf_read_counters(const kf_engine *engine, kf_counters *counters);

#endif
