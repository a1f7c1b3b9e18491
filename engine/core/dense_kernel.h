/* Body of the variants of kf_dense_rows; DENSE_ROWS names the one that is being compiled. */
#include <math.h>

#include "dense_rows.h"
#include "vector.h"

#include "multiply_kernel.h"

static TARGET void normalise(const float *row, const float *weight, float epsilon, int width, float *output)
{
    vec squares = {0};
    for (int i = 0; i < width; i += LANES)
        squares += load(row + i) * load(row + i);
    float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)width + epsilon);
    for (int i = 0; i < width; i += LANES)
        store(output + i, load(row + i) * scale * load(weight + i));
}

/* The first half of a head and the second are the two coordinates that turn. */
static TARGET void rotate(float *head, const float *cosines, const float *sines, int head_dim)
{
    int half = head_dim / 2;
    for (int i = 0; i < half; i += LANES) {
        vec x = load(head + i), y = load(head + half + i);
        store(head + i, x * load(cosines + i) - y * load(sines + i));
        store(head + half + i, y * load(cosines + half + i) + x * load(sines + half + i));
    }
}

static TARGET void gate(const float *gate, const float *up, int width, float *output)
{
    for (int i = 0; i < width; i += LANES) {
        vec g = load(gate + i);
        store(output + i, g / (1.0f + exponential(-g)) * load(up + i));
    }
}

const kf_dense_rows DENSE_ROWS = {multiply, normalise, rotate, gate};
