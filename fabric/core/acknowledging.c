/* Which writes the peer acknowledges.
 *
 * That a write completed tells that it was delivered. Over TCP each such word is a message of its own, which costs the
 * peer as much as to receive a small page. But TCP delivers in order: the word for one write is the word for all before
 * it. So there only every few ask for it, and a batch's last. Those between are held once they were handed over, and
 * complete with the next one that was acknowledged. */
#include "internal.h"

#define KF_ASKS_PER_CAP 4 /* acknowledgements under way where as many writes are outstanding as may be */

/* No word is awaited, or none at all is outstanding: the next write may always be posted, and asks. */
bool kf_all_is_held(const kf_endpoint *endpoint) { return endpoint->outstanding == endpoint->held; }

static bool kf_asks(const kf_engine *engine, const kf_port *port, const kf_batch *batch) {
    uint64_t every = engine->options.endpoint_cap / KF_ASKS_PER_CAP;
    bool last = batch->posted + 1 == batch->count, nobody = kf_all_is_held(port->endpoint);
    return !engine->in_order || last || nobody || every < 2 || port->numbered % every == 0;
}

/* The flag for the write that is about to be posted with the port's next free operation. */
uint64_t kf_promise(const kf_engine *engine, kf_port *port, const kf_batch *batch) {
    kf_operation *operation = port->free_operations;
    operation->number = port->numbered + 1;
    operation->acknowledged = kf_asks(engine, port, batch);
    if (!engine->delivery_complete) return FI_TRANSMIT_COMPLETE;
    return operation->acknowledged ? FI_DELIVERY_COMPLETE : FI_INJECT_COMPLETE;
}

/* Completes those held that the peer has, or that are of `stopped`. */
static void kf_complete_held(kf_engine *engine, kf_port *port, const kf_batch *stopped, int64_t now) {
    kf_operation **link = &port->held;
    while (*link) {
        kf_operation *operation = *link;
        if (operation->number > port->delivered && operation->batch != stopped) {
            link = &operation->next;
            continue;
        }
        *link = operation->next;
        port->endpoint->held--;
        kf_completed(engine, port, operation, NULL, now);
    }
}

/* The provider is done with it, and its source may be used again. */
void kf_handed_over(kf_engine *engine, kf_port *port, kf_operation *operation, int64_t now) {
    bool held = !operation->acknowledged && operation->number > port->delivered && !operation->batch->stopped;
    if (held) {
        operation->next = port->held;
        port->held = operation;
        port->endpoint->held++;
        return;
    }
    if (operation->acknowledged && operation->number > port->delivered) port->delivered = operation->number;
    kf_completed(engine, port, operation, NULL, now);
    kf_complete_held(engine, port, NULL, now);
}

/* Of a batch of which nothing more is posted: nobody asks any more, and that they were handed over has to do. */
void kf_release_held(kf_engine *engine, kf_batch *batch) {
    kf_endpoint *endpoint = batch->endpoint;
    for (uint32_t i = 0; i < endpoint->port_count; i++)
        kf_complete_held(engine, &endpoint->ports[i], batch, kf_now());
}
