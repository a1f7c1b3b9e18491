/* The dense parts of a decoder layer, float32: products with weights, root-mean-square norms, rotary positions, gates.
 *
 * Rows of `tokens` tokens lie one after the other, densely. Addresses are of floats. What a token's row becomes
 * depends on nothing but the row and the variant: neither on its neighbours nor on the number of threads. `variant` is
 * the widest allowed; rows that its vectors do not divide take a narrower one. The widths of norms,
 * heads and gates are multiples of 4; products have any.
 */
#ifndef KVFERRY_ENGINE_DENSE_H
#define KVFERRY_ENGINE_DENSE_H
#include <stdint.h>

enum { KF_PANEL = 16 };

/* Weights lie in panels of KF_PANEL outputs, the last one filled up with zeros: one output's weights for one input stand
 * beside those of its neighbours for the same input. */
typedef struct {
    uint64_t weight; /* [panels][inputs][KF_PANEL] */
    uint64_t bias;   /* [outputs]; 0: none */
    int32_t inputs, outputs;
} kf_linear;

typedef struct {
    uint64_t weight; /* [width] */
    int32_t width;
    float epsilon;
} kf_norm;

/* What is done to the heads of queries and keys before attention. A token holds `queries` heads, then `keys` heads,
 * then as many of values. `head_dim` is a multiple of 8. A norm of width 0 is none. */
typedef struct {
    int32_t queries, keys, head_dim;
    kf_norm query_norm, key_norm;
} kf_heads;

/* [tokens][outputs] = input [tokens][inputs] * weight^T + bias; `add`: that is added to what the output holds. */
void kf_multiply(const kf_linear *linear, uint64_t input, int tokens, uint64_t output, int add, int threads,
                 int variant);

void kf_normalise(const kf_norm *norm, uint64_t input, int tokens, uint64_t output, int threads, int variant);

/* In place: norms, then the rotation by a token's `cosines` and `sines`, each [tokens][head_dim]. */
void kf_place_heads(const kf_heads *heads, uint64_t packed, uint64_t cosines, uint64_t sines, int tokens, int threads,
                    int variant);

/* [tokens][width] = silu(gate) * up; `input` [tokens][2][width] holds gate and up. */
void kf_gate(uint64_t input, int width, int tokens, uint64_t output, int threads, int variant);
#endif
