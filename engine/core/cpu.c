#include "cpu.h"

int kf_runs_variant(int variant, int floats)
{
#ifdef __x86_64__
    if (variant == KF_AVX2)
        return floats % 8 == 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (variant == KF_AVX512)
        return floats % 16 == 0 && kf_runs_variant(KF_AVX2, floats) && __builtin_cpu_supports("avx512f");
#endif
    return variant == KF_PORTABLE && floats % 4 == 0;
}

int kf_best_variant(int floats)
{
    int best = KF_VARIANTS - 1;
    while (best > KF_PORTABLE && !kf_runs_variant(best, floats))
        best--;
    return best;
}
