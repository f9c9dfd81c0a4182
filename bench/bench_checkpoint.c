/* bench_checkpoint.c: how long saving and loading a model with AdamW takes, beside the disk, a memory copy and PyTorch.
 *
 *   run:     build/bench/bench_checkpoint --quick
 *            build/bench/bench_checkpoint --params 124 --ranks 1,2 --directory /data/tmp
 *
 * A model of --params million parameters, values and two moments in fp32, 12 bytes a parameter, in 96 matrices.
 *
 *   save_MB/s   a blocking save, all of it on the disk (fsync), bytes of all ranks / time
 *   dd_MB/s     the same bytes by dd bs=1M conv=fsync, alternating; of_dd: the ratio
 *   stall_ms    how long a save in the background holds training up; copy_ms: one memcpy of the bytes that a rank
 *               writes, to memory that has been written before; stalls: the ratio
 *   load_MB/s   loading it under the same strategy, the files' pages dropped from memory first
 *   read_MB/s   the same files by dd of=/dev/null bs=1M, after the same; of_read: the ratio
 *   torch_s     torch.save of the same tensors and fsync; torch.distributed.checkpoint, where it is there (dcp_s)
 *
 * Medians over repetitions. Every load is compared with what was saved. */
#include "bench.h"
#include "dtrain.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

enum { MATRICES = 96, MAX_REPS = 32 };

static struct options {
    flag_list ranks;
    long params, reps;
    const char *directory;
} opt = {{2, {1, 2}}, 32, 5, "/tmp"};

/* In shared memory: what the ranks have measured. */
typedef struct outcome {
    char folder[256];
    double save[MAX_REPS], stall[MAX_REPS], copy[MAX_REPS], load[MAX_REPS], dd[MAX_REPS],
        read[MAX_REPS];
    uint64_t bytes; /* of a checkpoint's files */
    int wrong;
} outcome;

/* ---- the disk ---- */

/* Call a function for each file of the newest checkpoint. */
static void each_file(const outcome *out, void (*call)(const char *path, void *user), void *user)
{
    char folder[512], path[1024];
    snprintf(folder, sizeof folder, "%s/step-000000000001", out->folder);
    DIR *directory = opendir(folder);
    for (struct dirent *entry; directory && (entry = readdir(directory)) != NULL;) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        call(path, user);
    }
    if (directory) closedir(directory);
}

static void count_bytes(const char *path, void *user)
{
    struct stat info;
    if (stat(path, &info) == 0) *(uint64_t *)user += (uint64_t)info.st_size;
}

static void drop_pages(const char *path, void *user)
{
    (void)user;
    const int file = open(path, O_RDONLY);
    if (file < 0) return;
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    close(file);
}

static double seconds_of(const char *command)
{
    const double start = dtrain_seconds();
    if (system(command) != 0) return NAN;
    return dtrain_seconds() - start;
}

static double dd_write(const outcome *out)
{
    char command[1024];
    snprintf(command, sizeof command,
             "dd if=/dev/zero of=%s/dd bs=1M count=%llu conv=fsync 2>/dev/null", out->folder,
             (unsigned long long)(out->bytes >> 20));
    const double took = seconds_of(command);
    snprintf(command, sizeof command, "%s/dd", out->folder);
    unlink(command);
    return took;
}

static double dd_read(const outcome *out)
{
    char command[1024];
    each_file(out, drop_pages, NULL);
    snprintf(command, sizeof command,
             "for f in %s/step-*/*; do dd if=$f of=/dev/null bs=1M 2>/dev/null || exit 1; done",
             out->folder);
    return seconds_of(command);
}

/* ---- a rank ---- */

typedef struct job {
    dtrain_param params[MATRICES];
    char names[MATRICES][16];
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_state *state;
} job;

static dtrain_result create(dtrain_world *world, job *j, uint32_t kind)
{
    dtrain_strategy_desc where = {0};
    dtrain_state_desc what = {0};
    dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    const int64_t columns = 1024, rows = (int64_t)opt.params * 1000000 / MATRICES / columns;
    memset(j, 0, sizeof *j);
    for (int i = 0; i < MATRICES; i++) {
        snprintf(j->names[i], sizeof j->names[i], "matrix.%d", i);
        j->params[i].name = j->names[i];
        j->params[i].shape[0] = rows > 0 ? rows : 1;
        j->params[i].shape[1] = columns;
        j->params[i].unit = (uint32_t)i / 8;
        j->params[i].init = DTRAIN_INIT_UNIFORM;
        j->params[i].init_scale = 1;
    }
    where.kind = kind;
    dtrain_result result = dtrain_strategy_create(world, j->params, MATRICES, &where, &j->strategy);
    if (result == DTRAIN_OK)
        result = dtrain_optimizer_create(world, j->strategy, &adamw, &j->optimizer);
    what.strategy = j->strategy;
    what.optimizer = j->optimizer;
    if (result == DTRAIN_OK) result = dtrain_state_create(world, &what, &j->state);
    return result;
}

static dtrain_result save(dtrain_world *world, const job *j, const outcome *out, bool background,
                          double *seconds)
{
    dtrain_checkpoint_desc desc = {0};
    dtrain_checkpoint *checkpoint;
    desc.directory = out->folder;
    desc.state = j->state;
    desc.background = background;
    dtrain_result result = dtrain_checkpoint_open(world, &desc, &checkpoint);
    if (result != DTRAIN_OK) return result;
    for (int i = 0; i <= background && result == DTRAIN_OK;
         i++) { /* the second has its memory already */
        if (i) result = dtrain_checkpoint_wait(checkpoint);
        const double start = dtrain_seconds();
        if (result == DTRAIN_OK) result = dtrain_checkpoint_save(checkpoint, 1, 0);
        *seconds = dtrain_seconds() - start;
    }
    const dtrain_result closed = dtrain_checkpoint_close(checkpoint);
    return result == DTRAIN_OK ? closed : result;
}

/* One memcpy of as many bytes as this rank writes. */
static double copy_once(const outcome *out, int ranks)
{
    const size_t bytes = (size_t)(out->bytes / (uint64_t)ranks);
    char *from = (char *)bench_alloc(bytes), *to = (char *)bench_alloc(bytes);
    memset(from, 1, bytes);
    memset(to, 2, bytes);
    const double start = dtrain_seconds();
    memcpy(to, from, bytes);
    const double took = dtrain_seconds() - start;
    if (to[bytes / 2] != 1) return NAN;
    free(from);
    free(to);
    return took;
}

#define TRY(call)                          \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

static int rank_main(dtrain_world *world, void *user)
{
    outcome *out = (outcome *)user;
    static job j;
    const int rank = dtrain_world_rank(world), ranks = dtrain_world_size(world);
    uint64_t before, after;
    double blocking, stall;
    TRY(create(world, &j, ranks > 1 ? DTRAIN_STRATEGY_ZERO1 : DTRAIN_STRATEGY_DDP));
    TRY(dtrain_strategy_verify(j.strategy, &before));
    for (int r = 0; r < opt.reps; r++) {
        TRY(save(world, &j, out, false, &blocking));
        if (rank == 0 && r == 0) each_file(out, count_bytes, &out->bytes);
        if (rank == 0) out->save[r] = blocking, out->dd[r] = dd_write(out);
        TRY(dtrain_world_all_gather(world, NULL, 0, NULL));
        TRY(save(world, &j, out, true, &stall));
        const double copy = copy_once(out, ranks);
        if (rank == 0) out->stall[r] = stall, out->copy[r] = copy;
        if (rank == 0) out->read[r] = dd_read(out);
        TRY(dtrain_world_all_gather(world, NULL, 0, NULL));
        if (rank == 0) each_file(out, drop_pages, NULL);
        TRY(dtrain_world_all_gather(world, NULL, 0, NULL));
        const double start = dtrain_seconds();
        TRY(dtrain_checkpoint_load(j.state, out->folder, NULL, NULL));
        TRY(dtrain_world_all_gather(world, NULL, 0, NULL));
        if (rank == 0) out->load[r] = dtrain_seconds() - start;
        TRY(dtrain_strategy_verify(j.strategy, &after));
        if (after != before) out->wrong = 1;
    }
    dtrain_state_destroy(j.state);
    dtrain_optimizer_destroy(j.optimizer);
    dtrain_strategy_destroy(j.strategy);
    return 0;
}

/* ---- PyTorch ---- */

/* Seconds of torch.save and of torch.distributed.checkpoint; NaN: not there. */
static void run_torch(const outcome *out, double *plain, double *sharded)
{
    char command[1024], text[4096];
    const char *python = getenv("PYTHON");
    snprintf(command, sizeof command, "%s bench/torch_checkpoint.py %s %ld %ld 2>/dev/null",
             python ? python : "python3", out->folder, opt.params, opt.reps);
    *plain = *sharded = NAN;
    if (capture(command, text, sizeof text) != 0) return;
    *plain = number_after(text, "torch_save_s", NAN);
    *sharded = number_after(text, "dcp_save_s", NAN);
}

static const flag flag_table[] = {
    {"--ranks", 'I', &opt.ranks, 1, 64, "numbers of ranks: 1,2", NULL},
    {"--params", 'i', &opt.params, 1, 100000, "million parameters", NULL},
    {"--directory", 's', &opt.directory, 0, 0, "where to write: on the disk that is meant", NULL},
    {"--reps", 'i', &opt.reps, 1, MAX_REPS, "repetitions", NULL},
    BENCH_FLAGS};

static int measure(int ranks)
{
    dtrain_launch_desc desc = {0};
    char command[512];
    outcome *out = (outcome *)share(sizeof *out);
    snprintf(out->folder, sizeof out->folder, "%s/dtrain_bench_XXXXXX", opt.directory);
    if (!mkdtemp(out->folder)) {
        fprintf(stderr, "bench_checkpoint: %s: %s\n", out->folder, strerror(errno));
        return 2;
    }
    desc.rank_count = (uint32_t)ranks;
    const dtrain_result result = dtrain_launch(&desc, rank_main, out, NULL);
    double torch_s = NAN, dcp_s = NAN;
    if (result == DTRAIN_OK && ranks == 1 && !bench.quick) run_torch(out, &torch_s, &dcp_s);
    snprintf(command, sizeof command, "rm -rf %s", out->folder);
    if (system(command) != 0 || result != DTRAIN_OK) {
        fprintf(stderr, "bench_checkpoint: %s\n", dtrain_last_error());
        return 1;
    }
    const int n = (int)opt.reps;
    const double mb = 1e-6 * (double)out->bytes, save_s = median(out->save, n),
                 load_s = median(out->load, n);
    bench_begin("checkpoint");
    bench_number("ranks", 5, 0, ranks);
    bench_number("MB", 8, 1, mb);
    bench_number("save_MB/s", 10, 0, mb / save_s);
    bench_number("dd_MB/s", 8, 0, mb / median(out->dd, n));
    bench_spread("of_dd", 18, 2, ratios_of(out->dd, out->save, n, 1));
    bench_number("stall_ms", 9, 1, 1e3 * median(out->stall, n));
    bench_number("copy_ms", 8, 1, 1e3 * median(out->copy, n));
    bench_spread("stalls", 18, 2, ratios_of(out->stall, out->copy, n, 1));
    bench_number("load_MB/s", 10, 0, mb / load_s);
    bench_number("read_MB/s", 10, 0, mb / median(out->read, n));
    bench_spread("of_read", 18, 2, ratios_of(out->read, out->load, n, 1));
    bench_number("torch_s", 8, 2, torch_s);
    bench_number("dcp_s", 8, 2, dcp_s);
    bench_number("save_s", 0, 4, save_s);
    bench_end(!out->wrong);
    return 0;
}

int main(int argc, char **argv)
{
    if (is_quick(argc, argv)) {
        opt.params = 2;
        opt.reps = 2;
    }
    bench_start(
        "bench_checkpoint",
        "saving and loading beside the disk, a memory copy and PyTorch; --quick: without PyTorch",
        flag_table, sizeof flag_table / sizeof *flag_table, argc, argv);
    bench_title("%ld M parameters with AdamW, in %s", opt.params, opt.directory);
    for (long i = 0; i < opt.ranks.count; i++)
        if (measure((int)opt.ranks.items[i])) return 1;
    return bench.wrong > 0;
}
