#include "attention.h"

int kf_attention_tile(void)
{
    return 32;
}
