#define _GNU_SOURCE
#include "bench.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

#define KB_TIMER_SLACK_NS 1000 /* the default of 50 us would show in the beat */

static int64_t kb_now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

int kb_send(int fd, const uint8_t *pool, int64_t pool_bytes, int64_t page, int64_t writes) {
    for (int64_t i = 0; i < writes; i++) {
        const uint8_t *at = pool + i % (pool_bytes / page) * page;
        for (int64_t sent = 0; sent < page;) {
            ssize_t n = send(fd, at + sent, (size_t)(page - sent), MSG_NOSIGNAL);
            if (n < 0 && errno != EINTR) return -errno;
            if (n > 0) sent += n;
        }
    }
    return 0;
}

int kb_receive(int fd, uint8_t *pool, int64_t pool_bytes, int64_t page, int64_t writes) {
    for (int64_t i = 0; i < writes; i++) {
        uint8_t *at = pool + i % (pool_bytes / page) * page;
        for (int64_t got = 0; got < page;) {
            ssize_t n = recv(fd, at + got, (size_t)(page - got), 0);
            if (!n) return -EPIPE;
            if (n < 0 && errno != EINTR) return -errno;
            if (n > 0) got += n;
        }
    }
    return 0;
}

void kb_copy(uint8_t *to, const uint8_t *from, int64_t pool_bytes, int64_t page, int64_t writes) {
    for (int64_t i = 0; i < writes; i++) {
        int64_t at = i % (pool_bytes / page) * page;
        memcpy(to + at, from + at, (size_t)page);
    }
}

void kb_advance(uint64_t *word, int64_t steps, int64_t period_ns, int64_t *moved_ns) {
    prctl(PR_SET_TIMERSLACK, KB_TIMER_SLACK_NS);
    int64_t due = kb_now();
    for (int64_t i = 0; i < steps; i++) {
        due += period_ns;
        struct timespec until = {.tv_sec = due / 1000000000, .tv_nsec = due % 1000000000};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {}
        moved_ns[i] = kb_now();
        __atomic_store_n(word, *word + 1, __ATOMIC_RELEASE);
    }
}
