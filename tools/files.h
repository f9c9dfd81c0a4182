/* files.h: a whole file in memory. Include it after dtrain.h. */
#ifndef FILES_H
#define FILES_H

#include "tools/open.h"

#include <stdlib.h>

/* Read a file; *text (*bytes, and a 0 behind them) is freed with free. */
static inline dtrain_result read_file(const char *path, char **text, size_t *bytes)
{
    static const char pointer[] = "version https://git-lfs";
    const char *why;
    FILE *file = open_to_read(path, &why);
    size_t room = 1 << 16;
    bool good = file != NULL;
    *text = NULL;
    *bytes = 0;
    errno = 0;
    for (char *more; good && (more = (char *)realloc(*text, room)) != NULL; room *= 2) {
        *text = more;
        *bytes += fread(more + *bytes, 1, room - *bytes, file);
        if (*bytes < room) break;
    }
    good = good && *text && !ferror(file) && *bytes < room;
    if (file) fclose(file);
    if (good) (*text)[*bytes] = 0;
    const bool refused = good && strncmp(*text, pointer, sizeof pointer - 1) == 0;
    if (good && !refused) return DTRAIN_OK;
    free(*text);
    *text = NULL;
    if (refused)
        return dtrain_fail(DTRAIN_ERROR_DATA,
                           "%s is a pointer of git-lfs: git lfs pull gets the file", path);
    return dtrain_fail(DTRAIN_ERROR_FILE, "%s cannot be read: %s", path,
                       why ? why : strerror(errno ? errno : ENOMEM));
}

#endif /* FILES_H */
