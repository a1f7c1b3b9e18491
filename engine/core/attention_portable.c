#define LANES 4
#define TARGET
#define ATTEND_TILE kf_attend_tile_portable
#include "attention_kernel.h"
