#include "cpu.h"

int kf_runs_variant(int variant)
{
    if (variant == KF_PORTABLE)
        return 1;
#ifdef __x86_64__
    if (variant == KF_AVX2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (variant == KF_AVX512)
        return kf_runs_variant(KF_AVX2) && __builtin_cpu_supports("avx512f");
#endif
    return 0;
}

int kf_best_variant(void)
{
    int best = KF_VARIANTS - 1;
    while (!kf_runs_variant(best))
        best--;
    return best;
}
