/* ports.h: TCP ports that no other test has. A port that is found by bind and then closed belongs to whoever is
 * faster; these cannot be lost: they lie below the range that the system hands out by itself, in blocks of
 * PORTS_BLOCK, and a process holds the lock of its block (a file in $TMPDIR) until it ends. The scripts take their
 * blocks in the same way (shell.sh). Include it after test.h. */
#ifndef DTRAIN_TEST_PORTS_H
#define DTRAIN_TEST_PORTS_H

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/socket.h>

enum { PORTS_FIRST = 20000, PORTS_BLOCK = 200, PORTS_BLOCKS = 60 };

/* Whether nobody has the port now: some other program may have chosen it. */
static inline bool ports_unused(uint16_t port)
{
    struct sockaddr_in address;
    const int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool unused;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    unused = bind(fd, (struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return unused;
}

/* The first port of a block that is this process's from now on. */
static inline int ports_lock(void)
{
    const char *folder = getenv("TMPDIR");
    const double end = test_seconds() + 60;
    char path[512];
    int block, fd;
    for (; test_seconds() < end; usleep(50000))
        for (block = 0; block < PORTS_BLOCKS; block++) {
            snprintf(path, sizeof path, "%s/dtrain_test_ports.%d", folder ? folder : "/tmp", block);
            fd = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0666);
            if (fd < 0) continue;
            if (flock(fd, LOCK_EX | LOCK_NB) == 0) return PORTS_FIRST + block * PORTS_BLOCK;
            close(fd);
        }
    fprintf(stderr, "all %d blocks of ports are taken (%s)\n", PORTS_BLOCKS, path);
    exit(3);
}

/* Another port with each call, until the block has been gone through. */
static inline uint16_t ports_next(void)
{
    static int first, used;
    int tries;
    if (!first) first = ports_lock();
    for (tries = 0; tries < PORTS_BLOCK; tries++) {
        const uint16_t port = (uint16_t)(first + used++ % PORTS_BLOCK);
        if (ports_unused(port)) return port;
    }
    fprintf(stderr, "ports %d to %d are all in use\n", first, first + PORTS_BLOCK - 1);
    exit(3);
}

#endif
