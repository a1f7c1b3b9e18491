/* Which instruction sets the kernels may use. A kernel is compiled once for each variant; `kf_best_variant` is the
 * widest that this CPU runs. Tests force the others.
 */
#ifndef KVFERRY_ENGINE_CPU_H
#define KVFERRY_ENGINE_CPU_H

enum kf_variant { KF_PORTABLE = 0, KF_AVX2, KF_AVX512, KF_VARIANTS };

int kf_runs_variant(int variant);
int kf_best_variant(void);
#endif
