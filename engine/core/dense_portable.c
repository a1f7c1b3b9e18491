#define LANES 4
#define TARGET
#define DENSE_ROWS kf_dense_portable
#include "dense_kernel.h"
