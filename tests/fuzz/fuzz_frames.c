/* fuzz_frames.c: the control frames of a rank that has lost its mind, as rank 0 and as another rank hear them.
 *
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -I. tests/fuzz/fuzz_frames.c -o fuzz_frames -lm -pthread
 *     ./fuzz_frames -max_total_time=30
 *
 * Byte 0 chooses who hears; the rest comes over the connection, in pieces. Wrong is: a crash, a sanitizer report, an
 * end or a record that is none, or a connection that closes and leaves its rank running. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

enum { RANKS = 3 };

static void say_nothing(void *user, dtrain_log_level level, int rank, const char *text)
{
    (void)user, (void)level, (void)rank, (void)text;
}

static void check_page(const dtrain__control *control)
{
    for (int i = 0; i < RANKS; i++) {
        const dtrain__exit_record *end = &control->exits[i];
        if (end->how > DTRAIN__LOST || !memchr(end->error, 0, sizeof end->error)) abort();
        if (end->after < 0 || end->after > RANKS || (control->waits[i] & 65535u) > RANKS) abort();
        for (int half = 0; half < 2; half++)
            if (control->slots[i].bytes[half] > DTRAIN_WORLD_ALL_GATHER_BYTES) abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static dtrain__region region;
    dtrain_world world;
    int pair[2];
    if (size < 2 || size > 60000) return 0;
    if (!region.control && dtrain__map_region(1 << 20, RANKS, NULL, -1, &region) != DTRAIN_OK)
        abort();
    memset(region.control->exits, 0, RANKS * sizeof region.control->exits[0]);
    memset(region.control->slots, 0, RANKS * sizeof region.control->slots[0]);
    memset(region.control->waits, 0, sizeof region.control->waits);
    region.control->ended_count = region.control->first_failed = 0;
    memset(&region.control->aborted, 0, sizeof region.control->aborted);
    memset(&world, 0, sizeof world);
    world.rank = data[0] % 2 ? 0 : 1;
    world.size = RANKS;
    world.control = region.control;
    world.timeout_ns = 1000000000u;
    world.log.write = say_nothing;
    world.allocator = dtrain__resolve_allocator(NULL);
    if (dtrain__link_create(&world) != DTRAIN_OK ||
        socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair))
        abort();
    for (int i = 0; i < world.link->count; i++) world.link->ends[i].socket = -1;
    const int end = world.rank ? 0 : 1; /* of the connection; and its rank */
    world.link->ends[end].socket = pair[0];
    for (size_t at = 1; at < size && world.link->ends[end].socket >= 0;) {
        const size_t piece = 1 + (data[at] * 37u) % 5000, left = size - at;
        const ssize_t sent = send(pair[1], data + at, piece < left ? piece : left, MSG_NOSIGNAL);
        char heard[4096];
        if (sent <= 0) break;
        at += (size_t)sent;
        dtrain__link_pump(&world, 0);
        while (recv(pair[1], heard, sizeof heard, 0) > 0) {}
        check_page(region.control);
    }
    close(pair[1]);
    for (int i = 0; i < 20 && world.link->ends[end].socket >= 0; i++) dtrain__link_pump(&world, 1);
    if (world.link->ends[end].socket >= 0 || region.control->exits[end].how == DTRAIN__RUNNING)
        abort();
    check_page(region.control);
    dtrain__link_destroy(&world);
    return 0;
}
