/* Finding a provider, opening its domain, and registering memory. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define KF_API_VERSION FI_VERSION(1, 15)
#ifdef FI_MR_DMABUF
#define KF_DEVICE_API_VERSION FI_VERSION(1, 20) /* the first with dmabuf */
#else
#define KF_DEVICE_API_VERSION KF_API_VERSION
#endif
#define KF_LANDING_CQ_SIZE 8192

void kf_set_error(kf_error *error, const char *call, int code) {
    memset(error, 0, sizeof *error);
    error->code = code < 0 ? -code : code;
    snprintf(error->call, sizeof error->call, "%s", call);
    snprintf(error->text, sizeof error->text, "%s", fi_strerror(error->code));
}

uint32_t kf_libfabric_version(void) { return fi_version(); }

size_t kf_cq_size(const kf_engine *engine, bool landing) {
    return landing ? KF_LANDING_CQ_SIZE : 2 * (size_t)engine->options.endpoint_cap + 8;
}

/* NICs are named by their device ("rdmap79s0"); libfabric adds what kind of endpoint it is ("rdmap79s0-rdm"). */
static bool kf_is_of_domain(const struct fi_info *info, const char *domain) {
    if (!domain) return true;
    size_t length = strlen(domain);
    const char *name = info->domain_attr->name;
    return !strncmp(name, domain, length) && (!name[length] || name[length] == '-');
}

static struct fi_info *kf_hints(const char *provider, bool delivery_complete, bool device_memory) {
    struct fi_info *hints = fi_allocinfo();
    if (!hints) return NULL;
    hints->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE | FI_SEND | FI_RECV;
    hints->mode = FI_CONTEXT | FI_CONTEXT2 | FI_RX_CQ_DATA;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->cq_data_size = 4;
    if (device_memory) {
        hints->caps |= FI_HMEM;
        hints->domain_attr->mr_mode |= FI_MR_HMEM;
    }
    if (delivery_complete) hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
    if (provider) hints->fabric_attr->prov_name = strdup(provider);
    return hints;
}

/* EFA addresses belong to the device; everything else binds to the interface that has `node`. */
static int kf_getinfo(const char *provider, const char *node, bool delivery_complete, bool device_memory,
                      struct fi_info **list) {
    struct fi_info *hints = kf_hints(provider, delivery_complete, device_memory);
    if (!hints) return -FI_ENOMEM;
    bool bind = !provider || strcmp(provider, "efa") != 0;
    uint32_t version = device_memory ? KF_DEVICE_API_VERSION : KF_API_VERSION;
    int rc = fi_getinfo(version, bind ? node : NULL, NULL, bind ? FI_SOURCE : 0, hints, list);
    fi_freeinfo(hints);
    return rc;
}

/* Writes the distinct usable provider names, one a line; returns their count, or a negative FI_E... value. */
int kf_providers(const char *node, char *names, size_t size) {
    struct fi_info *list = NULL;
    int rc = kf_getinfo(NULL, node, false, false, &list);
    if (rc) return rc;
    int found = 0;
    size_t used = 0;
    names[0] = '\0';
    for (struct fi_info *info = list; info; info = info->next) {
        char line[80];
        int length = snprintf(line, sizeof line, "%s\n", info->fabric_attr->prov_name);
        if (strstr(names, line) || used + (size_t)length + 1 > size) continue;
        memcpy(names + used, line, (size_t)length + 1);
        used += (size_t)length;
        found++;
    }
    fi_freeinfo(list);
    return found;
}

/* The first fi_info of exactly this provider: asking for "tcp" also yields layers above it. */
static int kf_choose(kf_engine *engine, kf_rail *rail, bool delivery_complete) {
    struct fi_info *list = NULL;
    const kf_options *options = &engine->options;
    int rc = kf_getinfo(options->provider, rail->name.node, delivery_complete, options->device_memory, &list);
    if (rc) return rc;
    for (struct fi_info *info = list; info && !rail->info; info = info->next)
        if (!strcmp(info->fabric_attr->prov_name, options->provider) && kf_is_of_domain(info, rail->name.domain))
            rail->info = fi_dupinfo(info);
    fi_freeinfo(list);
    return rail->info ? 0 : -FI_ENODATA;
}

/* All rails promise the same of a completed write. */
static int kf_choose_all(kf_engine *engine, bool delivery_complete) {
    engine->delivery_complete = delivery_complete;
    for (uint32_t i = 0; i < engine->options.rail_count; i++) {
        if (engine->rails[i].info) fi_freeinfo(engine->rails[i].info);
        engine->rails[i].info = NULL;
        int rc = kf_choose(engine, &engine->rails[i], delivery_complete);
        if (rc) return rc;
    }
    const struct fi_tx_attr *sends = engine->rails[0].info->tx_attr;
    engine->in_order = delivery_complete && engine->options.rail_count == 1 && sends->msg_order & FI_ORDER_RMA_WAW;
    return 0;
}

/* Adds a descriptor to what kf_progress sleeps on. */
int kf_watch_fd(const kf_engine *engine, int fd, kf_error *error) {
    struct epoll_event event = {.events = EPOLLIN};
    if (epoll_ctl(engine->epoll_fd, EPOLL_CTL_ADD, fd, &event)) return kf_set_error(error, "epoll_ctl", errno), -1;
    return 0;
}

/* The same for the wait descriptor of a queue or a wait set. */
int kf_watch(kf_engine *engine, struct fid *fid, kf_error *error) {
    int fd = -1, rc = fi_control(fid, FI_GETWAIT, &fd);
    if (rc) return kf_set_error(error, "fi_control(FI_GETWAIT)", rc), rc;
    return kf_watch_fd(engine, fd, error);
}

/* In `net` (and `tcp`, its successor) fi_trywait does not reset a queue's descriptor after a completion: it stays
 * readable and we would spin (1.17). A wait set does reset it, in fi_wait. */
static int kf_open_wait_set(kf_engine *engine, kf_rail *rail, kf_error *error) {
    const char *provider = engine->options.provider;
    if (strcmp(provider, "net") && strcmp(provider, "tcp")) return 0;
    struct fi_wait_attr attr = {.wait_obj = FI_WAIT_FD};
    if (fi_wait_open(rail->fabric, &attr, &rail->wait_set)) return rail->wait_set = NULL, 0;
    return kf_watch(engine, &rail->wait_set->fid, error);
}

static int kf_open_rail(kf_engine *engine, kf_rail *rail, kf_error *error) {
    int rc = fi_fabric(rail->info->fabric_attr, &rail->fabric, NULL);
    if (rc) return kf_set_error(error, "fi_fabric", rc), rc;
    rc = fi_domain(rail->fabric, rail->info, &rail->domain, NULL);
    if (rc) return kf_set_error(error, "fi_domain", rc), rc;
    return kf_open_wait_set(engine, rail, error);
}

static int kf_open_rails(kf_engine *engine, kf_error *error) {
    int rc = kf_choose_all(engine, true);
    if (rc) rc = kf_choose_all(engine, false);
    if (rc) return kf_set_error(error, engine->options.device_memory ? "fi_getinfo(FI_HMEM)" : "fi_getinfo", rc), rc;
    for (uint32_t i = 0; i < engine->options.rail_count && !rc; i++)
        rc = kf_open_rail(engine, &engine->rails[i], error);
    return rc;
}

static int kf_open_wait(kf_engine *engine, kf_error *error) {
    engine->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (engine->epoll_fd < 0) return kf_set_error(error, "epoll_create1", errno), -1;
    engine->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->event_fd < 0) return kf_set_error(error, "eventfd", errno), -1;
    return kf_watch_fd(engine, engine->event_fd, error);
}

/* A provider is usable if an endpoint opens: an address that is not ours is noticed only there. */
static int kf_try_endpoint(kf_engine *engine, kf_error *error) {
    kf_endpoint *endpoint = kf_open_landing(engine, 0, false, error);
    if (!endpoint) return -1;
    char address[256 * KF_MAX_RAILS];
    size_t size = sizeof address;
    int rc = kf_endpoint_address(endpoint, address, &size, error);
    engine->address_size = size / engine->options.rail_count;
    int closed = kf_close_endpoint(engine, endpoint, error);
    return rc ? rc : closed;
}

kf_engine *kf_open(const kf_options *options, kf_error *error) {
    kf_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return kf_set_error(error, "calloc", ENOMEM), NULL;
    engine->options = *options;
    engine->options.provider = options->provider ? strdup(options->provider) : NULL;
    for (uint32_t i = 0; i < options->rail_count; i++) {
        const kf_rail_name *name = &options->rails[i];
        engine->rails[i].name.node = strdup(name->node);
        engine->rails[i].name.domain = name->domain ? strdup(name->domain) : NULL;
    }
    engine->epoll_fd = engine->event_fd = -1;
    kf_open_relay(engine);
    kf_node *heads[] = {&engine->regions,         &engine->endpoints,      &engine->words,        &engine->ready_slots,
                        &engine->ready_ports, &engine->ready_endpoints, &engine->ready_batches};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) kf_node_init(heads[i]);
    for (int i = 0; i < KF_SLOTS; i++) kf_node_init(&engine->slots[i].ready);
    engine->delivery_complete = true; /* the same-host path has it */
    int failed = kf_open_wait(engine, error);
    if (!failed && options->provider) failed = kf_open_rails(engine, error) || kf_try_endpoint(engine, error);
    if (failed) {
        kf_error ignored; /* the first one says why it does not open */
        kf_close(engine, &ignored);
        return NULL;
    }
    return engine;
}

int kf_delivery_complete(const kf_engine *engine) { return engine->delivery_complete; }

/* Whether a landing may be closed only once its peer's process is dead. ofi_rxm closes a connection's endpoint first
 * and then works through what its queue still holds for it, over whatever provider it is layered (to 2.4 at least):
 * measured as a crash with tcp;ofi_rxm of 1.17, so none of them is trusted with it. */
int kf_closes_dead_only(const kf_engine *engine) {
    const char *provider = engine->options.provider;
    return provider && strstr(provider, ";ofi_rxm") != NULL;
}

static void kf_close_rail(kf_rail *rail) {
    if (rail->wait_set) fi_close(&rail->wait_set->fid);
    if (rail->domain) fi_close(&rail->domain->fid);
    if (rail->fabric) fi_close(&rail->fabric->fid);
    if (rail->info) fi_freeinfo(rail->info);
    free((void *)rail->name.node);
    free((void *)rail->name.domain);
}

/* Endpoints first, then what they stand on. Batches whose events were never read are freed here. Returns 0, or not 0
 * where an endpoint could not be closed; all else is closed then, as far as the provider lets it. */
int kf_close(kf_engine *engine, kf_error *error) {
    kf_stop_relay(engine);
    int failed = 0;
    while (kf_linked(&engine->endpoints))
        failed |= kf_close_endpoint(engine, KF_OWNER(engine->endpoints.next, kf_endpoint, link), error);
    while (kf_linked(&engine->ready_batches))
        kf_free_batch(KF_OWNER(engine->ready_batches.next, kf_batch, ready));
    kf_free_words(engine);
    while (kf_linked(&engine->regions)) kf_deregister(engine, KF_OWNER(engine->regions.next, kf_region, link));
    for (uint32_t i = 0; i < engine->options.rail_count; i++) kf_close_rail(&engine->rails[i]);
    if (engine->event_fd >= 0) close(engine->event_fd);
    if (engine->epoll_fd >= 0) close(engine->epoll_fd);
    kf_close_relay(engine);
    free((void *)engine->options.provider);
    free(engine);
    return failed;
}

int kf_takes_device_memory(const kf_engine *engine) { return engine->options.device_memory != 0; }

/* Providers with FI_MR_PROV_KEY choose the key themselves, others may take fewer bytes of ours. */
static int kf_register_on(const kf_rail *rail, const kf_memory *memory, kf_region *region, struct fid_mr **mr) {
    const struct fi_domain_attr *domain = rail->info->domain_attr;
    uint64_t key = memory->key, access = FI_WRITE | FI_REMOTE_WRITE;
    if (domain->mr_key_size < 8) key &= (1ull << (8 * domain->mr_key_size)) - 1;
    region->base = domain->mr_mode & FI_MR_VIRT_ADDR ? memory->address : 0;
    if (region->device) return kf_register_device(rail, memory, access, key, &region->dmabuf, mr);
    return fi_mr_reg(rail->domain, (void *)memory->address, memory->length, access, 0, key, 0, mr, NULL);
}

/* On all of its rails. */
static int kf_register_with_provider(kf_engine *engine, const kf_memory *memory, kf_region *region, kf_error *error) {
    bool first = true;
    for (uint32_t i = 0; i < engine->options.rail_count; i++) {
        if (!(memory->rails >> i & 1)) continue;
        int rc = kf_register_on(&engine->rails[i], memory, region, &region->mrs[i]);
        if (rc) {
            region->mrs[i] = NULL; /* what lies there is not ours to close */
            return kf_set_error(error, region->device ? "fi_mr_regattr" : "fi_mr_reg", rc), rc;
        }
        if (first) region->key = fi_mr_key(region->mrs[i]);
        first = false;
    }
    return 0;
}

static void kf_free_region(kf_region *region) {
    for (int i = 0; i < KF_MAX_RAILS; i++)
        if (region->mrs[i]) fi_close(&region->mrs[i]->fid);
    if (region->file >= 0) close(region->file);
    free(region);
}

kf_region *kf_register(kf_engine *engine, const kf_memory *memory, kf_error *error) {
    KF_GUARD(engine);
    kf_region *region = malloc(sizeof *region);
    if (!region) return kf_set_error(error, "malloc", ENOMEM), NULL;
    *region = (kf_region){.number = ++engine->regions_made, .address = memory->address, .length = memory->length,
                          .key = memory->key, .device = memory->cuda_device >= 0, .file = -1,
                          .file_offset = memory->file_offset};
    if (memory->file >= 0) region->file = kf_open_for_peers(memory->file);
    if (kf_register_with_provider(engine, memory, region, error)) return kf_free_region(region), NULL;
    kf_append(&engine->regions, &region->link);
    engine->counters.regions++;
    return region;
}

int kf_region_is_shared(const kf_region *region) { return region->file >= 0; }
int kf_region_is_dmabuf(const kf_region *region) { return region->dmabuf; }
uint64_t kf_region_key(const kf_region *region, uint32_t rail) {
    return region->mrs[rail] ? fi_mr_key(region->mrs[rail]) : region->key;
}
uint64_t kf_region_base(const kf_region *region) { return region->base; }

void kf_deregister(kf_engine *engine, kf_region *region) {
    KF_GUARD(engine);
    kf_unlink(&region->link);
    kf_free_region(region);
    engine->counters.regions--;
}
