#ifdef __x86_64__
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define DENSE_ROWS kf_dense_avx2
#include "dense_kernel.h"
#endif
