#ifdef __x86_64__
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx2,fma")))
#define ATTEND_TILE kf_attend_tile_avx512
#include "attention_kernel.h"
#endif
