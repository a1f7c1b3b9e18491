/* Counting immediates: one flat array, indexed by the slot bits of the immediate. */
#include "internal.h"

static kf_slot *kf_slot_of(kf_engine *engine, uint32_t immediate) {
    return &engine->slots[immediate >> KF_GENERATION_BITS];
}

/* Sets what the count says now. An expectation that was overrun is not also reported as arrived. */
static void kf_judge(kf_engine *engine, kf_slot *slot) {
    slot->arrived = slot->count == slot->expected;
    slot->over = slot->count > slot->expected && !slot->over_reported;
    if (slot->arrived || slot->over)
        kf_mark_ready(&engine->ready_slots, &slot->ready);
    else
        kf_unlink(&slot->ready);
}

/* Returns 0, or -1 if the slot is armed already. */
int kf_expect(kf_engine *engine, kf_endpoint *landing, int64_t handle, uint32_t immediate, int64_t count) {
    KF_GUARD(engine);
    kf_slot *slot = kf_slot_of(engine, immediate);
    if (slot->landing) return -1;
    *slot = (kf_slot){.landing = landing, .handle = handle, .expected = count,
                      .generation = immediate & KF_GENERATION_MASK};
    kf_node_init(&slot->ready);
    engine->counters.expectations++;
    return 0;
}

void kf_revise(kf_engine *engine, uint32_t slot, int64_t count) {
    KF_GUARD(engine);
    engine->slots[slot].expected = count;
    kf_judge(engine, &engine->slots[slot]);
}

int64_t kf_counted(const kf_engine *engine, uint32_t slot) {
    KF_GUARD(engine);
    return engine->slots[slot].count;
}

static void kf_disarm_slot(kf_engine *engine, kf_slot *slot) {
    kf_unlink(&slot->ready);
    slot->landing = NULL;
    engine->counters.expectations--;
}

void kf_forget(kf_engine *engine, const uint32_t *slots, int count) {
    KF_GUARD(engine);
    for (int i = 0; i < count; i++) kf_disarm_slot(engine, &engine->slots[slots[i]]);
}

/* What expects this immediate on this landing, or NULL: of a wrong generation, of another landing, or over. */
kf_slot *kf_live_slot(kf_engine *engine, const kf_endpoint *landing, uint32_t immediate) {
    kf_slot *slot = kf_slot_of(engine, immediate);
    return slot->landing == landing && slot->generation == (immediate & KF_GENERATION_MASK) ? slot : NULL;
}

/* False if nothing expects it: that changes nothing but the stale counter. */
bool kf_count_immediate(kf_engine *engine, kf_endpoint *landing, uint32_t immediate, int64_t now) {
    kf_slot *slot = kf_live_slot(engine, landing, immediate);
    if (!slot) {
        engine->counters.stale_immediates++;
        return false;
    }
    engine->counters.immediates_counted++;
    if (!slot->count++) slot->first_ns = now;
    slot->last_ns = now;
    if (slot->count > slot->expected) engine->counters.over_counts++;
    kf_judge(engine, slot);
    return true;
}

void kf_drop_expectations(kf_engine *engine, kf_endpoint *landing) {
    for (uint32_t slot = 0; slot < KF_SLOTS; slot++)
        if (engine->slots[slot].landing == landing) kf_disarm_slot(engine, &engine->slots[slot]);
}
