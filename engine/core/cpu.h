/* Which instruction sets the kernels may use. A kernel is compiled once for each variant, and which one runs is chosen
 * when it is called: `kf_best_variant` is the widest that this CPU runs and whose vectors divide rows of `floats`
 * floats (a multiple of 4). Tests force the others.
 */
#ifndef KVFERRY_ENGINE_CPU_H
#define KVFERRY_ENGINE_CPU_H

enum kf_variant { KF_PORTABLE = 0, KF_AVX2, KF_AVX512, KF_VARIANTS };

int kf_runs_variant(int variant, int floats);
int kf_best_variant(int floats);
#endif
