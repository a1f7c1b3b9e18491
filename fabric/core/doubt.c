/* A rail that fails with writes on their way, while its endpoint goes on with the others.
 *
 *     sender    the port is closed; what has not completed by then is in doubt, and stays with its batch
 *     receiver  closes its own port of that rail, so that nothing lands there any more, and sees for each immediate:
 *                 it has all its writes, or is not expected any more       -> they landed, and are not repeated
 *                 else: what it counted over that rail, beyond what the sender has seen completed, is not counted
 *                       any more                                           -> all that is in doubt is posted again
 *     sender    ends the ones, posts the others on its other rails
 *
 * For this completed writes must have been counted, which providers with FI_DELIVERY_COMPLETE promise, and the peer's
 * rail must have had no writes of another one of ours. */
#include "internal.h"

#define KF_SLOT(immediate) ((immediate) >> KF_GENERATION_BITS)

/* Generations of a slot are posted, and counted, one after the other: a new one starts from nothing. */
void kf_begin_tally(kf_port *port, uint32_t immediate) {
    uint32_t generation = immediate & KF_GENERATION_MASK;
    if (port->tallies && port->tallies[KF_SLOT(immediate)].generation != generation)
        port->tallies[KF_SLOT(immediate)] = (kf_tally){.generation = generation};
}

static int64_t kf_tallied(const kf_port *port, uint32_t immediate) {
    const kf_tally *tally = &port->tallies[KF_SLOT(immediate)];
    return tally->generation == (immediate & KF_GENERATION_MASK) ? tally->count : 0;
}

/* A completion of an older generation than was posted last comes late, and is nobody's concern any more. */
void kf_tally_one(kf_port *port, uint32_t immediate) {
    if (!port->tallies) return;
    if (port->endpoint->landing) kf_begin_tally(port, immediate);
    kf_tally *tally = &port->tallies[KF_SLOT(immediate)];
    tally->count += tally->generation == (immediate & KF_GENERATION_MASK);
}

/* Its rail, or the peer's. */
bool kf_way_is_lost(const kf_endpoint *endpoint, const kf_way *way) {
    return endpoint->ports[way->lane.rail].lost || endpoint->lost_remotes >> way->lane.remote & 1;
}

bool kf_has_no_way(const kf_endpoint *endpoint, const kf_batch *batch) {
    for (uint32_t i = 0; i < batch->way_count; i++)
        if (!kf_way_is_lost(endpoint, &batch->ways[i])) return false;
    return true;
}

static kf_operation *kf_next_in_flight(const kf_engine *engine, const kf_port *port, kf_operation *from) {
    for (kf_operation *end = port->operations + engine->options.endpoint_cap; from < end; from++)
        if (from->batch) return from;
    return NULL;
}

/* Every write in flight on the port. A batch that ends meanwhile takes its other writes out of flight. */
#define KF_EACH_IN_FLIGHT(engine, port, operation)                                                  \
    for (kf_operation *operation = kf_next_in_flight(engine, port, (port)->operations); operation; \
         operation = kf_next_in_flight(engine, port, operation + 1))

/* Whether the peer can tell by its rails what became of a port's writes, and others can take them. */
static bool kf_can_move_writes(const kf_engine *engine, const kf_port *port) {
    kf_endpoint *endpoint = port->endpoint;
    if (!endpoint->asks_peer || !engine->delivery_complete || kf_closes_dead_only(engine)) return false;
    for (uint32_t i = 0; i < endpoint->port_count; i++)
        if (&endpoint->ports[i] != port && endpoint->ports[i].remotes & port->remotes) return false;
    KF_EACH_IN_FLIGHT(engine, port, operation)
        if (!operation->batch->stopped && kf_has_no_way(endpoint, operation->batch)) return false;
    return true;
}

/* fi_close is synchronous: sources are not read after it. What had completed until then counts as completed. */
static int kf_close_port(kf_engine *engine, kf_port *port) {
    kf_drain_all_of(engine, port);
    port->close_failed = fi_close(&port->ep->fid);
    if (!port->close_failed) kf_drain_all_of(engine, port);
    port->ep = NULL;
    return port->close_failed;
}

static kf_batch *kf_take_doubtful(kf_engine *engine, kf_port *port, kf_operation *operation) {
    kf_batch *batch = kf_take_operation(engine, port, operation);
    port->endpoint->held--;
    batch->doubtful--;
    return batch;
}

/* A batch that was stopped posts nothing again: its writes in doubt end as posted and not completed. */
void kf_leave_doubt(kf_engine *engine, kf_batch *batch) {
    for (uint32_t i = 0; i < batch->endpoint->port_count; i++) {
        kf_port *port = &batch->endpoint->ports[i];
        if (!port->doubt) continue;
        KF_EACH_IN_FLIGHT(engine, port, operation) {
            if (operation->batch != batch) continue;
            kf_take_doubtful(engine, port, operation);
            engine->counters.writes_failed++;
            if (!batch->error.code) batch->error = port->error;
        }
    }
}

/* No word of its writes is awaited on this way any more. None of them was held: with several rails each write asks. */
static void kf_mark_doubtful(const kf_engine *engine, kf_port *port) {
    KF_EACH_IN_FLIGHT(engine, port, operation) {
        operation->batch->doubtful++;
        port->endpoint->held++;
    }
}

/* The port has failed, and is marked lost. False if its endpoint cannot go on without it. Otherwise it is in doubt from
 * now on, though the peer is asked only about what nobody has stopped: whoever brings the failure of one of its writes
 * must not end that write. */
bool kf_enter_doubt(kf_engine *engine, kf_port *port, const kf_error *error) {
    kf_endpoint *endpoint = port->endpoint;
    uint32_t lost_before = endpoint->lost_remotes;
    endpoint->lost_remotes |= port->remotes;
    port->doubt = kf_can_move_writes(engine, port);
    if (!port->doubt || kf_close_port(engine, port)) {
        endpoint->lost_remotes = lost_before;
        return port->doubt = false;
    }
    port->error = *error; /* those that are stopped end with it */
    kf_mark_doubtful(engine, port);
    KF_EACH_IN_FLIGHT(engine, port, operation) {
        kf_batch *batch = operation->batch;
        if (!batch->stopped) continue;
        kf_leave_doubt(engine, batch);
        kf_end_if_done(engine, batch);
    }
    return true;
}

/* What the peer must know of a rail in doubt; how many immediates. `capacity`: enough is the cap of an endpoint. */
uint32_t kf_read_doubts(kf_engine *engine, const kf_endpoint *endpoint, uint32_t rail, kf_doubt *doubts,
                        uint32_t capacity) {
    KF_GUARD(engine);
    const kf_port *port = &endpoint->ports[rail];
    uint32_t count = 0;
    KF_EACH_IN_FLIGHT(engine, port, operation) {
        uint32_t immediate = operation->batch->immediate, i = 0;
        while (i < count && doubts[i].immediate != immediate) i++;
        if (i < count || count == capacity) continue;
        doubts[count++] = (kf_doubt){.immediate = immediate, .completed = kf_tallied(port, immediate)};
    }
    return count;
}

static bool kf_is_one_of(uint32_t immediate, const uint32_t *immediates, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (immediates[i] == immediate) return true;
    return false;
}

/* Before the batch's writes that were never posted; it failed where it was. */
static void kf_post_again(kf_engine *engine, kf_batch *batch, kf_operation *operation) {
    engine->counters.writes_failed++;
    batch->posted--;
    operation->next = batch->again;
    batch->again = operation;
    if (!kf_linked(&batch->place)) kf_insert_after(&batch->endpoint->queue, &batch->place);
}

/* The peer's answer. A rail that is not in doubt, any more, is ignored. */
void kf_settle_rail(kf_engine *engine, kf_endpoint *endpoint, uint32_t rail, const uint32_t *again, uint32_t count) {
    KF_GUARD(engine);
    if (rail >= endpoint->port_count || !endpoint->ports[rail].doubt) return;
    kf_port *port = &endpoint->ports[rail];
    int64_t now = kf_now();
    KF_EACH_IN_FLIGHT(engine, port, operation) {
        kf_batch *batch = kf_take_doubtful(engine, port, operation);
        if (kf_is_one_of(batch->immediate, again, count)) {
            kf_post_again(engine, batch, operation);
            continue;
        }
        engine->counters.writes_completed++;
        batch->completed++;
        batch->completed_ns = now;
        kf_end_if_done(engine, batch);
    }
    port->doubt = false;
    kf_unlink(&port->ready);
}

/* Whether the writes in doubt must come again; what they have counted for is taken back then. A count is never raised on
 * a peer's word: one that has completed and was not counted leaves it short. */
static bool kf_take_back_counts(kf_engine *engine, kf_endpoint *landing, uint32_t rails, const kf_doubt *doubt) {
    kf_slot *slot = kf_live_slot(engine, landing, doubt->immediate);
    if (!slot || slot->count >= slot->expected) return false;
    int64_t surplus = -doubt->completed;
    for (uint32_t i = 0; i < landing->port_count; i++)
        if (rails >> i & 1) surplus += kf_tallied(&landing->ports[i], doubt->immediate);
    if (surplus > 0) slot->count -= surplus;
    return true;
}

/* The fence of some rails of a landing with several, which must not be fenced yet. Returns 0, or the negative FI_E...
 * value of fi_close: then they are not fenced, and the process must end. */
int kf_fence_rails(kf_engine *engine, kf_endpoint *landing, uint32_t rails, kf_doubt *doubts, uint32_t count,
                   kf_error *error) {
    KF_GUARD(engine);
    for (uint32_t i = 0; i < landing->port_count; i++) {
        kf_port *port = &landing->ports[i];
        if (!(rails >> i & 1)) continue;
        if (!port->lost) engine->counters.rails_lost++;
        port->lost = true;
        int rc = port->ep ? kf_close_port(engine, port) : port->close_failed;
        if (rc) return kf_set_error(error, "fi_close", rc), rc;
    }
    for (uint32_t i = 0; i < count; i++) doubts[i].again = kf_take_back_counts(engine, landing, rails, &doubts[i]);
    return 0;
}
