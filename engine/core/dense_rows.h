/* The parts of dense work that are compiled for each variant: what one thread does. */
#ifndef KVFERRY_ENGINE_DENSE_ROWS_H
#define KVFERRY_ENGINE_DENSE_ROWS_H
#include "dense.h"

/* See kf_linear. */
typedef struct {
    const float *input, *weight, *bias;
    float *output;
    int inputs, outputs, tokens, add;
} kf_product;

typedef struct {
    void (*multiply)(const kf_product *product, int begin, int end); /* panels begin..end of all tokens */
    void (*normalise)(const float *row, const float *weight, float epsilon, int width, float *output);
    void (*rotate)(float *head, const float *cosines, const float *sines, int head_dim);
    void (*gate)(const float *gate, const float *up, int width, float *output);
} kf_dense_rows;

extern const kf_dense_rows kf_dense_portable, kf_dense_avx2, kf_dense_avx512;
#endif
