/* Registering memory of a CUDA device. By dmabuf where this libfabric and the driver know it, else by address: then
 * the provider has to find the pages by itself (through nvidia-peermem, or a dmabuf of its own). */
#include "internal.h"

#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>

#ifdef FI_MR_DMABUF
#define KF_PAGE 4096ull
#define KF_HANDLE_DMA_BUF_FD 1 /* CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD */

typedef int (*kf_range_handle)(void *handle, unsigned long long address, size_t size, int type,
                               unsigned long long flags);

/* A descriptor of these pages, the caller's to close, or -1 where the driver has none to give. */
static int kf_export_dmabuf(uint64_t address, uint64_t length) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) return -1;
    kf_range_handle range_handle = (kf_range_handle)dlsym(driver, "cuMemGetHandleForAddressRange");
    int fd = -1;
    uint64_t whole = (length + KF_PAGE - 1) / KF_PAGE * KF_PAGE;
    if (!range_handle || address % KF_PAGE || range_handle(&fd, address, whole, KF_HANDLE_DMA_BUF_FD, 0)) fd = -1;
    dlclose(driver);
    return fd;
}

/* The provider keeps what it needs of the descriptor. */
static int kf_register_dmabuf(struct fid_domain *domain, struct fi_mr_attr attr, uint64_t address, uint64_t length,
                              struct fid_mr **mr) {
    struct fi_mr_dmabuf dmabuf = {.len = length, .base_addr = (void *)address};
    dmabuf.fd = kf_export_dmabuf(address, length);
    if (dmabuf.fd < 0) return -FI_ENOSYS;
    attr.dmabuf = &dmabuf;
    int rc = fi_mr_regattr(domain, &attr, FI_MR_DMABUF, mr);
    close(dmabuf.fd);
    return rc;
}
#endif

/* Returns 0, or the negative FI_E... value of the registration by address, which is tried last. */
int kf_register_device(const kf_rail *rail, const kf_memory *memory, uint64_t access, uint64_t key, bool *dmabuf,
                       struct fid_mr **mr) {
    struct iovec pages = {.iov_base = (void *)memory->address, .iov_len = memory->length};
    struct fi_mr_attr attr = {.iov_count = 1, .access = access, .requested_key = key, .iface = FI_HMEM_CUDA};
    attr.device.cuda = memory->cuda_device;
#ifdef FI_MR_DMABUF
    *dmabuf = !kf_register_dmabuf(rail->domain, attr, memory->address, memory->length, mr);
    if (*dmabuf) return 0;
#endif
    *dmabuf = false;
    attr.mr_iov = &pages;
    return fi_mr_regattr(rail->domain, &attr, 0, mr);
}
