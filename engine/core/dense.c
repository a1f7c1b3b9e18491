/* Dense work, shared out to threads. */
#include "dense.h"

#include "cpu.h"
#include "dense_rows.h"

enum {
    WORTH_A_TEAM = 1 << 15, /* floats that one thread treats in the time that it takes to wake another */
    SHARES = 6,             /* of each thread: one that was held up leaves its last ones to the others */
    PANELS = 16,            /* at most, in a share of a product */
    STRETCH = 96 << 10,     /* inputs of tokens that stay in the outer cache while weights pass by */
    LEAST = 12,             /* tokens in a stretch: weights are worth fetching for no fewer */
};

#ifdef __x86_64__
static const kf_dense_rows *const VARIANTS[KF_VARIANTS] = {&kf_dense_portable, &kf_dense_avx2, &kf_dense_avx512};
#else
static const kf_dense_rows *const VARIANTS[KF_VARIANTS] = {&kf_dense_portable};
#endif

static const kf_dense_rows *rows_of(int variant, int width)
{
    while (variant > KF_PORTABLE && !kf_runs_variant(variant, width))
        variant--;
    return VARIANTS[variant];
}

static float *at(uint64_t address)
{
    return (float *)(uintptr_t)address;
}

static int team(int threads, int tokens, int width)
{
    return (int64_t)tokens * width < WORTH_A_TEAM ? 1 : threads;
}

static int share_of(int panels, int threads)
{
    int share = panels / (threads * SHARES) + 1;
    return share < PANELS ? share : PANELS;
}

/* As many tokens in each of the fewest stretches. */
static int stretch_of(int tokens, int inputs)
{
    int most = STRETCH / inputs > LEAST ? STRETCH / inputs : LEAST, stretches = (tokens + most - 1) / most;
    return (tokens + stretches - 1) / stretches;
}

/* `tokens` of a product at most, from `first` on. */
static kf_product part_of(kf_product product, int first, int tokens)
{
    product.input += (int64_t)first * product.inputs;
    product.output += (int64_t)first * product.outputs;
    product.tokens = product.tokens - first < tokens ? product.tokens - first : tokens;
    return product;
}

void kf_multiply(const kf_linear *linear, uint64_t input, int tokens, uint64_t output, int add, int threads,
                 int variant)
{
    if (!tokens)
        return;
    kf_product whole = {at(input),       at(linear->weight), at(linear->bias), at(output),
                        linear->inputs, linear->outputs,    tokens,           add};
    const kf_dense_rows *rows = rows_of(variant, KF_PANEL);
    int panels = (linear->outputs + KF_PANEL - 1) / KF_PANEL, share = share_of(panels, threads);
    int workers = team(threads, linear->outputs, linear->inputs), stretch = stretch_of(tokens, linear->inputs);
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(workers) if (workers > 1)
    for (int first = 0; first < tokens; first += stretch)
        for (int begin = 0; begin < panels; begin += share) {
            kf_product product = part_of(whole, first, stretch);
            rows->multiply(&product, begin, begin + share < panels ? begin + share : panels);
        }
}

void kf_normalise(const kf_norm *norm, uint64_t input, int tokens, uint64_t output, int threads, int variant)
{
    const kf_dense_rows *rows = rows_of(variant, norm->width);
    int workers = team(threads, tokens, norm->width);
#pragma omp parallel for schedule(static) num_threads(workers) if (workers > 1)
    for (int token = 0; token < tokens; token++) {
        int64_t row = (int64_t)token * norm->width;
        rows->normalise(at(input) + row, at(norm->weight), norm->epsilon, norm->width, at(output) + row);
    }
}

static void place_head(const kf_dense_rows *rows, const kf_norm *norm, float *head, int head_dim,
                       const float *cosines, const float *sines)
{
    if (norm->width)
        rows->normalise(head, at(norm->weight), norm->epsilon, head_dim, head);
    rows->rotate(head, cosines, sines, head_dim);
}

void kf_place_heads(const kf_heads *heads, uint64_t packed, uint64_t cosines, uint64_t sines, int tokens, int threads,
                    int variant)
{
    int dim = heads->head_dim, placed = heads->queries + heads->keys, width = (placed + heads->keys) * dim;
    const kf_dense_rows *rows = rows_of(variant, dim / 2);
    int workers = team(threads, tokens, width);
#pragma omp parallel for schedule(static) num_threads(workers) if (workers > 1)
    for (int token = 0; token < tokens; token++) {
        const float *cosine = at(cosines) + (int64_t)token * dim, *sine = at(sines) + (int64_t)token * dim;
        float *head = at(packed) + (int64_t)token * width;
        for (int i = 0; i < placed; i++, head += dim)
            place_head(rows, i < heads->queries ? &heads->query_norm : &heads->key_norm, head, dim, cosine, sine);
    }
}

void kf_gate(uint64_t input, int width, int tokens, uint64_t output, int threads, int variant)
{
    const kf_dense_rows *rows = rows_of(variant, width);
    int workers = team(threads, tokens, width);
#pragma omp parallel for schedule(static) num_threads(workers) if (workers > 1)
    for (int token = 0; token < tokens; token++) {
        const float *gate = at(input) + (int64_t)token * 2 * width;
        rows->gate(gate, gate + width, width, at(output) + (int64_t)token * width);
    }
}
