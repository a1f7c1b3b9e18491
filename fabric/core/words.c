/* Words that forward passes raise: which batches wait for them, and when to look at them.
 *
 * Nobody tells us that a word moves, for it may be a GPU that raises it, and on most machines a thread that sleeps is
 * woken later than a layer's first write should leave. But the layers of a forward take about the same time each. So a
 * word is looked at without a pause around the time when its next move is due, and between naps otherwise, which grow
 * with the time that it has not moved. */
#include "internal.h"

#include <stdlib.h>

#define KF_DUE_SHARE 8         /* of a beat, that it is looked at without a pause before and after it is due; within: */
#define KF_DUE_MIN_NS 60000    /* a sleeper is woken so late */
#define KF_DUE_MAX_NS 200000
#define KF_NAP_SHARE 32        /* what moves off its beat is noticed at most 1/32 of its waiting time late; within: */
#define KF_NAP_MIN_NS 20000
#define KF_NAP_MAX_NS 1000000

static int64_t kf_within(int64_t least, int64_t value, int64_t most) {
    return value < least ? least : value < most ? value : most;
}

static kf_word *kf_find_word(kf_engine *engine, const uint64_t *address) {
    for (kf_node *node = engine->words.next; node != &engine->words; node = node->next) {
        kf_word *word = KF_OWNER(node, kf_word, link);
        if (word->address == address) return word;
    }
    kf_word *word = calloc(1, sizeof *word);
    if (!word) return NULL;
    word->address = address;
    kf_node_init(&word->armed);
    kf_append(&engine->words, &word->link);
    return word;
}

/* It is kept, with its beat, until the engine is closed. */
void kf_free_words(kf_engine *engine) {
    while (kf_linked(&engine->words)) {
        kf_word *word = KF_OWNER(engine->words.next, kf_word, link);
        kf_unlink(&word->link);
        free(word);
    }
}

/* Sorted insertion from the back: callers arm in ascending order nearly always. False without memory. */
bool kf_arm(kf_engine *engine, kf_batch *batch, uint64_t word_address) {
    kf_word *word = kf_find_word(engine, (const uint64_t *)word_address);
    if (!word) return false;
    if (!kf_linked(&word->armed)) {
        word->waiting_since_ns = kf_now();
        word->fired = 0;
    }
    kf_node *place = word->armed.prev;
    while (place != &word->armed && KF_OWNER(place, kf_batch, place)->threshold > batch->threshold) place = place->prev;
    kf_insert_after(place, &batch->place);
    batch->word = word;
    engine->counters.armed++;
    return true;
}

void kf_disarm(kf_engine *engine, kf_batch *batch) {
    kf_unlink(&batch->place);
    batch->word = NULL;
    engine->counters.armed--;
}

/* It was raised to `value`, which somebody waited for. From when it was armed to its first move is no beat: the forward
 * may not have begun. */
static void kf_keep_beat(kf_word *word, uint64_t value, int64_t now) {
    int64_t waited = now - word->waiting_since_ns;
    if (word->fired && value > word->fired) word->beat_ns = waited / (int64_t)(value - word->fired);
    word->fired = value;
    word->waiting_since_ns = now;
}

static void kf_fire_word(kf_engine *engine, kf_word *word, int64_t now) {
    uint64_t value = __atomic_load_n(word->address, __ATOMIC_ACQUIRE);
    if (KF_OWNER(word->armed.next, kf_batch, place)->threshold <= value) kf_keep_beat(word, value, now);
    while (kf_linked(&word->armed)) {
        kf_batch *batch = KF_OWNER(word->armed.next, kf_batch, place);
        if (batch->threshold > value) return;
        kf_disarm(engine, batch);
        kf_append(&batch->endpoint->queue, &batch->place);
    }
}

/* Moves every batch whose threshold was reached to its endpoint's queue. The acquire load orders our posting
 * after the writer's stores to the source bytes. */
void kf_fire_words(kf_engine *engine, int64_t now) {
    for (kf_node *node = engine->words.next; node != &engine->words; node = node->next) {
        kf_word *word = KF_OWNER(node, kf_word, link);
        if (kf_linked(&word->armed)) kf_fire_word(engine, word, now);
    }
}

/* Of what has not been seen to happen for so long. */
int64_t kf_growing_nap(int64_t waited_ns) { return kf_within(KF_NAP_MIN_NS, waited_ns / KF_NAP_SHARE, KF_NAP_MAX_NS); }

static int64_t kf_word_nap(const kf_word *word, int64_t now) {
    int64_t waited = now - word->waiting_since_ns, nap = kf_growing_nap(waited);
    int64_t around = kf_within(KF_DUE_MIN_NS, word->beat_ns / KF_DUE_SHARE, KF_DUE_MAX_NS);
    if (!word->beat_ns || waited > word->beat_ns + around) return nap;
    return kf_within(0, word->beat_ns - around - waited, nap);
}

/* How long nobody needs to look at any word. */
int64_t kf_words_nap(const kf_engine *engine, int64_t now) {
    int64_t nap = INT64_MAX;
    for (const kf_node *node = engine->words.next; node != &engine->words; node = node->next) {
        const kf_word *word = KF_OWNER(node, kf_word, link);
        if (!kf_linked(&word->armed)) continue;
        int64_t of_word = kf_word_nap(word, now);
        if (of_word < nap) nap = of_word;
    }
    return nap;
}
