/* The loop that Python calls with the GIL released: fire, post, drain, report; then spin, nap or sleep. */
#define _GNU_SOURCE
#include "internal.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define KF_SPIN_NS 20000       /* after activity: the next completion is usually nearer than a wake-up */
#define KF_LOOK_NS 1000000     /* at most so late a busy loop notices that a peer on this host is gone */
#define KF_TIMER_SLACK_NS 1000 /* the default of 50 us would more than double a short nap */

int64_t kf_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

void kf_wake(kf_engine *engine) {
    if (!__atomic_exchange_n(&engine->woken, 1, __ATOMIC_ACQ_REL)) eventfd_write(engine->event_fd, 1);
}

/* Writes posted on one rail; those to this host are on none. */
int64_t kf_rail_posted(const kf_engine *engine, uint32_t rail) { return engine->rails[rail].posted; }

void kf_read_counters(const kf_engine *engine, kf_counters *counters) {
    KF_GUARD(engine);
    *counters = engine->counters;
}

static void kf_report_slot(kf_slot *slot, kf_event *event) {
    *event = (kf_event){.kind = slot->over ? KF_OVER_COUNTED : KF_ARRIVED, .id = slot->handle, .count = slot->count,
                        .first_ns = slot->first_ns, .last_ns = slot->last_ns};
    slot->over_reported |= slot->over;
    slot->arrived = slot->over = false;
    kf_unlink(&slot->ready);
}

static void kf_report_endpoint(kf_endpoint *endpoint, kf_event *event) {
    *event = (kf_event){.kind = KF_ENDPOINT_FAILED, .id = endpoint->id, .count = endpoint->failed_rail,
                        .error = endpoint->error};
    kf_unlink(&endpoint->ready);
}

static void kf_report_port(kf_port *port, kf_event *event) {
    *event = (kf_event){.kind = KF_RAIL_IN_DOUBT, .id = port->endpoint->id, .count = port - port->endpoint->ports,
                        .completed = port->remotes, .error = port->error};
    kf_unlink(&port->ready);
}

/* A failed batch has two events, the failure first; the second one frees it. */
static void kf_report_batch(kf_batch *batch, kf_event *event) {
    bool failure = batch->failed && !batch->failure_reported;
    *event = (kf_event){.kind = failure ? KF_WRITES_FAILED : KF_WRITES_ENDED,
                        .cancelled = batch->cancelled,
                        .id = batch->handle,
                        .count = (int64_t)batch->posted,
                        .completed = (int64_t)batch->completed,
                        .bytes = (int64_t)(batch->completed * batch->length),
                        .first_ns = batch->first_posted_ns,
                        .last_ns = batch->last_posted_ns,
                        .completed_ns = batch->completed_ns,
                        .error = batch->error};
    batch->failure_reported |= failure;
    if (!failure)
        kf_free_batch(batch);
    else if (!batch->ended)
        kf_unlink(&batch->ready);
}

static int kf_report(kf_engine *engine, kf_event *events, int capacity) {
    int n = 0;
    while (n < capacity && kf_linked(&engine->ready_slots))
        kf_report_slot(KF_OWNER(engine->ready_slots.next, kf_slot, ready), &events[n++]);
    while (n < capacity && kf_linked(&engine->ready_ports))
        kf_report_port(KF_OWNER(engine->ready_ports.next, kf_port, ready), &events[n++]);
    while (n < capacity && kf_linked(&engine->ready_endpoints))
        kf_report_endpoint(KF_OWNER(engine->ready_endpoints.next, kf_endpoint, ready), &events[n++]);
    while (n < capacity && kf_linked(&engine->ready_batches))
        kf_report_batch(KF_OWNER(engine->ready_batches.next, kf_batch, ready), &events[n++]);
    return n;
}

/* Of peers on this host: who connects, wakes us, or is gone. */
static void kf_look_at_sockets(kf_engine *engine, int64_t now) {
    if (!engine->look && now - engine->looked_ns < KF_LOOK_NS) return;
    engine->look = false;
    engine->looked_ns = now;
    for (kf_node *node = engine->endpoints.next; node != &engine->endpoints; node = node->next) {
        kf_endpoint *endpoint = KF_OWNER(node, kf_endpoint, link);
        if (endpoint->sender) kf_look_at_receiver(engine, endpoint, now);
        if (endpoint->receiver) kf_look_at_sender(engine, endpoint);
    }
}

/* True if peers on this host will wake us. */
static bool kf_peers_will_wake(kf_engine *engine) {
    for (kf_node *node = engine->endpoints.next; node != &engine->endpoints; node = node->next) {
        kf_endpoint *endpoint = KF_OWNER(node, kf_endpoint, link);
        if (endpoint->sender && !kf_sender_may_sleep(endpoint->sender)) return false;
        if (endpoint->receiver && !kf_receiver_may_sleep(endpoint->receiver)) return false;
    }
    return true;
}

/* True if the descriptors will tell of the next completion: nothing is pending now. */
static bool kf_may_sleep(kf_engine *engine) {
    if (!kf_peers_will_wake(engine)) return false;
    if (engine->without_descriptors) return true;
    for (uint32_t i = 0; i < engine->options.rail_count; i++)
        if (engine->rails[i].wait_set && !fi_wait(engine->rails[i].wait_set, 0)) return false; /* 0: ready */
    for (kf_node *node = engine->endpoints.next; node != &engine->endpoints; node = node->next) {
        kf_endpoint *endpoint = KF_OWNER(node, kf_endpoint, link);
        for (uint32_t i = 0; i < endpoint->port_count; i++) {
            const kf_port *port = &endpoint->ports[i];
            if (!port->cq || port->rail->wait_set) continue;
            struct fid *fid = &port->cq->fid;
            if (fi_trywait(port->rail->fabric, &fid, 1) == -FI_EAGAIN) return false;
        }
    }
    return true;
}

static int64_t kf_sleep_until(const kf_engine *engine, int64_t now, int64_t deadline) {
    int64_t retry = kf_next_retry(engine), nap = kf_words_nap(engine, now);
    int64_t blind = engine->without_descriptors ? kf_growing_nap(now - engine->last_active_ns) : INT64_MAX;
    if (blind < nap) nap = blind;
    if (retry < deadline) deadline = retry;
    return nap < deadline - now ? now + nap : deadline;
}

static void kf_sleep(kf_engine *engine, int64_t now, int64_t until) {
    if (until <= now) {
        sched_yield();
        return;
    }
    struct pollfd poll = {.fd = engine->epoll_fd, .events = POLLIN};
    struct timespec time = {.tv_sec = (until - now) / 1000000000, .tv_nsec = (until - now) % 1000000000};
    engine->counters.sleeps++;
    if (ppoll(&poll, 1, &time, NULL) > 0) {
        eventfd_t value;
        eventfd_read(engine->event_fd, &value);
        engine->look = true;
    }
}

void kf_set_timer_slack(void) {
    static _Thread_local bool done;
    if (!done) prctl(PR_SET_TIMERSLACK, KF_TIMER_SLACK_NS);
    done = true;
}

static void kf_fire_post_drain(kf_engine *engine, int64_t now) {
    kf_look_at_sockets(engine, now);
    kf_fire_words(engine, now);
    bool active = kf_post_all(engine, now);
    active |= kf_drain_all(engine, now);
    if (active) engine->last_active_ns = kf_now(); /* copying for peers on this host takes its time */
}

/* For the relay: how long it may rest then; 0: it only lets others run. */
int64_t kf_turn(kf_engine *engine) {
    int64_t now = kf_now();
    kf_fire_post_drain(engine, now);
    int64_t inactive = now - engine->last_active_ns;
    int64_t rest = inactive < KF_SPIN_NS ? 0 : kf_growing_nap(inactive), nap = kf_words_nap(engine, now);
    return rest < nap ? rest : nap;
}

int kf_progress(kf_engine *engine, int64_t timeout_ns, kf_event *events, int capacity) {
    KF_GUARD(engine);
    kf_set_timer_slack();
    int64_t now = kf_now(), deadline = now + timeout_ns;
    for (;; now = kf_now()) {
        kf_fire_post_drain(engine, now);
        int count = kf_report(engine, events, capacity);
        bool woken = __atomic_exchange_n(&engine->woken, 0, __ATOMIC_ACQ_REL);
        if (count || woken || now >= deadline) return count;
        if (now - engine->last_active_ns < KF_SPIN_NS || !kf_may_sleep(engine))
            sched_yield();
        else
            kf_sleep(engine, now, kf_sleep_until(engine, now, deadline));
    }
}
