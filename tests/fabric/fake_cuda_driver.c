/* The one function of libcuda that the fabric calls: pages that it is asked for become a descriptor. */
#include <fcntl.h>
#include <stddef.h>

int cuMemGetHandleForAddressRange(void *handle, unsigned long long address, size_t size, int type,
                                  unsigned long long flags) {
    if (address % 4096 || size % 4096 || type != 1 || flags) return 1;
    *(int *)handle = open("/dev/null", O_RDONLY);
    return 0;
}
