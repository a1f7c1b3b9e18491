/* Registers one memory of a CUDA device with a provider that a script plays, and says what that provider was asked.
 *
 *     scripted_registration [refuse-dmabuf] [refuse-address]
 */
#include "internal.h"

#include <fcntl.h>
#include <stdio.h>

static bool refuse_dmabuf, refuse_address;
static int given_fd = -1;

static int script_close(struct fid *fid) { return 0; }

static int script_register(struct fid *fid, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **mr) {
    static struct fi_ops ops = {.size = sizeof ops, .close = script_close};
    static struct fid_mr made = {.fid = {.ops = &ops}, .key = 77};
    bool by_dmabuf = false, remote = attr->access & FI_REMOTE_WRITE && attr->access & FI_WRITE;
    const void *address = NULL;
    size_t length = 0;
#ifdef FI_MR_DMABUF
    if (flags & FI_MR_DMABUF) {
        by_dmabuf = true;
        address = attr->dmabuf->base_addr;
        length = attr->dmabuf->len;
        given_fd = attr->dmabuf->offset ? -1 : attr->dmabuf->fd;
        if (fcntl(given_fd, F_GETFD) < 0) return -FI_EINVAL;
    }
#endif
    if (!by_dmabuf) address = attr->mr_iov->iov_base, length = attr->mr_iov->iov_len;
    printf("%s %p %zu cuda=%d device=%d key=%#llx remote=%d\n", by_dmabuf ? "dmabuf" : "address", address, length,
           attr->iface == FI_HMEM_CUDA && attr->iov_count == 1, attr->device.cuda,
           (unsigned long long)attr->requested_key, remote);
    if (by_dmabuf ? refuse_dmabuf : refuse_address) return -FI_EOPNOTSUPP;
    *mr = &made;
    return 0;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        refuse_dmabuf |= !strcmp(argv[i], "refuse-dmabuf");
        refuse_address |= !strcmp(argv[i], "refuse-address");
    }
    static struct fi_ops_mr mr_ops = {.size = sizeof mr_ops, .regattr = script_register};
    static struct fid_domain domain = {.mr = &mr_ops};
    static struct fi_domain_attr attr = {.mr_mode = FI_MR_VIRT_ADDR, .mr_key_size = 2};
    static struct fi_info info = {.domain_attr = &attr};
    static kf_engine engine = {.rails[0] = {.info = &info, .domain = &domain}, .options.rail_count = 1};
    kf_node_init(&engine.regions);
    kf_node_init(&engine.endpoints);
    kf_memory memory = {
        .address = 0x200000, .length = 5000, .key = 0x12345, .cuda_device = 3, .file = -1, .rails = 1};
    kf_error error;
    kf_region *region = kf_register(&engine, &memory, &error);
    if (given_fd >= 0 && fcntl(given_fd, F_GETFD) >= 0) return puts("the descriptor was left open"), 1;
    if (!region) return printf("refused %s %d\n", error.call, error.code), 0;
    printf("registered key=%llu base=%#llx dmabuf=%d\n", (unsigned long long)kf_region_key(region, 0),
           (unsigned long long)kf_region_base(region), kf_region_is_dmabuf(region));
    kf_deregister(&engine, region);
    return engine.counters.regions ? 1 : 0;
}
