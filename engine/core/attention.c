/* A layer's attention, shared out to threads. */
#include "attention.h"

#include <omp.h>
#include <stdlib.h>

#include "attention_call.h"
#include "cpu.h"

enum {
    WORTH_A_TEAM = 1 << 18, /* multiplications that one thread does in the time that it takes to wake another */
    CACHE_LINE = 64,        /* bytes */
};

#ifdef __x86_64__
static const kf_attention_tiles *const VARIANTS[KF_VARIANTS] = {&kf_attention_portable, &kf_attention_avx2,
                                                                &kf_attention_avx512};
#else
static const kf_attention_tiles *const VARIANTS[KF_VARIANTS] = {&kf_attention_portable};
#endif

/* Returns what there is to do, in multiplications. */
static int64_t number_units(kf_call *call)
{
    int64_t work = 0;
    for (int32_t i = 0; i < call->rows->num_rows; i++) {
        kf_row *row = &call->rows->rows[i];
        kf_cut cut = kf_cut_row(call, row);
        row->unit = call->units;
        call->units += cut.pieces * cut.blocks;
        call->block = cut.block > call->block ? cut.block : call->block;
        work += (int64_t)(cut.end - cut.first) * row->count * call->scores->heads * call->layer->head_dim;
    }
    return work;
}

static int allocate_copies(kf_call *call, int threads)
{
    int64_t floats = (int64_t)threads * kf_copy_size(call);
    int copies = 0;
    for (int32_t i = 0; i < call->rows->num_rows && !copies; i++)
        copies = kf_copies_tiles(call, &call->rows->rows[i]);
    if (copies)
        call->copies = aligned_alloc(CACHE_LINE, sizeof(float) * (size_t)floats);
    return !copies || call->copies;
}

static int allocate_partial(kf_call *call)
{
    const kf_rows *rows = call->rows;
    int64_t blocks = (int64_t)call->units * call->layer->kv_heads;
    int joins = 0;
    for (int32_t i = 0; i < rows->num_rows && !joins; i++)
        joins = kf_cut_row(call, &rows->rows[i]).pieces > 1;
    if (joins)
        call->partial = malloc(sizeof(float) * (size_t)(blocks * call->block * (call->layer->head_dim + 2)));
    return !joins || call->partial;
}

/* A chunk's new KV is read where it is packed, so it may be written at any time; but in a ring it takes places that
 * its first queries still read. */
static void write_chunk(const kf_call *call, int32_t row, int32_t head)
{
    if (call->rows->rows[row].count > 1)
        kf_write_row(call, &call->rows->rows[row], head);
}

/* Backwards: the last block of a chunk sees most, and what takes longest is best begun first. */
static void attend_unit(const kf_call *call, int32_t unit, int32_t head)
{
    float *copy = call->copies ? call->copies + omp_get_thread_num() * kf_copy_size(call) : NULL;
    kf_attend_unit(call, call->units - 1 - unit, head, copy);
}

static void run(const kf_call *call, int threads)
{
    int32_t heads = call->layer->kv_heads, tasks = call->units * heads, writes = call->rows->num_rows * heads;
    int32_t early = call->layer->window ? 0 : writes, late = writes - early, joins = call->partial ? tasks : 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic)
        for (int32_t i = 0; i < tasks + early; i++) {
            if (i < tasks)
                attend_unit(call, i / heads, i % heads);
            else
                write_chunk(call, (i - tasks) / heads, i % heads);
        }
        if (joins + late) {
#pragma omp for schedule(static)
            for (int32_t i = 0; i < joins + late; i++) {
                if (i < joins)
                    kf_join_pieces(call, i / heads, i % heads);
                else
                    write_chunk(call, (i - joins) / heads, i % heads);
            }
        }
    }
}

int kf_attend(const kf_layer *layer, const kf_rows *rows, const kf_packed *packed, const kf_scores *scores,
              uint64_t output, int threads, int variant)
{
    kf_call call = {.layer = layer,
                    .rows = rows,
                    .query = &packed[0],
                    .keys = &packed[1],
                    .values = &packed[2],
                    .scores = scores,
                    .sinks = (const float *)(uintptr_t)scores->sinks,
                    .output = (float *)(uintptr_t)output,
                    .tiles = VARIANTS[variant],
                    .share = scores->heads / layer->kv_heads};
    int64_t work = number_units(&call);
    int ready = allocate_partial(&call) && allocate_copies(&call, threads);
    if (ready)
        run(&call, work < WORTH_A_TEAM ? 1 : threads);
    free(call.partial);
    free(call.copies);
    return ready ? 0 : -1;
}
