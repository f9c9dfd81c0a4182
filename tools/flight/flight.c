/* flight.c: which rank is behind, and in which call: reads what ranks wrote when a run failed or hung.
 *
 *   build:   make build/flight
 *   run:     build/flight DIRECTORY        (dtrain_world_options.flight_directory, DTRAIN_FLIGHT_DIRECTORY)
 *
 * What to expect: a line for each rank (the last collective that is done, the one it is in, since when), and one
 * sentence. A rank that wrote nothing hangs, is stopped or dead: what is said of it is what the others saw.
 * Exit status: 0 when there was a file to read, 1 when there was none, 2 when one could not be read.
 *
 * How it works: collectives are compared by communicator (its number and its first rank) and sequence number. What
 * a rank called after another one had given up is left out. Files of an attempt before the last restart are, too. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "tools/descriptors.h"
#include "tools/about.h"
#include "tools/open.h"
#include "tools/say.h"
#include "tools/integers.h"

#include <dirent.h>
#include <stdio.h>

enum {
    FLIGHT_NAME = 400
}; /* bytes of the name of a call, all of its parts as long as they can be */

typedef struct flight_call {
    int64_t comm, first, sequence, count, root, queued, ended;
    char kind[32], op[8], dtype[8], by[DTRAIN__EVENT_NAME + 32], state[8];
} flight_call;
typedef struct flight_view { /* of one rank by another */
    int64_t rank, silent, comm, first, sequence, world_started;
    bool inside;
    char end[200];
} flight_view;
typedef struct flight_group {
    int64_t comm, first, size, ranks[DTRAIN_MAX_RANKS];
} flight_group;
typedef struct flight_dump {
    int64_t rank, size, restart, result, now, first_failed;
    char host[256], error[1024];
    size_t calls, views, groups;
    flight_call call[DTRAIN__FLIGHT_RECORDS];
    flight_view view[DTRAIN_MAX_RANKS];
    flight_group
        group[64]; /* newest first; collectives of others have all ranks that recorded them */
} flight_dump;
typedef struct flight_field { /* of an object: where its value goes */
    const char *name;
    int64_t *number;
    char *text;
    size_t room;
    bool *flag;
    void (*item)(dtrain__json *json, flight_dump *dump);
} flight_field;

static flight_dump *flight_dumps[DTRAIN_MAX_RANKS]; /* NULL: the rank wrote nothing */
static int flight_size;

/* ---- Reading ------------------------------------------------------------------------------------------------ */

static void flight_read(dtrain__json *json, const flight_field *fields, flight_dump *dump)
{
    char name[40];
    if (!dtrain__json_enter(json, '{')) return;
    while (dtrain__json_member(json, name, sizeof name)) {
        const flight_field *field = fields;
        while (field->name && strcmp(field->name, name) != 0) field++;
        if (!field->name) (void)dtrain__json_skip(json);
        else if (field->number) (void)json_i64(json, field->number);
        else if (field->flag) (void)dtrain__json_bool(json, field->flag);
        else if (field->text) (void)json_label(json, field->text, field->room);
        else if (dtrain__json_enter(json, '['))
            while (dtrain__json_item(json)) field->item(json, dump);
    }
}
#define FLIGHT_NUMBER(name, at)          \
    {                                    \
        name, &(at), NULL, 0, NULL, NULL \
    }
#define FLIGHT_TEXT(name, at)                  \
    {                                          \
        name, NULL, at, sizeof(at), NULL, NULL \
    }
#define FLIGHT_END                      \
    {                                   \
        NULL, NULL, NULL, 0, NULL, NULL \
    }

static void flight_read_call(dtrain__json *json, flight_dump *dump)
{
    if (dump->calls == DTRAIN__FLIGHT_RECORDS) {
        (void)dtrain__json_fail(json, "too many collectives");
        return;
    }
    flight_call *c = &dump->call[dump->calls++];
    const flight_field fields[] = {FLIGHT_NUMBER("communicator", c->comm),
                                   FLIGHT_NUMBER("first", c->first),
                                   FLIGHT_NUMBER("count", c->count),
                                   FLIGHT_NUMBER("sequence", c->sequence),
                                   FLIGHT_NUMBER("root", c->root),
                                   FLIGHT_NUMBER("queued_ns", c->queued),
                                   FLIGHT_NUMBER("ended_ns", c->ended),
                                   FLIGHT_TEXT("kind", c->kind),
                                   FLIGHT_TEXT("op", c->op),
                                   FLIGHT_TEXT("dtype", c->dtype),
                                   FLIGHT_TEXT("of", c->by),
                                   FLIGHT_TEXT("state", c->state),
                                   FLIGHT_END};
    flight_read(json, fields, dump);
}
static void flight_read_view(dtrain__json *json, flight_dump *dump)
{
    if (dump->views == DTRAIN_MAX_RANKS) {
        (void)dtrain__json_fail(json, "too many ranks");
        return;
    }
    flight_view *v = &dump->view[dump->views++];
    const flight_field fields[] = {FLIGHT_NUMBER("rank", v->rank),
                                   FLIGHT_NUMBER("silent_ns", v->silent),
                                   FLIGHT_NUMBER("communicator", v->comm),
                                   FLIGHT_NUMBER("first", v->first),
                                   FLIGHT_TEXT("end", v->end),
                                   FLIGHT_NUMBER("sequence", v->sequence),
                                   FLIGHT_NUMBER("world_started", v->world_started),
                                   {"inside", NULL, NULL, 0, &v->inside, NULL},
                                   FLIGHT_END};
    flight_read(json, fields, dump);
}
static void flight_read_member(dtrain__json *json, flight_dump *dump)
{
    flight_group *group = &dump->group[dump->groups - 1];
    if (group->size == DTRAIN_MAX_RANKS) {
        (void)dtrain__json_fail(json, "too many ranks");
        return;
    }
    if (!json_i64(json, &group->ranks[group->size])) return;
    if (group->ranks[group->size] < 0 || group->ranks[group->size] >= DTRAIN_MAX_RANKS)
        (void)dtrain__json_fail(json, "there is no such rank");
    group->size++;
}
static void flight_read_group(dtrain__json *json, flight_dump *dump)
{
    if (dump->groups == 64) {
        (void)dtrain__json_skip(json);
        return;
    }
    flight_group *group = &dump->group[dump->groups++];
    const flight_field fields[] = {FLIGHT_NUMBER("communicator", group->comm),
                                   FLIGHT_NUMBER("first", group->first),
                                   {"ranks", NULL, NULL, 0, NULL, flight_read_member},
                                   FLIGHT_END};
    flight_read(json, fields, dump);
}

/* Read one file; NULL, with the last error, when that fails. */
static flight_dump *flight_load(const char *path)
{
    const char *why;
    FILE *file = open_to_read(path, &why);
    if (!file) return (void)dtrain_fail(DTRAIN_ERROR_FILE, "%s", why), (flight_dump *)NULL;
    const size_t room = (size_t)1 << 20;
    char *text = (char *)malloc(room);
    flight_dump *d = (flight_dump *)calloc(1, sizeof *d);
    size_t bytes = file && text ? fread(text, 1, room, file) : 0;
    bool good = false;
    if (file) fclose(file);
    if (text && d) {
        const flight_field fields[] = {FLIGHT_NUMBER("rank", d->rank),
                                       FLIGHT_NUMBER("size", d->size),
                                       FLIGHT_NUMBER("restart_count", d->restart),
                                       FLIGHT_NUMBER("result", d->result),
                                       FLIGHT_NUMBER("now_ns", d->now),
                                       FLIGHT_NUMBER("first_failed", d->first_failed),
                                       FLIGHT_TEXT("host", d->host),
                                       FLIGHT_TEXT("error", d->error),
                                       {"ranks", NULL, NULL, 0, NULL, flight_read_view},
                                       {"communicators", NULL, NULL, 0, NULL, flight_read_group},
                                       {"collectives", NULL, NULL, 0, NULL, flight_read_call},
                                       FLIGHT_END};
        dtrain__json json = dtrain__json_begin(path, text, bytes);
        flight_read(&json, fields, d);
        good = dtrain__json_end(&json) == DTRAIN_OK && d->size > 0 && d->size <= DTRAIN_MAX_RANKS &&
               d->rank >= 0 && d->rank < d->size && d->first_failed < d->size;
        for (size_t i = 0; i < d->views; i++) good = good && d->view[i].rank == (int64_t)i;
    }
    free(text);
    if (good) return d;
    if (d && d->size) (void)dtrain_fail(DTRAIN_ERROR_DATA, "it has numbers that cannot be");
    free(d);
    return NULL;
}

/* ---- Who is where ------------------------------------------------------------------------------------------- */

static bool flight_same(const flight_call *a, const flight_call *b)
{
    return a->comm == b->comm && a->first == b->first && a->sequence == b->sequence;
}
static bool flight_agrees(const flight_call *a, const flight_call *b)
{
    return !strcmp(a->kind, b->kind) && !strcmp(a->op, b->op) && !strcmp(a->dtype, b->dtype) &&
           a->count == b->count && a->root == b->root;
}
static bool flight_is_done(const flight_call *c) { return strcmp(c->state, "done") == 0; }

/* The oldest call that is not done; NULL: the rank is in none. */
static const flight_call *flight_current(const flight_dump *d)
{
    for (size_t i = 0; d && i < d->calls; i++)
        if (!flight_is_done(&d->call[i])) return &d->call[i];
    return NULL;
}
static const flight_call *flight_last_done(const flight_dump *d)
{
    for (size_t i = d ? d->calls : 0; i-- > 0;)
        if (flight_is_done(&d->call[i])) return &d->call[i];
    return NULL;
}
/* The call of any rank with the communicator and number of `key`. */
static const flight_call *flight_find(const flight_dump *d, const flight_call *key)
{
    for (size_t i = 0; d && i < d->calls; i++)
        if (flight_same(&d->call[i], key)) return &d->call[i];
    return NULL;
}

/* "#18 all-reduce sum f32 count 1024 (bucket 3, blocks.0.w)" */
static const char *flight_name(const flight_call *c, char text[FLIGHT_NAME])
{
    char where[64] = "", root[40] = "", number[32] = "";
    if (!c) return "-";
    if (c->comm > 0)
        snprintf(where, sizeof where, " of communicator %lld/%lld", (long long)c->comm,
                 (long long)c->first);
    if (c->root >= 0)
        snprintf(root, sizeof root, " %s %lld", c->sequence ? "root" : "peer", (long long)c->root);
    if (c->sequence) snprintf(number, sizeof number, "#%lld ", (long long)c->sequence);
    if (!c->kind[0] || strcmp(c->kind, "barrier") == 0 || strcmp(c->kind, "split") == 0)
        snprintf(text, FLIGHT_NAME, "%s%s%s", number, c->kind, where);
    else
        snprintf(text, FLIGHT_NAME, "%s%s%s%s %s count %lld%s%s%s%s%s", number, c->kind,
                 c->op[0] ? " " : "", c->op, c->dtype, (long long)c->count, root, where,
                 c->by[0] ? " (" : "", c->by, c->by[0] ? ")" : "");
    return text;
}

/* What the others saw of a rank: the latest view, that with the highest number. */
static const flight_view *flight_seen(int rank)
{
    const flight_view *best = NULL;
    for (int i = 0; i < flight_size; i++) {
        if (!flight_dumps[i] || flight_dumps[i]->views <= (size_t)rank) continue;
        const flight_view *v = &flight_dumps[i]->view[rank];
        if (!best || (v->end[0] && !best->end[0]) ||
            (!v->end[0] == !best->end[0] && v->world_started > best->world_started))
            best = v;
    }
    return best;
}

/* Find the rank's last call, by its own dump or what the others saw; NULL: none is known. */
static const flight_call *flight_last_call(int rank)
{
    const flight_dump *d = flight_dumps[rank];
    static flight_call key;
    if (d) return d->calls ? &d->call[d->calls - 1] : NULL;
    const flight_view *v = flight_seen(rank);
    if (!v || !v->sequence) return NULL;
    memset(&key, 0, sizeof key);
    key.comm = v->comm;
    key.first = v->first;
    key.sequence = v->sequence;
    key.root = -1;
    for (int i = 0; i < flight_size; i++)
        if (flight_find(flight_dumps[i], &key)) return flight_find(flight_dumps[i], &key);
    snprintf(key.kind, sizeof key.kind,
             "split"); /* nobody else has it: its number is all there is */
    return &key;
}

/* Has a rank called this? */
static bool flight_called(int rank, const flight_call *key)
{
    const flight_dump *d = flight_dumps[rank];
    const flight_view *v = flight_seen(rank);
    for (size_t i = 0; d && i < d->calls; i++)
        if (d->call[i].comm == key->comm && d->call[i].first == key->first &&
            d->call[i].sequence >= key->sequence)
            return true;
    if (d || !v) return false;
    return (key->comm == 0 && v->world_started >= key->sequence) ||
           (v->comm == key->comm && v->first == key->first && v->sequence >= key->sequence);
}

/* The ranks of a call: of its communicator or, for a message, the peer. Returns how many. */
static int flight_members(const flight_dump *d, const flight_call *c, int ranks[DTRAIN_MAX_RANKS])
{
    int n = 0;
    const flight_group *group = NULL;
    for (size_t i = 0; i < d->groups; i++)
        if (d->group[i].comm == c->comm && d->group[i].first == c->first) group = &d->group[i];
    for (int i = 0; group && i < (int)group->size; i++)
        if (group->ranks[i] < flight_size) ranks[n++] = (int)group->ranks[i];
    for (int i = 0; !group && i < flight_size; i++)
        if (c->comm <= 0 || flight_find(flight_dumps[i], c)) ranks[n++] = i;
    if (c->sequence || c->root < 0 || c->root >= n) return n;
    ranks[0] = ranks[c->root];
    return 1;
}

/* ---- The sentence ------------------------------------------------------------------------------------------- */

/* Ranks called different things by one number: the lowest such number. */
static bool flight_disagreement(void)
{
    const flight_call *one = NULL, *other = NULL;
    char text[FLIGHT_NAME];
    int a = 0, b = 0;
    for (int i = 0; i < flight_size; i++)
        for (size_t k = 0; flight_dumps[i] && k < flight_dumps[i]->calls; k++) {
            const flight_call *c = &flight_dumps[i]->call[k];
            for (int j = 0; j < i && !flight_is_done(c) && c->sequence; j++) {
                const flight_call *found = flight_find(flight_dumps[j], c);
                if (!found || flight_agrees(found, c) || (one && one->sequence <= c->sequence))
                    continue;
                one = found, other = c, a = j, b = i;
            }
        }
    if (!one) return false;
    printf("rank %d and rank %d disagree: rank %d called %s, ", a, b, a, flight_name(one, text));
    printf("rank %d called %s\n", b, flight_name(other, text));
    return true;
}

/* A rank failed by itself, or died: the others only heard of it. */
static bool flight_culprit(void)
{
    char text[FLIGHT_NAME];
    for (int i = 0; i < flight_size; i++) {
        const flight_dump *d = flight_dumps[i];
        if (!d || d->result == DTRAIN_OK || d->result == DTRAIN_ERROR_TIMEOUT ||
            d->result == DTRAIN_ERROR_PEER || d->result == DTRAIN_ERROR_MISMATCH)
            continue;
        printf("rank %d failed by itself, its last call was %s: %s\n", i,
               flight_name(flight_last_call(i), text),
               d->error[0] ? d->error : "it returned another value than 0");
        return true;
    }
    for (int i = 0; i < flight_size; i++) {
        const int64_t first = flight_dumps[i] ? flight_dumps[i]->first_failed : -1;
        if (first < 0 || flight_dumps[first]) continue;
        printf("%s; its last call was %s\n", flight_seen((int)first)->end,
               flight_name(flight_last_call((int)first), text));
        return true;
    }
    return false;
}

/* "ranks 0, 1 and 3 wait": those that are in this call. */
static void flight_print_waiting(const flight_call *c)
{
    int ranks[DTRAIN_MAX_RANKS], n = 0;
    for (int i = 0; i < flight_size; i++) {
        const flight_call *own = flight_current(flight_dumps[i]);
        if (own && (own == c || (c->sequence && flight_same(own, c)))) ranks[n++] = i;
    }
    printf("rank%s", n == 1 ? "" : "s");
    for (int i = 0; i < n; i++) printf("%s %d", i == 0 ? "" : i + 1 == n ? " and" : ",", ranks[i]);
    printf(" wait%s", n == 1 ? "s" : "");
}

/* Count the calls of a dump from the last one of `rank` to c: what all ranks do in the same order leads from one to
 * the other. */
static int64_t flight_distance(const flight_dump *d, int rank, const flight_call *c)
{
    const flight_call *last = flight_last_call(rank);
    const flight_call *from = last && last->sequence ? flight_find(d, last) : NULL;
    return from ? c - from : (int64_t)DTRAIN__FLIGHT_RECORDS;
}

/* Find the rank that others wait for, in the next call which it has not called or, with `inside`, has called and
 * does not move on. A rank that says itself that it waits is none. */
static int flight_find_behind(bool inside, const flight_call **in)
{
    int ranks[DTRAIN_MAX_RANKS], behind = -1;
    int64_t distance = INT64_MAX;
    *in = NULL;
    for (int i = 0; i < flight_size; i++) {
        const flight_call *c = flight_current(flight_dumps[i]);
        const int n = c ? flight_members(flight_dumps[i], c, ranks) : 0;
        for (int k = 0; k < n; k++) {
            const int r = ranks[k];
            if (r == i || flight_current(flight_dumps[r]) || (inside && flight_dumps[r])) continue;
            const int64_t here = flight_distance(flight_dumps[i], r, c);
            if (flight_called(r, c) != inside || here > distance) continue;
            if (here == distance && *in && (*in)->queued <= c->queued) continue;
            *in = c;
            behind = r;
            distance = here;
        }
    }
    return behind;
}

static bool flight_behind(bool inside)
{
    const flight_call *c;
    char text[FLIGHT_NAME];
    const int r = flight_find_behind(inside, &c);
    if (r < 0) return false;
    const flight_view *v = flight_dumps[r] ? NULL : flight_seen(r);
    printf("rank %d is %s %s, where ", r, inside ? "stuck in" : "behind: it has not called",
           flight_name(c, text));
    flight_print_waiting(c);
    if (!inside) printf("; its last call was %s", flight_name(flight_last_call(r), text));
    if (v && v->silent >= 0)
        printf("; %s dtrain, silent for %.1f s", v->inside ? "inside of a call of" : "outside of",
               1e-9 * (double)v->silent);
    printf("%s%s\n", v && v->end[0] ? "; " : "", v ? v->end : "");
    return true;
}

static void flight_conclude(void)
{
    if (flight_disagreement() || flight_culprit() || flight_behind(false) || flight_behind(true))
        return;
    for (int i = 0; i < flight_size; i++) {
        if (!flight_dumps[i] || flight_dumps[i]->result == DTRAIN_OK) continue;
        printf("no rank is behind; rank %d says: %s\n", i, flight_dumps[i]->error);
        return;
    }
    printf("no rank has failed\n");
}

/* ---- The table ---------------------------------------------------------------------------------------------- */

/* Drop what was called after a rank of this host had given up waiting: its consequences. */
static void flight_drop_late(void)
{
    for (int i = 0; i < flight_size; i++) {
        const flight_call *c = flight_current(flight_dumps[i]);
        if (!c || flight_dumps[i]->result != DTRAIN_ERROR_TIMEOUT) continue;
        const int64_t end = c->ended;
        for (int j = 0; j < flight_size; j++) {
            flight_dump *d = flight_dumps[j];
            while (d && d->calls && strcmp(d->host, flight_dumps[i]->host) == 0 &&
                   d->call[d->calls - 1].queued > end)
                d->calls--;
        }
    }
}

static void flight_table(void)
{
    char done[FLIGHT_NAME], in[FLIGHT_NAME];
    printf("%-5s %-46s %-46s %s\n", "rank", "last done", "in", "since");
    for (int i = 0; i < flight_size; i++) {
        const flight_dump *d = flight_dumps[i];
        const flight_call *last = flight_last_done(d), *now = flight_current(d);
        const flight_view *v = flight_seen(i);
        if (d) {
            printf("%-5d %-46s %-46s ", i, flight_name(last, done),
                   now ? flight_name(now, in) : "no call");
            if (now || last)
                printf("%.1f s\n", 1e-9 * (double)(d->now - (now ? now->queued : last->ended)));
            else printf("-\n");
        } else {
            printf("%-5d called %-39s wrote no file%s%s%*s", i,
                   flight_name(flight_last_call(i), done), v && v->end[0] ? "; " : "",
                   v ? v->end : "", v && v->end[0] ? 1 : 34, "");
            if (v && v->silent >= 0) printf("%.1f s\n", 1e-9 * (double)v->silent);
            else printf("-\n");
        }
    }
}

/* Read flight-*.json, those of the latest attempt. */
static int flight_load_all(const char *directory)
{
    struct dirent *entry;
    char path[2048];
    int status = 0;
    int64_t restart = 0;
    DIR *dir = opendir(directory);
    while (dir && (entry = readdir(dir)) != NULL) {
        const size_t length = strlen(entry->d_name);
        if (strncmp(entry->d_name, "flight-", 7) != 0 || length < 5 ||
            strcmp(entry->d_name + length - 5, ".json") != 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", directory, entry->d_name);
        flight_dump *d = flight_load(path);
        if (!d) {
            say(stderr, "%s cannot be read: %s\n", path, dtrain_last_error());
            status = 2;
            continue;
        }
        if (d->restart > restart) restart = d->restart;
        if (d->size > flight_size) flight_size = (int)d->size;
        free(flight_dumps[d->rank]);
        flight_dumps[d->rank] = d;
    }
    if (dir) closedir(dir);
    for (int i = 0; i < flight_size; i++) {
        if (!flight_dumps[i] || flight_dumps[i]->restart == restart) continue;
        printf("rank %d: its file is of attempt %lld, the latest is %lld\n", i,
               (long long)flight_dumps[i]->restart, (long long)restart);
        free(flight_dumps[i]);
        flight_dumps[i] = NULL;
    }
    return status;
}

static void print_help(void)
{
    printf("flight DIRECTORY   says which rank of a failed run was in which call, of its files "
           "flight-RANK.json\n\n"
           "Ranks write them to DTRAIN_FLIGHT_DIRECTORY, or dtrain_world_options.flight_directory, "
           "when a run fails.\n\n"
           "examples\n"
           "  DTRAIN_FLIGHT_DIRECTORY=dumps ./program; flight dumps\n");
}

int main(int argc, char **argv)
{
    take_descriptors();
    if (about("flight", argc - 1, argv + 1, print_help)) return 0;
    const int status = argc == 2 ? flight_load_all(argv[1]) : 1;
    if (!flight_size) {
        say(stderr,
            argc == 2 ? "no flight-RANK.json in %s that can be read\n" : "flight DIRECTORY%s\n",
            argc == 2 ? argv[1] : "");
        return status ? status : 1;
    }
    flight_drop_late();
    flight_table();
    flight_conclude();
    for (int i = 0; i < flight_size; i++) free(flight_dumps[i]);
    return status;
}
