/* The thread that goes on where Python left off: words are polled and writes posted also while the caller of
 * kf_progress is busy in Python, or waits there for the GIL.
 *
 * One of the two has the engine at a time. Whoever calls from Python enters, which the relay makes way for, and leaves;
 * the relay takes over a moment after that, and only while there is something to be late for. */
#define _GNU_SOURCE
#include "internal.h"

#include <sched.h>
#include <time.h>

#define KF_GRACE_NS 30000 /* most callers are back by then */

void kf_open_relay(kf_engine *engine) {
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_RECURSIVE); /* what is called from Python also calls itself */
    pthread_mutex_init(&engine->lock, &attr);
    pthread_mutexattr_destroy(&attr);
    pthread_cond_init(&engine->left, NULL);
}

/* Of writes that we post: what arrives waits for Python anyway. */
static bool kf_has_something_to_do(const kf_engine *engine) {
    if (engine->counters.armed || engine->counters.outstanding) return true;
    for (const kf_node *node = engine->endpoints.next; node != &engine->endpoints; node = node->next)
        if (kf_linked(&KF_OWNER(node, kf_endpoint, link)->queue)) return true;
    return false;
}

static void kf_pause(int64_t ns) {
    struct timespec time = {.tv_nsec = ns};
    nanosleep(&time, NULL);
}

/* Without the lock: until it is worth another look, and nobody from Python wants to have the engine. */
static void kf_make_way(const kf_engine *engine, int64_t pause_ns) {
    if (pause_ns)
        kf_pause(pause_ns);
    else
        sched_yield();
    while (__atomic_load_n(&engine->entering, __ATOMIC_ACQUIRE)) sched_yield();
}

static void *kf_relay(void *argument) {
    kf_engine *engine = argument;
    kf_set_timer_slack();
    pthread_mutex_lock(&engine->lock);
    for (bool took_over = false; !engine->closing;) {
        if (!engine->away) {
            took_over = false;
            pthread_cond_wait(&engine->left, &engine->lock);
            continue;
        }
        int64_t pause = took_over ? kf_turn(engine) : KF_GRACE_NS;
        took_over = true;
        pthread_mutex_unlock(&engine->lock);
        kf_make_way(engine, pause);
        pthread_mutex_lock(&engine->lock);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

/* The first time, so that it runs on the cores of the thread that it stands in for. Without it we are only late. */
static void kf_start_relay(kf_engine *engine) {
    if (!engine->has_relay && !pthread_create(&engine->relay, NULL, kf_relay, engine)) {
        engine->has_relay = true;
        pthread_setname_np(engine->relay, "kv-fabric");
    }
}

kf_engine *kf_enter(const kf_engine *const_engine) {
    kf_engine *engine = (kf_engine *)const_engine;
    __atomic_fetch_add(&engine->entering, 1, __ATOMIC_ACQ_REL);
    pthread_mutex_lock(&engine->lock);
    __atomic_fetch_sub(&engine->entering, 1, __ATOMIC_ACQ_REL);
    engine->depth++;
    engine->away = false;
    return engine;
}

void kf_leave(kf_engine **guarded) {
    kf_engine *engine = *guarded;
    if (!--engine->depth && !engine->closing && kf_has_something_to_do(engine)) {
        engine->away = true;
        kf_start_relay(engine);
        pthread_cond_signal(&engine->left);
    }
    pthread_mutex_unlock(&engine->lock);
}

/* For good. */
void kf_stop_relay(kf_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    engine->closing = true;
    pthread_cond_signal(&engine->left);
    pthread_mutex_unlock(&engine->lock);
    if (engine->has_relay) pthread_join(engine->relay, NULL);
}

void kf_close_relay(kf_engine *engine) {
    pthread_cond_destroy(&engine->left);
    pthread_mutex_destroy(&engine->lock);
}
