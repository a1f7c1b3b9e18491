/* Attention of many queries over a tile's copy, in which keys are turned: a vector holds one dimension of several keys.
 * Six queries meet two vectors of keys, then two vectors of each value: either way twelve sums stay in registers, and
 * nothing is added up across lanes.
 */
enum {
    MANY = 6,          /* queries at once */
    PANEL = 2 * LANES, /* keys, or dimensions of a value, at once */
};

/* `keys`: panel by panel, [head_dim][PANEL]. `values`: [keys][head_dim]. */
typedef struct {
    const kf_tile *tile;
    float *keys, *values;
    long head_dim;
} copied_tile;

/* Of four vectors a, b, c, d, in every four lanes: the first lanes of them all, then the second ones... */
INLINE void turn_lanes(vec *row)
{
    vec even[2] = {SHUFFLE(row[0], row[1], EVEN_LANES), SHUFFLE(row[2], row[3], EVEN_LANES)};
    vec odd[2] = {SHUFFLE(row[0], row[1], ODD_LANES), SHUFFLE(row[2], row[3], ODD_LANES)};
    row[0] = SHUFFLE(even[0], even[1], EVEN_LANES);
    row[1] = SHUFFLE(odd[0], odd[1], EVEN_LANES);
    row[2] = SHUFFLE(even[0], even[1], ODD_LANES);
    row[3] = SHUFFLE(odd[0], odd[1], ODD_LANES);
}

/* The same with four lanes for one, as far as a vector has them: of vectors 0, 4... then 1, 5... */
INLINE void turn_quads(vec *row)
{
#if LANES == 8
    for (int i = 0; i < 4; i++) {
        vec a = row[i], b = row[i + 4];
        row[i] = SHUFFLE(a, b, EVEN_QUADS);
        row[i + 4] = SHUFFLE(a, b, ODD_QUADS);
    }
#elif LANES == 16
    for (int i = 0; i < 4; i++) {
        vec a = row[i], b = row[i + 4], c = row[i + 8], d = row[i + 12];
        vec even[2] = {SHUFFLE(a, b, EVEN_QUADS), SHUFFLE(c, d, EVEN_QUADS)};
        vec odd[2] = {SHUFFLE(a, b, ODD_QUADS), SHUFFLE(c, d, ODD_QUADS)};
        row[i] = SHUFFLE(even[0], even[1], EVEN_QUADS);
        row[i + 4] = SHUFFLE(odd[0], odd[1], EVEN_QUADS);
        row[i + 8] = SHUFFLE(even[0], even[1], ODD_QUADS);
        row[i + 12] = SHUFFLE(odd[0], odd[1], ODD_QUADS);
    }
#else
    (void)row;
#endif
}

/* LANES keys become LANES columns of a panel. */
INLINE void copy_keys(float *panel, const float *const *key, long head_dim)
{
    for (long d = 0; d < head_dim; d += LANES) {
        vec row[LANES];
        for (int i = 0; i < LANES; i++)
            row[i] = load(key[i] + d);
        turn_quads(row);
        for (int quad = 0; quad < LANES; quad += 4)
            turn_lanes(row + quad);
        for (int i = 0; i < LANES; i++)
            store(panel + (d + i) * PANEL, row[i]);
    }
}

INLINE copied_tile copy_tile(const kf_tile *tile, long head_dim, float *copy)
{
    copied_tile copied = {tile, copy, copy + COPIED_TILE * head_dim, head_dim};
    for (long i = 0; i < round_up(tile->count, PANEL); i += LANES)
        copy_keys(copied.keys + i / PANEL * PANEL * head_dim + i % PANEL, tile->keys + i, head_dim);
    for (long i = 0; i < tile->count; i++)
        for (long d = 0; d < head_dim; d += LANES)
            store(copied.values + i * head_dim + d, load(tile->values[i] + d));
    return copied;
}

/* Scores of a panel of keys. */
INLINE void multiply_panel(float *score, const float *const *query, const int group, long head_dim,
                           const float *panel, float scaling)
{
    vec sum[MANY][2] = {0};
#pragma GCC unroll 4
    for (long d = 0; d < head_dim; d++) {
        vec a = load(panel + d * PANEL), b = load(panel + d * PANEL + LANES);
        for (int j = 0; j < group; j++) {
            vec q = splat(query[j][d]);
            sum[j][0] += q * a;
            sum[j][1] += q * b;
        }
    }
    for (int j = 0; j < group; j++)
        for (int v = 0; v < 2; v++)
            store(score + j * COPIED_TILE + v * LANES, sum[j][v] * scaling);
}

/* Masks the scores of a query. Returns the largest that it has met in any tile. */
INLINE float mask_query(float *score, int padded, const kf_queries *queries, int query, const kf_tile *tile)
{
    span seen = visible(queries, query, tile);
    float before = queries->largest[query];
    if (queries->softcap != 0.0f)
        apply_softcap(score, padded, 1.0f, queries->softcap);
    fill(score, 0, seen.begin < padded ? seen.begin : padded, -INFINITY);
    fill(score, seen.end > 0 ? seen.end : 0, padded, -INFINITY);
    float now = largest_of(score, padded);
    return before > now ? before : now;
}

/* Scores become weights, 0 where a query does not see. `rescale`: what a query's output so far is worth now that the
 * largest score may be another. */
INLINE void weigh_many(float (*score)[COPIED_TILE], float *rescale, const int group, int padded, kf_queries *queries,
                       int begin, const kf_tile *tile)
{
    float shift[MANY];
    for (int j = 0; j < group; j++) {
        float now = mask_query(score[j], padded, queries, begin + j, tile);
        shift[j] = now == -INFINITY ? 0.0f : now;
        rescale[j] = queries->largest[begin + j] - shift[j];
        queries->largest[begin + j] = now;
    }
    for (int j = 0; j < group; j += LANES)
        store(rescale + j, exponential_below_89(load(rescale + j)));
    for (int j = 0; j < group; j++) {
        vec sum = load(queries->sum[begin + j]) * rescale[j];
#pragma GCC unroll 2
        for (int i = 0; i < padded; i += LANES) {
            vec weight = exponential_below_89(load(score[j] + i) - shift[j]);
            store(score[j] + i, weight);
            sum += weight;
        }
        store(queries->sum[begin + j], sum);
    }
}

/* Of the first `keys` values `vectors` vectors, from dimension `d` on. */
INLINE void add_weighted(float *const *output, const int group, const float *rescale, float (*weight)[COPIED_TILE],
                         const copied_tile *copied, long keys, long d, const int vectors)
{
    vec sum[MANY][2];
    for (int j = 0; j < group; j++)
        for (int v = 0; v < vectors; v++)
            sum[j][v] = load(output[j] + d + v * LANES) * rescale[j];
    const float *value = copied->values + d;
#pragma GCC unroll 4
    for (long i = 0; i < keys; i++, value += copied->head_dim) {
        vec part[2];
        for (int v = 0; v < vectors; v++)
            part[v] = load(value + v * LANES);
        for (int j = 0; j < group; j++) {
            vec w = splat(weight[j][i]);
            for (int v = 0; v < vectors; v++)
                sum[j][v] += w * part[v];
        }
    }
    for (int j = 0; j < group; j++)
        for (int v = 0; v < vectors; v++)
            store(output[j] + d + v * LANES, sum[j][v]);
}

INLINE void attend_many(kf_queries *queries, int begin, const int group, const copied_tile *copied)
{
    int end = visible(queries, begin + group - 1, copied->tile).end, padded = round_up(end, PANEL);
    if (visible(queries, begin, copied->tile).begin >= end)
        return;
    float score[MANY][COPIED_TILE], rescale[MOST_LANES] = {0}, *const *output = queries->output + begin;
    long d = 0;
    int i = 0;
    do {
        multiply_panel(score[0] + i, queries->query + begin, group, copied->head_dim,
                       copied->keys + i * copied->head_dim, queries->scaling);
        i += PANEL;
    } while (i < padded);
    weigh_many(score, rescale, group, padded, queries, begin, copied->tile);
    for (; d + PANEL <= copied->head_dim; d += PANEL)
        add_weighted(output, group, rescale, score, copied, end, d, 2);
    for (; d < copied->head_dim; d += LANES)
        add_weighted(output, group, rescale, score, copied, end, d, 1);
}

INLINE void fetch_keys(const kf_tile *next, int begin, int end, long head_dim)
{
    for (int i = begin; i < end && i < next->count; i++)
        for (long d = 0; d < head_dim; d += LINE) {
            __builtin_prefetch(next->keys[i] + d, 0, 2);
            __builtin_prefetch(next->values[i] + d, 0, 2);
        }
}

static TARGET void add_copied_tile(kf_queries *queries, const kf_tile *tile, const kf_tile *next, float *copy)
{
    copied_tile copied = copy_tile(tile, queries->head_dim, copy);
    for (int i = 0; i < queries->count;) {
        int left = queries->count - i, group = left >= MANY ? MANY : left >= 3 ? 3 : left;
        fetch_keys(next, COPIED_TILE * i / queries->count, COPIED_TILE * (i + group) / queries->count, copied.head_dim);
        if (group == MANY)
            attend_many(queries, i, MANY, &copied);
        else if (group == 3)
            attend_many(queries, i, 3, &copied);
        else if (group == 2)
            attend_many(queries, i, 2, &copied);
        else
            attend_many(queries, i, 1, &copied);
        i += group;
    }
}
