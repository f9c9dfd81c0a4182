/* files.h: a separate folder for the data files that a test program writes, and functions that write them. Include it
 * after test.h. main calls files_begin before the tests and files_end after them: RUN_BESIDE's end in test_summary. */
#ifndef DTRAIN_TEST_FILES_H
#define DTRAIN_TEST_FILES_H

#include <fcntl.h>
#include <sys/stat.h>

static char folder[64];
static pid_t folder_owner; /* the process that removes it: ranks that are forked do not */

static inline bool files_end(void)
{
    char command[128];
    if (getpid() != folder_owner) return true;
    folder_owner = 0;
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) == 0;
}

static void files_leave(void) { (void)files_end(); } /* a program that a first failure ends */

static inline bool files_begin(const char *name)
{
    snprintf(folder, sizeof folder, "/tmp/dtrain_%s_XXXXXX", name);
    if (!mkdtemp(folder) || atexit(files_leave) != 0)
        return printf("  FAIL no folder %s\n", folder), false;
    folder_owner = getpid();
    return true;
}

/* The path of a file in the folder. A thread can use eight at once. */
static inline const char *path_of(const char *name)
{
    static __thread char paths[8][256];
    static __thread int turn;
    turn = (turn + 1) % 8;
    snprintf(paths[turn], sizeof paths[0], "%s/%s", folder, name);
    return paths[turn];
}

static inline void write_file(const char *name, const void *bytes, size_t count)
{
    FILE *file = fopen(path_of(name), "wb");
    CHECK(file && fwrite(bytes, 1, count, file) == count && fclose(file) == 0);
}

/* A file of llm.c: header words, then `bytes` of tokens. */
static inline void write_bin(const char *name, uint32_t magic, uint32_t version, uint32_t count,
                             const void *tokens, size_t bytes)
{
    static unsigned char image[1 << 20];
    uint32_t words[3];
    words[0] = magic, words[1] = version, words[2] = count;
    memset(image, 0, 1024);
    memcpy(image, words, sizeof words); /* tests run on little-endian hosts */
    memcpy(image + 1024, tokens, bytes);
    write_file(name, image, 1024 + bytes);
}

/* Move the clock of files on: within one tick of it two states of a file have the same time. */
static inline void wait_for_tick(const char *name)
{
    struct stat then, now;
    CHECK(stat(path_of(name), &then) == 0);
    do {
        write_file("tick", "", 1);
        CHECK(stat(path_of("tick"), &now) == 0);
    } while (now.st_mtim.tv_sec == then.st_mtim.tv_sec &&
             now.st_mtim.tv_nsec == then.st_mtim.tv_nsec);
    CHECK(unlink(path_of("tick")) == 0);
}

#endif
