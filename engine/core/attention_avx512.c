#ifdef __x86_64__
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx2,fma")))
#define ATTENTION_TILES kf_attention_avx512
#include "attention_kernel.h"
#endif
