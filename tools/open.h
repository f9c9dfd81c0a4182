/* open.h: how the programs open files: one to read can be no pipe that would wait for its writer, and one to write
 * under a name that others can guess ("FILE.tmp") is always a new file, never somebody's link. */
#ifndef OPEN_H
#define OPEN_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Open a file, or a pipe that somebody writes to, as the shell's <(...) is. NULL, and *why is the reason: it is
 * missing, a directory, a device, or a pipe without a writer, which a plain open would wait for. */
static inline FILE *open_to_read(const char *path, const char **why)
{
    struct stat about;
    char first = 0;
    ssize_t peeked = -1;
    FILE *file = NULL;
    const int descriptor = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    *why = NULL;
    if (descriptor < 0 || fstat(descriptor, &about) != 0) *why = strerror(errno);
    else if (S_ISDIR(about.st_mode)) *why = strerror(EISDIR);
    else if (S_ISFIFO(about.st_mode)) {
        peeked = read(descriptor, &first,
                      1); /* 0: no writer; EAGAIN: one that has written nothing yet */
        /* A pipe without a name, as /dev/stdin can be, had a writer: it has ended, and wrote nothing. */
        if (peeked == 0 && lstat(path, &about) == 0 && S_ISFIFO(about.st_mode))
            *why = "it is a pipe, and nobody writes to it";
        else if (peeked < 0 && errno != EAGAIN) *why = strerror(errno);
    } else if (!S_ISREG(about.st_mode)) *why = "it is no regular file";
    if (!*why && (fcntl(descriptor, F_SETFL, 0) != 0 || !(file = fdopen(descriptor, "rb"))))
        *why = strerror(errno);
    if (file && peeked == 1) (void)ungetc((unsigned char)first, file);
    if (!file && descriptor >= 0) close(descriptor);
    return file;
}

/* Open a file that is renamed when it is complete. What has its name is removed: the rest of an earlier run, or a
 * link, which would be followed to a file that has nothing to do with this. */
static inline FILE *open_new(const char *path)
{
    if (unlink(path) != 0 && errno != ENOENT) return NULL;
    const int descriptor = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "wb");
    if (descriptor >= 0 && !file) close(descriptor);
    return file;
}

/* Make the folders that the path of a file names. Return 0, or -1 with errno. */
static inline int make_folders(const char *path)
{
    char folder[4096];
    struct stat about;
    if (strlen(path) >= sizeof folder) return errno = ENAMETOOLONG, -1;
    for (const char *at = path; (at = strchr(at + 1, '/')) != NULL;) {
        snprintf(folder, sizeof folder, "%.*s", (int)(at - path), path);
        if (mkdir(folder, 0777) == 0 || errno == EEXIST) continue;
        const int error = errno; /* of what is there mkdir may say that it is on a read-only disk */
        if (stat(folder, &about) != 0) return errno = error, -1;
    }
    return 0;
}

/* Tell by writing to its folder whether a file can be made at a path; the folders are made. A file that is there is
 * not touched; it will be replaced, or written to as it is. NULL: it can be written, otherwise the reason. */
static inline const char *why_not_written(const char *path, bool replaced)
{
    char probe[4096];
    struct stat about;
    const size_t length = strlen(path);
    if (!length || path[length - 1] == '/' || (stat(path, &about) == 0 && S_ISDIR(about.st_mode)))
        return strerror(EISDIR);
    if (make_folders(path) != 0) return strerror(errno);
    if (!replaced && stat(path, &about) == 0)
        return access(path, W_OK) == 0 ? NULL : strerror(errno);
    if (snprintf(probe, sizeof probe, "%s.tmp", path) >= (int)sizeof probe)
        return strerror(ENAMETOOLONG);
    FILE *file = open_new(probe);
    if (!file) return strerror(errno);
    const bool written = putc(0, file) == 0 && fflush(file) == 0; /* a full disk, a quota */
    const int error = errno;
    fclose(file);
    unlink(probe);
    return written ? NULL : strerror(error);
}

#endif /* OPEN_H */
