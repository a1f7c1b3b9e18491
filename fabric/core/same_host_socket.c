/* Unix sockets between processes of one host: names that nobody guesses, one user, whole packets, one file each.
 *
 * The names are abstract: there is no file to clean up, and a process of another network namespace (another pod that
 * does not use the host's network) cannot reach them, which is how it is found not to share the host.
 */
#define _GNU_SOURCE
#include "same_host.h"

#include <stdio.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define KF_SOCKET_KIND (SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK)

static socklen_t kf_address(struct sockaddr_un *address, const char *name, size_t size) {
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(address->sun_path + 1, name, size); /* the 0 before it makes it abstract */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + size);
}

/* Of the process that connected, or that listened. */
static bool kf_same_user(int socket) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    return !getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) && peer.uid == geteuid();
}

static int kf_close_with(int fd, int code) {
    close(fd);
    return -code;
}

/* Makes up a name of `size` - 1 characters. */
int kf_listen_locally(char *name, size_t size) {
    unsigned char random[16];
    if (getrandom(random, sizeof random, 0) != sizeof random) return -EAGAIN;
    int at = snprintf(name, size, "kvferry-");
    for (size_t i = 0; i < sizeof random; i++) at += snprintf(name + at, size - (size_t)at, "%02x", random[i]);
    int fd = socket(AF_UNIX, KF_SOCKET_KIND, 0);
    if (fd < 0) return -errno;
    struct sockaddr_un address;
    socklen_t length = kf_address(&address, name, strlen(name));
    if (bind(fd, (struct sockaddr *)&address, length) || listen(fd, 4)) return kf_close_with(fd, errno);
    return fd;
}

int kf_dial_locally(const char *name, size_t size) {
    struct sockaddr_un address;
    if (!size || size >= sizeof address.sun_path) return -EINVAL;
    int fd = socket(AF_UNIX, KF_SOCKET_KIND, 0);
    if (fd < 0) return -errno;
    socklen_t length = kf_address(&address, name, size);
    if (connect(fd, (struct sockaddr *)&address, length)) return kf_close_with(fd, errno);
    return kf_same_user(fd) ? fd : kf_close_with(fd, EACCES);
}

/* -EACCES: somebody was turned away; others may wait behind. */
int kf_accept_locally(int listener) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return -errno;
    return kf_same_user(fd) ? fd : kf_close_with(fd, EACCES);
}

/* `file`: -1 for none. */
int kf_send_packet(int socket, const kf_packet *packet, int file) {
    struct iovec bytes = {.iov_base = (void *)packet, .iov_len = sizeof *packet};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof file)] = {0};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
    if (file >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof file), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(header), &file, sizeof file);
    }
    return sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)sizeof *packet ? 0 : -errno;
}

static int kf_file_of(struct msghdr *message) {
    struct cmsghdr *header = CMSG_FIRSTHDR(message);
    int file = -1;
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS &&
        header->cmsg_len == CMSG_LEN(sizeof file))
        memcpy(&file, CMSG_DATA(header), sizeof file);
    return file;
}

/* 0: a packet, and the caller owns `file` if it is not -1. -EAGAIN: none yet. -ECONNRESET: closed by the other side.
 * -EPROTO: no packet of ours. */
int kf_receive_packet(int socket, kf_packet *packet, int *file) {
    struct iovec bytes = {.iov_base = packet, .iov_len = sizeof *packet};
    /* Room for one descriptor, not for what CMSG_SPACE rounds it up to: the kernel closes those that find none. */
    _Alignas(struct cmsghdr) char control[CMSG_LEN(sizeof *file)];
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (size < 0) return -errno;
    if (!size) return -ECONNRESET;
    *file = kf_file_of(&message);
    if (size == (ssize_t)sizeof *packet && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) return 0;
    if (*file >= 0) close(*file);
    return -EPROTO;
}
