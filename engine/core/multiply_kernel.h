/* Products of tokens with panels of weights: see kf_linear.
 *
 * TILE tokens by one panel make twelve vectors of sums that stay in registers: an input, spread over a vector, meets the
 * weights of its panel's outputs. A portion of the panel stays in the nearest cache while the tokens pass by, which the
 * next cache holds; meanwhile the portion behind it is fetched, so that memory and arithmetic overlap. Each sum adds up
 * in the order of the inputs, whatever its neighbours are: portions depend on the number of inputs alone.
 */
enum {
    VECTORS = KF_PANEL / LANES,
    TILE = 12 / VECTORS,
    PORTION = 320, /* inputs at most: a panel's part of 20 KiB */
    FETCHERS = 4,  /* tiles at most that share in fetching */
};

/* What one tile multiplies. `ahead`: what it fetches meanwhile. */
typedef struct {
    const float *input, *weight, *ahead;
    float *output;
    long stride, length; /* from one token's inputs to the next; inputs of this portion */
    int outputs, columns; /* of a token; of this panel */
} tile;

INLINE void add_sums(float *output, const vec *sum, int columns)
{
    if (columns == KF_PANEL)
        for (int v = 0; v < VECTORS; v++)
            store(output + v * LANES, load(output + v * LANES) + sum[v]);
    else
        for (int i = 0; i < columns; i++)
            output[i] += sum[i / LANES][i % LANES];
}

/* One line is fetched for each `every` inputs, a power of two; 0: none. */
INLINE void multiply_tile(const tile *t, const int tokens, const int every)
{
    vec sum[TILE][VECTORS] = {0};
    const float *weight = t->weight, *ahead = t->ahead;
    for (long k = 0; k < t->length; k++, weight += KF_PANEL) {
        vec w[VECTORS];
        if (every && !(k & (every - 1))) {
            __builtin_prefetch(ahead, 0, 2);
            ahead += KF_PANEL;
        }
        for (int v = 0; v < VECTORS; v++)
            w[v] = load(weight + v * LANES);
        for (int i = 0; i < tokens; i++) {
            vec x = splat(t->input[i * t->stride + k]);
            for (int v = 0; v < VECTORS; v++)
                sum[i][v] += x * w[v];
        }
    }
    for (int i = 0; i < tokens; i++)
        add_sums(t->output + (long)i * t->outputs, sum[i], t->columns);
}

#define CASE(N)                                                                                                        \
    case N:                                                                                                            \
        if (N <= TILE)                                                                                                 \
            multiply_tile(t, N <= TILE ? N : TILE, every);                                                             \
        break;

INLINE void multiply_tokens(const tile *t, int tokens, const int every)
{
    switch (tokens) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
}

static TARGET void multiply_and_fetch(const tile *t, int tokens, int every)
{
    if (every == 1)
        multiply_tokens(t, tokens, 1);
    else if (every == 2)
        multiply_tokens(t, tokens, 2);
    else if (every == 4)
        multiply_tokens(t, tokens, 4);
    else
        multiply_tokens(t, tokens, 0);
}

/* All tokens by `length` inputs of a panel, from `begin` on; tiles of as equal size as may be. */
INLINE void multiply_portion(const kf_product *p, int panel, long begin, long length)
{
    const float *weight = p->weight + (panel * (long)p->inputs + begin) * KF_PANEL, *behind = weight + length * KF_PANEL;
    int tiles = (p->tokens + TILE - 1) / TILE, fetchers = tiles >= FETCHERS ? FETCHERS : tiles > 1 ? 2 : 1;
    int left = p->outputs - panel * KF_PANEL;
    tile t = {p->input + begin, weight, behind, p->output + (long)panel * KF_PANEL, p->inputs, length, p->outputs,
              left < KF_PANEL ? left : KF_PANEL};
    for (int i = 0, token = 0; i < tiles; i++) {
        int tokens = (p->tokens - token + tiles - i - 1) / (tiles - i);
        multiply_and_fetch(&t, tokens, i < fetchers ? fetchers : 0);
        t.input += tokens * t.stride;
        t.output += (long)tokens * t.outputs;
        t.ahead += length / fetchers * KF_PANEL;
        token += tokens;
    }
}

static TARGET void multiply(const kf_product *p, int begin, int end)
{
    long portions = (p->inputs + PORTION - 1) / PORTION, length = (p->inputs + portions - 1) / portions;
    int first = begin * KF_PANEL, last = end * KF_PANEL < p->outputs ? end * KF_PANEL : p->outputs;
    for (int token = 0; token < p->tokens; token++)
        for (int i = first; i < last; i++) {
            float *output = &p->output[(long)token * p->outputs + i];
            *output = (p->add ? *output : 0.0f) + (p->bias ? p->bias[i] : 0.0f);
        }
    for (int panel = begin; panel < end; panel++)
        for (long k = 0; k < p->inputs; k += length)
            multiply_portion(p, panel, k, k + length < p->inputs ? length : p->inputs - k);
}
