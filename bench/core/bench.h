/* What the benchmarks need done without the GIL: the limits that writes are compared with, and a device's beat. */
#include <stdint.h>

/* Sends `writes` pages of `page` bytes from `pool`, over and over it. 0 or -errno. */
int kb_send(int fd, const uint8_t *pool, int64_t pool_bytes, int64_t page, int64_t writes);

/* Receives as many, each into a page of `pool`. 0, -errno, or -EPIPE where the stream ended. */
int kb_receive(int fd, uint8_t *pool, int64_t pool_bytes, int64_t page, int64_t writes);

/* Copies as many, page by page, within one process. */
void kb_copy(uint8_t *to, const uint8_t *from, int64_t pool_bytes, int64_t page, int64_t writes);

/* Raises the word by one `steps` times, `period_ns` apart. moved_ns: CLOCK_MONOTONIC just before each store. */
void kb_advance(uint64_t *word, int64_t steps, int64_t period_ns, int64_t *moved_ns);
