/* Products of tokens with rows of weights, as both lie in memory: nothing is packed or copied.
 *
 * Four tokens by three rows make twelve sums that stay in registers. The rows stay in the nearest cache while all
 * tokens of a block, which the next cache holds, pass by; meanwhile the next rows are fetched, so that memory and
 * arithmetic overlap. Each sum adds up in the same order whatever its neighbours are.
 */
enum {
    TOKENS = 4,
    ROWS = 3,
    BLOCK = 64,    /* tokens */
    PORTION = 2048, /* inputs at most: three rows of them fit the nearest cache */
};

/* Inputs begin..end. */
typedef struct {
    long begin, end;
} portion;

INLINE quad sum_each(vec a, vec b, vec c)
{
    vec parts = fold4(a, b, c, (vec){0});
    quad sum = ((const quad *)&parts)[0];
    for (int i = 1; i < LANES / 4; i++)
        sum += ((const quad *)&parts)[i];
    return sum;
}

INLINE void multiply_tile(const kf_product *p, portion part, long token, const int tokens, long row, const int rows,
                          const float *ahead, int fetched)
{
    const long stride = p->inputs;
    const float *input = p->input + token * stride, *weight = p->weight + row * stride;
    float *output = p->output + token * p->outputs + row;
    vec sum[TOKENS][ROWS] = {0};
    for (long k = part.begin; k < part.end; k += LANES) {
        vec w[ROWS];
        for (int j = 0; j < fetched; j++)
            __builtin_prefetch(ahead + j * stride + k);
        for (int j = 0; j < rows; j++)
            w[j] = load(weight + j * stride + k);
        for (int i = 0; i < tokens; i++) {
            vec x = load(input + i * stride + k);
            for (int j = 0; j < rows; j++)
                sum[i][j] += x * w[j];
        }
    }
    for (int i = 0; i < tokens; i++) {
        quad total = sum_each(sum[i][0], sum[i][1], sum[i][2]);
        for (int j = 0; j < rows; j++)
            output[i * (long)p->outputs + j] += total[j];
    }
}

/* Returns how many tokens it took. */
INLINE int multiply_some(const kf_product *p, portion part, int token, int end, int row, const int rows,
                         const float *ahead, int fetched)
{
    int left = end - token, taken = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    if (taken == 4)
        multiply_tile(p, part, token, 4, row, rows, ahead, fetched);
    else if (taken == 2)
        multiply_tile(p, part, token, 2, row, rows, ahead, fetched);
    else
        multiply_tile(p, part, token, 1, row, rows, ahead, fetched);
    return taken;
}

/* Tokens first..last. The `next` rows behind these are fetched meanwhile: one by each tile, more where tiles are few. */
INLINE void multiply_block(const kf_product *p, portion part, int first, int last, int row, const int rows, int next)
{
    const float *ahead = p->weight + (long)(row + rows) * p->inputs;
    int each = last - first > 2 * TOKENS ? 1 : last - first > TOKENS ? 2 : ROWS;
    for (int token = first; token < last;) {
        int fetched = next < each ? next : each;
        token += multiply_some(p, part, token, last, row, rows, ahead, fetched);
        ahead += (long)fetched * p->inputs;
        next -= fetched;
    }
}

INLINE void multiply_portion(const kf_product *p, portion part, int begin, int end)
{
    for (int first = 0; first < p->tokens; first += BLOCK) {
        int last = first + BLOCK < p->tokens ? first + BLOCK : p->tokens, row = begin;
        for (; row + ROWS <= end; row += ROWS)
            multiply_block(p, part, first, last, row, ROWS, row + 2 * ROWS <= end ? ROWS : 0);
        for (; row < end; row++)
            multiply_block(p, part, first, last, row, 1, 0);
    }
}

static TARGET void multiply(const kf_product *p, int begin, int end)
{
    int portions = (p->inputs + PORTION - 1) / PORTION, length = (p->inputs / LANES / portions + 1) * LANES;
    for (int token = 0; token < p->tokens; token++)
        for (int row = begin; row < end; row++) {
            float *output = &p->output[(long)token * p->outputs + row];
            *output = (p->add ? *output : 0.0f) + (p->bias ? p->bias[row] : 0.0f);
        }
    for (int k = 0; k < p->inputs; k += length)
        multiply_portion(p, (portion){k, k + length < p->inputs ? k + length : p->inputs}, begin, end);
}
