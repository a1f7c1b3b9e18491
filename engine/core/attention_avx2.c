#ifdef __x86_64__
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define ATTEND_TILE kf_attend_tile_avx2
#include "attention_kernel.h"
#endif
