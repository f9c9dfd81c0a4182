/* memory_storage.h: a file system in memory that remembers what is on the disk: what a loss of power leaves of it, and
 * calls that fail, are short or are interrupted where a test says so.
 *
 *     disk *d = disk_new();               d->table is a dtrain_storage
 *     d->fail_at = 7; d->error = EIO;     the 7th call fails; with d->fail_on every one after it too
 *     disk_lose_power(d, seed)            what was not synced is gone, kept, or torn, as the seed draws it; 0: gone
 *
 * A file's bytes are on the disk after sync of the file, names after sync of their directory, whichever operation made
 * them. Ranks are threads: one mutex for all calls. */
#ifndef DTRAIN_TEST_MEMORY_STORAGE_H
#define DTRAIN_TEST_MEMORY_STORAGE_H

enum { DISK_NODES = 4000, DISK_ENTRIES = 60, DISK_FILES = 200 };

typedef struct disk_entry {
    char name[64];
    int node;
} disk_entry;

typedef struct disk_names {
    disk_entry entries[DISK_ENTRIES];
    int count;
} disk_names;

typedef struct disk_node {
    bool directory, locked;
    unsigned char *data, *synced; /* (bytes), (synced_bytes) */
    size_t bytes, synced_bytes;
    disk_names *names, *synced_names;
} disk_node;

typedef struct disk {
    dtrain_storage table;
    pthread_mutex_t mutex;
    disk_node *nodes; /* 0 is the root */
    int node_count;
    int open[DISK_FILES]; /* node + 1 */
    /* faults */
    long calls, fail_at; /* from 1; 0: none */
    bool fail_on;
    int error;
    bool rough; /* transfers are short, and every third call is interrupted first */
    long turns;
    bool reads_only, writes_only; /* which calls count */
    char last_failed[64];
} disk;

static inline int disk_add(disk *d, bool directory)
{
    if (d->node_count == DISK_NODES) exit(3);
    disk_node *node = &d->nodes[d->node_count];
    memset(node, 0, sizeof *node);
    node->directory = directory;
    if (directory) {
        node->names = (disk_names *)calloc(1, sizeof *node->names);
        node->synced_names = (disk_names *)calloc(1, sizeof *node->synced_names);
        if (!node->names || !node->synced_names) exit(3);
    }
    return d->node_count++;
}

static inline disk_entry *disk_find(disk_names *names, const char *name, size_t length)
{
    for (int i = 0; i < names->count; i++)
        if (strlen(names->entries[i].name) == length &&
            memcmp(names->entries[i].name, name, length) == 0)
            return &names->entries[i];
    return NULL;
}

/* Walk to the directory that a path's last part is in: its node, and the part. -ENOENT, -ENOTDIR. */
static inline int disk_walk(disk *d, const char *path, const char **last)
{
    int at = 0;
    for (;;) {
        while (*path == '/') path++;
        const char *end = strchr(path, '/');
        *last = path;
        if (!end) return at;
        const disk_entry *entry = disk_find(d->nodes[at].names, path, (size_t)(end - path));
        if (!entry) return -ENOENT;
        at = entry->node;
        if (!d->nodes[at].directory) return -ENOTDIR;
        path = end;
    }
}

/* Count a call; not 0: it fails with this. */
static inline int disk_fault(disk *d, bool reads, const char *what)
{
    if (d->rough && ++d->turns % 3 == 0) return -EINTR;
    if ((d->reads_only && !reads) || (d->writes_only && reads)) return 0;
    d->calls++;
    if (!d->fail_at || d->calls < d->fail_at || (d->calls > d->fail_at && !d->fail_on)) return 0;
    snprintf(d->last_failed, sizeof d->last_failed, "%s", what);
    return -d->error;
}

#define DISK_ENTER(reads, what)            \
    disk *d = (disk *)user;                \
    pthread_mutex_lock(&d->mutex);         \
    int code = disk_fault(d, reads, what); \
    if (code) return pthread_mutex_unlock(&d->mutex), code
#define DISK_LEAVE(result) return pthread_mutex_unlock(&d->mutex), (result)

static inline int disk_open(void *user, const char *path, dtrain_storage_mode mode)
{
    const char *name;
    DISK_ENTER(mode == DTRAIN_STORAGE_READ, "open");
    const int in = disk_walk(d, path, &name);
    if (in < 0) DISK_LEAVE(in);
    disk_names *names = d->nodes[in].names;
    const disk_entry *entry = *name ? disk_find(names, name, strlen(name)) : NULL;
    int node = *name ? (entry ? entry->node : -1) : in, file = 0;
    if (node < 0 && (mode == DTRAIN_STORAGE_READ || mode == DTRAIN_STORAGE_DIRECTORY))
        DISK_LEAVE(-ENOENT);
    if (node >= 0 && mode == DTRAIN_STORAGE_CREATE) DISK_LEAVE(-EEXIST);
    if (node >= 0 && d->nodes[node].directory != (mode == DTRAIN_STORAGE_DIRECTORY))
        DISK_LEAVE(-ENOTDIR);
    if (node < 0) {
        if (names->count == DISK_ENTRIES || strlen(name) >= sizeof names->entries[0].name)
            DISK_LEAVE(-ENOSPC);
        node = disk_add(d, false);
        snprintf(names->entries[names->count].name, sizeof names->entries[0].name, "%s", name);
        names->entries[names->count++].node = node;
    }
    if (mode == DTRAIN_STORAGE_LOCK && d->nodes[node].locked) DISK_LEAVE(-EAGAIN);
    if (mode == DTRAIN_STORAGE_LOCK) d->nodes[node].locked = true;
    while (file < DISK_FILES && d->open[file]) file++;
    if (file == DISK_FILES) DISK_LEAVE(-EMFILE);
    d->open[file] = node + 1;
    DISK_LEAVE(file);
}

static inline int64_t disk_read(void *user, int file, void *to, size_t bytes, uint64_t offset)
{
    DISK_ENTER(true, "read");
    const disk_node *node = &d->nodes[d->open[file] - 1];
    if (offset >= node->bytes) DISK_LEAVE(0);
    if (bytes > node->bytes - offset) bytes = node->bytes - (size_t)offset;
    if (d->rough && bytes > 1) bytes = 1 + bytes / 2;
    memcpy(to, node->data + offset, bytes);
    DISK_LEAVE((int64_t)bytes);
}

static inline int64_t disk_write(void *user, int file, const void *from, size_t bytes,
                                 uint64_t offset)
{
    DISK_ENTER(false, "write");
    disk_node *node = &d->nodes[d->open[file] - 1];
    if (d->rough && bytes > 1) bytes = 1 + bytes / 2;
    if (offset + bytes > node->bytes) {
        node->data = (unsigned char *)realloc(node->data, (size_t)offset + bytes);
        if (!node->data) exit(3);
        if (offset > node->bytes) memset(node->data + node->bytes, 0, (size_t)offset - node->bytes);
        node->bytes = (size_t)offset + bytes;
    }
    memcpy(node->data + offset, from, bytes);
    DISK_LEAVE((int64_t)bytes);
}

static inline int64_t disk_size(void *user, int file)
{
    disk *d = (disk *)user;
    pthread_mutex_lock(&d->mutex);
    int code = disk_fault(d, true, "size");
    if (code && code != -EINTR) DISK_LEAVE(code);
    DISK_LEAVE((int64_t)d->nodes[d->open[file] - 1].bytes);
}

static inline void disk_node_sync(disk_node *node)
{
    if (node->directory) {
        *node->synced_names = *node->names;
        return;
    }
    free(node->synced);
    node->synced = (unsigned char *)malloc(node->bytes + 1);
    if (!node->synced) exit(3);
    if (node->bytes) memcpy(node->synced, node->data, node->bytes);
    node->synced_bytes = node->bytes;
}

static inline int disk_sync(void *user, int file)
{
    DISK_ENTER(false, "sync");
    disk_node_sync(&d->nodes[d->open[file] - 1]);
    DISK_LEAVE(0);
}

/* A close that fails has closed the file all the same. */
static inline int disk_close(void *user, int file)
{
    disk *d = (disk *)user;
    pthread_mutex_lock(&d->mutex);
    int code = disk_fault(d, true, "close");
    if (code == -EINTR) code = 0;
    d->nodes[d->open[file] - 1].locked = false;
    d->open[file] = 0;
    DISK_LEAVE(code);
}

static inline int disk_rename(void *user, const char *from, const char *to)
{
    const char *name, *new_name;
    disk *d = (disk *)user;
    pthread_mutex_lock(&d->mutex);
    int code = disk_fault(d, false, "rename");
    if (code && code != -EINTR) DISK_LEAVE(code);
    const int in = disk_walk(d, from, &name), out = disk_walk(d, to, &new_name);
    if (in < 0 || out < 0) DISK_LEAVE(-ENOENT);
    disk_names *names = d->nodes[in].names;
    disk_entry *entry = disk_find(names, name, strlen(name));
    disk_entry *old = disk_find(d->nodes[out].names, new_name, strlen(new_name));
    if (!entry) DISK_LEAVE(-ENOENT);
    if (old && d->nodes[old->node].directory && d->nodes[old->node].names->count)
        DISK_LEAVE(-ENOTEMPTY);
    const int node = entry->node;
    if (old) old->node = node;
    else if (in == out) snprintf(entry->name, sizeof entry->name, "%s", new_name);
    else {
        disk_names *to = d->nodes[out].names;
        if (to->count == DISK_ENTRIES) DISK_LEAVE(-ENOSPC);
        snprintf(to->entries[to->count].name, sizeof to->entries[0].name, "%s", new_name);
        to->entries[to->count++].node = node;
    }
    if (old || in != out) *entry = names->entries[--names->count];
    DISK_LEAVE(0);
}

static inline int disk_remove(void *user, const char *path)
{
    const char *name;
    disk *d = (disk *)user;
    pthread_mutex_lock(&d->mutex);
    int code = disk_fault(d, false, "remove");
    if (code && code != -EINTR) DISK_LEAVE(code);
    const int in = disk_walk(d, path, &name);
    if (in < 0) DISK_LEAVE(in);
    disk_names *names = d->nodes[in].names;
    disk_entry *entry = disk_find(names, name, strlen(name));
    if (!entry) DISK_LEAVE(-ENOENT);
    if (d->nodes[entry->node].directory && d->nodes[entry->node].names->count)
        DISK_LEAVE(-ENOTEMPTY);
    *entry = names->entries[--names->count];
    DISK_LEAVE(0);
}

static inline int disk_make_directory(void *user, const char *path)
{
    const char *name;
    disk *d = (disk *)user;
    pthread_mutex_lock(&d->mutex);
    int code = disk_fault(d, false, "make_directory");
    if (code && code != -EINTR) DISK_LEAVE(code);
    const int in = disk_walk(d, path, &name);
    if (in < 0) DISK_LEAVE(in);
    if (disk_find(d->nodes[in].names, name, strlen(name))) DISK_LEAVE(-EEXIST);
    const int node = disk_add(d, true);
    disk_names *names = d->nodes[in].names;
    if (names->count == DISK_ENTRIES) DISK_LEAVE(-ENOSPC);
    snprintf(names->entries[names->count].name, sizeof names->entries[0].name, "%s", name);
    names->entries[names->count++].node = node;
    DISK_LEAVE(0);
}

static inline int disk_list(void *user, const char *path,
                            void (*name_of)(void *list, const char *entry), void *list)
{
    const char *name;
    disk_names copy;
    disk *d = (disk *)user;
    pthread_mutex_lock(&d->mutex);
    int code = disk_fault(d, true, "list");
    if (code && code != -EINTR) DISK_LEAVE(code);
    const int in = disk_walk(d, path, &name);
    if (in < 0) DISK_LEAVE(in);
    const disk_entry *entry = disk_find(d->nodes[in].names, name, strlen(name));
    if (!entry) DISK_LEAVE(-ENOENT);
    if (!d->nodes[entry->node].directory) DISK_LEAVE(-ENOTDIR);
    copy = *d->nodes[entry->node].names;
    pthread_mutex_unlock(&d->mutex);
    for (int i = 0; i < copy.count; i++) name_of(list, copy.entries[i].name);
    return 0;
}

static inline disk *disk_new(void)
{
    disk *d = (disk *)calloc(1, sizeof *d);
    if (!d) exit(3);
    d->nodes = (disk_node *)calloc(DISK_NODES, sizeof *d->nodes);
    if (!d->nodes) exit(3);
    const dtrain_storage table = {d,           disk_open,           disk_read,  disk_write,
                                  disk_size,   disk_sync,           disk_close, disk_rename,
                                  disk_remove, disk_make_directory, disk_list};
    d->table = table;
    pthread_mutex_init(&d->mutex, NULL);
    disk_add(d, true);
    d->error = EIO;
    return d;
}

/* What a crash at this moment leaves: each file's unsynced bytes, and each directory's unsynced names, are gone, or
 * there, and of a file a part may be there and the rest zeros. */
static inline void disk_lose_power(disk *d, uint64_t seed)
{
    for (int i = 0; i < d->node_count; i++) {
        disk_node *node = &d->nodes[i];
        const uint64_t draw = seed ? ranks_random(&seed, 3) : 0;
        node->locked = false;
        if (node->directory) {
            if (draw == 0) *node->names = *node->synced_names;
            *node->synced_names = *node->names;
            continue;
        }
        if (draw == 0) {
            node->bytes = node->synced_bytes;
            if (node->bytes) memcpy(node->data, node->synced, node->bytes);
        } else if (draw == 1 && node->bytes > node->synced_bytes) {
            const size_t torn =
                node->synced_bytes + (size_t)ranks_random(&seed, node->bytes - node->synced_bytes);
            memset(node->data + torn, 0, node->bytes - torn);
        }
        disk_node_sync(node);
    }
    memset(d->open, 0, sizeof d->open);
    d->fail_at = 0;
    d->calls = 0;
    d->rough = false;
}

static inline void disk_free(disk *d)
{
    for (int i = 0; i < d->node_count; i++) {
        free(d->nodes[i].data);
        free(d->nodes[i].synced);
        free(d->nodes[i].names);
        free(d->nodes[i].synced_names);
    }
    free(d->nodes);
    free(d);
}

/* A copy that goes its own way, with no file open. */
static inline disk *disk_copy(const disk *from)
{
    disk *d = disk_new();
    for (int i = 0; i < from->node_count; i++) {
        const disk_node *old = &from->nodes[i];
        const int at = i ? disk_add(d, old->directory) : 0;
        disk_node *node = &d->nodes[at];
        if (old->directory) {
            *node->names = *old->names;
            *node->synced_names = *old->synced_names;
            continue;
        }
        node->bytes = old->bytes;
        node->synced_bytes = old->synced_bytes;
        node->data = (unsigned char *)malloc(old->bytes + 1);
        node->synced = (unsigned char *)malloc(old->synced_bytes + 1);
        if (!node->data || !node->synced) exit(3);
        if (old->bytes) memcpy(node->data, old->data, old->bytes);
        if (old->synced_bytes) memcpy(node->synced, old->synced, old->synced_bytes);
    }
    return d;
}

#endif
