#ifdef __x86_64__
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define ATTENTION_TILES kf_attention_avx2
#include "attention_kernel.h"
#endif
