/* Files that two processes map: rings that we make, and parts of files that a peer offers. */
#define _GNU_SOURCE
#include "same_host.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* What is mapped and sealed so cannot be cut off: reading it never ends in SIGBUS. */
static bool kf_is_sealed(int file) {
    int seals = fcntl(file, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK);
}

/* A descriptor that can only be read from, of a memfd that may be or has been sealed; or a negative errno value. Who
 * maps it from now on maps it for reading, also by another descriptor (Linux 5.1); what is mapped stays as it is. */
int kf_open_for_peers(int file) {
    if (!kf_is_sealed(file) && fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) return -errno;
    fcntl(file, F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

/* `mapping->number` is its descriptor then, which the caller closes once it was offered. */
int kf_create_ring(uint64_t slots, kf_mapping *mapping) {
    int fd = memfd_create("kvferry-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -errno;
    kf_packet whole = {.number = (uint64_t)fd, .length = kf_ring_bytes(slots)};
    bool made = !ftruncate(fd, (off_t)whole.length) && !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
    int rc = made ? kf_map_sealed(fd, &whole, PROT_READ | PROT_WRITE, mapping) : -errno;
    if (rc) close(fd);
    return rc;
}

/* Whoever offers it may be hostile: the part must lie in the file, and the file must be sealed. */
int kf_map_sealed(int file, const kf_packet *offer, int protection, kf_mapping *mapping) {
    struct stat status;
    if (fstat(file, &status)) return -errno;
    uint64_t size = (uint64_t)status.st_size;
    if (!kf_is_sealed(file) || !offer->length || offer->offset > size || offer->length > size - offer->offset)
        return -EPROTO;
    uint64_t before = offer->offset % (uint64_t)sysconf(_SC_PAGESIZE);
    size_t bytes = offer->length + before;
    char *map = mmap(NULL, bytes, protection, MAP_SHARED, file, (off_t)(offer->offset - before));
    if (map == MAP_FAILED) return -errno;
    *mapping = (kf_mapping){.number = offer->number, .length = offer->length, .base = map + before, .map = map,
                            .map_bytes = bytes};
    return 0;
}

void kf_unmap(kf_mapping *mapping) {
    if (mapping->map) munmap(mapping->map, mapping->map_bytes);
    *mapping = (kf_mapping){0};
}
