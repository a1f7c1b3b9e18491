/* Attention over paged KV: float32, pages of [kv head][K, V][token][dim]. */
#ifndef KVFERRY_ENGINE_ATTENTION_H
#define KVFERRY_ENGINE_ATTENTION_H
#include <stdint.h>

int kf_attention_tile(void);
#endif
