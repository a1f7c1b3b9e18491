#define LANES 4
#define TARGET
#define ATTENTION_TILES kf_attention_portable
#include "attention_kernel.h"
