#ifdef __x86_64__
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx2,fma")))
#define DENSE_ROWS kf_dense_avx512
#include "dense_kernel.h"
#endif
