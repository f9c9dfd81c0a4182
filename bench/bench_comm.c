/* bench_comm.c: what an exchange of gradients costs over slow links, and what helps: buckets, overlap, nodes,
 * fewer bits, fewer elements, low rank.
 *
 *   run:     make bench-comm ARGS="--svg comm.svg"                        (three quarters of an hour on two cores)
 *            build/bench/bench_comm --parts links --nodes 2 --gbps 1,10   (GPT-2's 148 tensors, 124 M gradients)
 *            build/bench/bench_comm --parts loss --data shakespeare.txt --steps 2000
 *
 * copies   bytes that an operation copies aside: collectives none in memory of dtrain_comm_alloc.
 *
 * links    ranks of this machine as nodes with emulated links (tools/emulated_links.h), in every
 *          combination of --gbps, --nodes and --node-ranks. Gradients are random numbers, new in each exchange;
 *          all of them are ready at once. Compression begins at once too (dense_steps 0), with error feedback.
 *          Rows of a step have a backward before or around the exchange, modelled by waiting: tensor by tensor,
 *          by elements, the head first; it lasts --backward-ms, or as long as the plain exchange took, where
 *          overlap has most to gain. The tied embedding is final last, so nothing can hide it.
 *
 *            ms          of an exchange (or step), on the slowest rank: median over --reps (min to max)
 *            link_ms     by the alpha-beta formula: rounds x latency + bytes a node sends x 8 / bandwidth
 *            cpu_ms      processor time of a rank in it, waiting with sched_yield included
 *            own_ms      if every rank had a core of its own, at most: link + cpu. Ranks share the cores of
 *                        this machine; those of a cluster do not
 *            MB/node     over the link of a node, counted; MB/rank: the communicators' wire_bytes
 *            GB/s        bytes of gradients / time
 *            x_plain     time of the plain exchange (rows of a step: of the plain step) / time; x_formula:
 *                        by formula alone; x_own: for cores of their own
 *            correct     against sums of the ranks' gradients on a sample of elements; what is compressed:
 *                        residuals + N x means so far = gradients so far; and nothing was copied aside
 *
 *          --shrink K divides the rows of every tensor and the bandwidth by K: times on the link stay what
 *          they are, memory and processor time are K times less. 0: as little as fits in memory.
 *
 * overlap  the rows of a step once more for gpt2_bytes, GPT-2's blocks with 256 tokens: what overlap does for
 *          models that do not end with a third of their gradients in one tensor.
 *
 * train    train_gpt without emulation, compressed and not: tokens/s, where links are as fast as memory.
 *
 * loss     validation loss of train_gpt after --steps steps, compressed and not: AdamW with the same learning
 *          rate; how compressed runs begin is said above the table. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include "bench.h"
#include "plot.h"
#include "tools/emulated_links.h"
#include "tools/train_gpt/gpt.h"
#include "train_run.h"

enum {
    MAX_REPS = 16,
    MAX_SPEEDS = 8,
    MAX_ROWS = 1024,
    MAX_WORLD = 64,
    SAMPLES_EACH = 4,
    MAX_SAMPLES = 1024,
    TABLE = 65536
};

static const char *const model_names[] = {"tiny", "baby", "gpt2", NULL};
static const char *const part_names[] = {"copies", "links", "overlap", "train", "loss", NULL};
static const char *const method_ids[] = {"plain", "bucketed", "step", "hier", "bf16", "topk", NULL};
enum method_id { ID_PLAIN, ID_BUCKETED, ID_STEP, ID_HIER, ID_BF16, ID_TOPK };

static struct options {
    const char *model, *gbps, *program, *data, *svg, *flags, *loss_model;
    flag_list parts, nodes, node_ranks, methods, train_models;
    double latency, backward_ms;
    long reps, shrink, steps, rounds;
} opt = {.parts = {5, {0, 1, 2, 3, 4}},
         .model = "gpt2",
         .gbps = "1,10,25,100",
         .nodes = {3, {2, 4, 8}},
         .node_ranks = {2, {1, 4}},
         .methods = {6, {0, 1, 2, 3, 4, 5}},
         .program = "build/train_gpt",
         .data = "dtrain.h",
         .flags = "",
         .train_models = {1, {1}},
         .loss_model = "tiny",
         .latency = 50,
         .reps = 3,
         .steps = 2000,
         .rounds = 3};

/* ---- how gradients travel ---- */

typedef struct method {
    enum method_id id;
    const char *name;
    uint32_t compression, reduce_dtype;
    float ratio;
    bool hierarchical, backward, overlap;
    size_t bucket_bytes;
} method;

#define ONE_BUCKET ((size_t)1 << 40)
#define MIB ((size_t)1 << 20)

enum { PLAIN = 0, PLAIN_STEP = 2, HIERARCHICAL = 5 }; /* places in the table below */
static const method methods[] = {
    {ID_PLAIN, "plain, one bucket", 0, 0, 0, false, false, false, ONE_BUCKET},
    {ID_BUCKETED, "bucketed, 25 MiB", 0, 0, 0, false, false, false, 25 * MIB},
    {ID_STEP, "step: backward, plain", 0, 0, 0, false, true, false, ONE_BUCKET},
    {ID_STEP, "step: overlapped, 25 MiB", 0, 0, 0, false, true, true, 25 * MIB},
    {ID_STEP, "step: overlapped, 4 MiB", 0, 0, 0, false, true, true, 4 * MIB},
    {ID_HIER, "hierarchical", 0, 0, 0, true, false, true, 25 * MIB},
    {ID_BF16, "bf16", 0, DTRAIN_DTYPE_BF16, 0, false, false, true, 25 * MIB},
    {ID_BF16, "hierarchical, bf16", 0, DTRAIN_DTYPE_BF16, 0, true, false, true, 25 * MIB},
    {ID_TOPK, "top-k 1 %", DTRAIN_COMPRESSION_TOPK, 0, 0.01f, false, false, true, 25 * MIB},
    {ID_TOPK, "top-k 0.1 %", DTRAIN_COMPRESSION_TOPK, 0, 0.001f, false, false, true, 25 * MIB},
    {ID_TOPK, "hierarchical, top-k 1 %", DTRAIN_COMPRESSION_TOPK, 0, 0.01f, true, false, true,
     25 * MIB},
};
enum { METHODS = sizeof methods / sizeof *methods };

static dtrain_strategy_desc strategy_desc(const method *m)
{
    dtrain_strategy_desc desc = {0};
    desc.no_overlap = !m->overlap;
    desc.bucket_bytes = m->bucket_bytes;
    desc.reduce_dtype = m->reduce_dtype;
    desc.hierarchical = m->hierarchical;
    return desc;
}

static dtrain_compression_desc compression_desc(const method *m)
{
    dtrain_compression_desc desc = {0};
    desc.kind = m->compression;
    desc.dense_steps = DTRAIN_DENSE_STEPS_NONE;
    desc.topk_ratio = m->ratio;
    return desc;
}

/* ---- what is measured ---- */

typedef struct result {
    bool valid, correct;
    double seconds[MAX_REPS], cpu[MAX_REPS]; /* of the slowest rank; of the busiest one */
    double backward, formula;                /* seconds */
    double formula_bytes;                    /* over a node's link */
    double node_bytes, wire_bytes;           /* counted; of rank 0 */
    uint64_t staged_bytes;                   /* of all ranks, in all exchanges */
} result;

typedef struct shape {
    int nodes, node_ranks, shrink;
    double gradient_bytes;
} shape;

typedef struct row {
    const method *how;
    shape at;
    double gbps;
    result r;
} row;

static row rows[MAX_ROWS];
static int row_count;

static number_list speeds; /* --gbps */

/* In shared memory: ranks are processes. */
typedef struct board {
    result results[METHODS][MAX_SPEEDS];
    float residuals[MAX_WORLD][MAX_SAMPLES];
} board;

/* ---- the model ---- */

static bool model_config(gpt_config *config)
{
    const bool bytes = strcmp(opt.model, "gpt2_bytes") == 0;
    const gpt_preset *preset = gpt_preset_find(bytes ? "gpt2" : opt.model);
    if (!preset) return false;
    *config = preset->config;
    if (bytes || !config->vocab) config->vocab = 256;
    if (!config->positions) config->positions = config->seq;
    return true;
}

/* Elements in all; rows of every tensor are divided by `shrink`. */
static int64_t shrink_model(gpt *model, int shrink)
{
    int64_t total = 0;
    for (size_t i = 0; i < model->param_count; i++) {
        dtrain_param *p = &model->params[i];
        if (p->alias_of) continue;
        p->shape[0] = (p->shape[0] + shrink - 1) / shrink;
        p->init_count = 0;
        total += p->shape[0] * (p->shape[1] ? p->shape[1] : 1);
    }
    return total;
}

/* ---- one rank ---- */

typedef struct job {
    shape at;
    board *shared;
    float *zeros; /* (elements): what all ranks have for values, which nobody writes after create */
    dtrain_world *world;
    gpt model;
    double *work; /* (param_count): of a backward, share that comes before the parameter is ready */
    float *table; /* (TABLE) normal random numbers */
    dtrain_strategy *strategy;
    int rank, ranks;
    uint64_t step;
    /* of the sampled elements: gradients of all ranks, of this step and so far, with magnitudes; means so far */
    double sum[MAX_SAMPLES], sums[MAX_SAMPLES], size[MAX_SAMPLES], sizes[MAX_SAMPLES];
    double means[MAX_SAMPLES];
    bool correct;
} job;

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t stream_of(int rank, uint64_t step, size_t param)
{
    return mix(mix(mix((uint64_t)rank) + step) + param);
}

/* Random gradients at the speed of a copy: the table from a random place on, every round of it times another
 * factor, so that few elements tie. */
static float factor_of(uint64_t stream, uint64_t round)
{
    return 0.5f + (float)(mix(stream + round) >> 40) * (1.0f / 16777216);
}

static float gradient_at(const job *j, int rank, size_t param, uint64_t i)
{
    const uint64_t stream = stream_of(rank, j->step, param), at = i + stream % TABLE;
    return j->table[at % TABLE] * factor_of(stream, at / TABLE);
}

static void fill(const job *j, size_t param)
{
    const dtrain_param *p = &j->model.params[param];
    const uint64_t stream = stream_of(j->rank, j->step, param), first = stream % TABLE;
    uint64_t done = 0;
    while (done < (uint64_t)p->count) {
        const uint64_t at = first + done, from = at % TABLE;
        uint64_t some = TABLE - from;
        const float factor = factor_of(stream, at / TABLE);
        float *out = p->grad + done;
        if (some > (uint64_t)p->count - done) some = (uint64_t)p->count - done;
        for (uint64_t k = 0; k < some; k++) out[k] = j->table[from + k] * factor;
        done += some;
    }
}

static void fill_all(job *j)
{
    j->step++;
    for (size_t i = 0; i < j->model.param_count; i++)
        if (!j->model.params[i].alias_of) fill(j, i);
}

static void sleep_until(double when)
{
    double left;
    while ((left = when - dtrain_seconds()) > 0) {
        struct timespec nap;
        nap.tv_sec = (time_t)left;
        nap.tv_nsec = (long)((left - (double)nap.tv_sec) * 1e9);
        nanosleep(&nap, NULL);
    }
}

static dtrain_result exchange(job *j, double backward)
{
    const double begin = dtrain_seconds();
    double share = 0;
    for (size_t i = j->model.param_count; i-- > 0;) {
        share += j->work[i];
        if (backward > 0) sleep_until(begin + backward * share);
        DTRAIN__TRY(dtrain_strategy_ready(j->strategy, i));
    }
    return dtrain_strategy_finish(j->strategy);
}

/* Between exchanges: all transfers are over. What is made with a fast link is not what is measured. */
static dtrain_result set_link(job *j, double gbps, double latency)
{
    DTRAIN__TRY(dtrain_world_all_gather(j->world, NULL, 0, NULL));
    emulated_links.gigabits_per_second = gbps / j->at.shrink;
    emulated_links.latency_us = latency;
    return dtrain_world_all_gather(j->world, NULL, 0, NULL);
}

/* ---- books ---- */

typedef struct books {
    double slow, wire,
        staged; /* bytes so far: over this node's link, by the ring formula, copied aside */
} books;

static books books_of(const job *j)
{
    dtrain_strategy_info info;
    dtrain_strategy_query(j->strategy, &info);
    const books sum = {(double)info.traffic.node_bytes, (double)info.traffic.wire_bytes,
                       (double)info.traffic.staged_bytes};
    return sum;
}

static double cpu_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

typedef struct report {
    double seconds, cpu;
    books sent;
} report;

/* One exchange with everybody; the figures of all ranks on rank 0's part of the board. */
static dtrain_result measure(job *j, result *r, int rep)
{
    report mine, all[MAX_WORLD];
    fill_all(j);
    DTRAIN__TRY(dtrain_world_all_gather(j->world, NULL, 0, NULL));
    const books before = books_of(j);
    const double begin = dtrain_seconds(), cpu = cpu_seconds();
    DTRAIN__TRY(exchange(j, r->backward));
    mine.seconds = dtrain_seconds() - begin;
    mine.cpu = cpu_seconds() - cpu;
    mine.sent = books_of(j);
    mine.sent.slow -= before.slow;
    mine.sent.wire -= before.wire;
    mine.sent.staged -= before.staged;
    DTRAIN__TRY(dtrain_world_all_gather(j->world, &mine, sizeof mine, all));
    if (j->rank != 0) return DTRAIN_OK;
    r->seconds[rep] = r->cpu[rep] = r->node_bytes = 0;
    r->wire_bytes = mine.sent.wire;
    for (int i = 0; i < j->ranks; i++) {
        if (all[i].seconds > r->seconds[rep]) r->seconds[rep] = all[i].seconds;
        if (all[i].cpu > r->cpu[rep]) r->cpu[rep] = all[i].cpu;
        if (i < j->at.node_ranks) r->node_bytes += all[i].sent.slow;
        r->staged_bytes += (uint64_t)all[i].sent.staged;
    }
    return DTRAIN_OK;
}

/* ---- correctness ---- */

static size_t sample_at(const dtrain_param *p, size_t param, int k)
{
    return (size_t)(mix(param * 64 + (size_t)k) % (uint64_t)p->count);
}

/* After an exchange, add the sampled elements to the running sums; check those that travel uncompressed. */
static void look(job *j, const method *m)
{
    const double tolerance = m->reduce_dtype ? 1.0 / 128 : 1e-6;
    int s = 0;
    for (size_t i = 0; i < j->model.param_count; i++) {
        const dtrain_param *p = &j->model.params[i];
        for (int k = 0; k < SAMPLES_EACH && !p->alias_of; k++, s++) {
            const size_t at = sample_at(p, i, k);
            const double mean = p->grad[at];
            j->sum[s] = j->size[s] = 0;
            for (int rank = 0; rank < j->ranks; rank++) {
                const double g = gradient_at(j, rank, i, at);
                j->sum[s] += g;
                j->size[s] += fabs(g);
            }
            j->sums[s] += j->sum[s];
            j->sizes[s] += j->size[s];
            j->means[s] += mean;
            if (m->compression) continue;
            if (!(fabs(mean * j->ranks - j->sum[s]) <= tolerance * j->size[s])) j->correct = false;
        }
    }
}

static float residual_at(const dtrain__kept *states, size_t count, const dtrain_param *p,
                         int64_t at)
{
    for (size_t i = 0; i < count; i++)
        if (states[i].param == p && states[i].residual && at >= states[i].offset &&
            at < states[i].offset + states[i].count)
            return states[i].residual[at - states[i].offset];
    return 0;
}

/* Nothing is lost: residuals + N * means so far = gradients so far. */
static dtrain_result look_at_residuals(job *j)
{
    size_t count;
    int s = 0;
    const dtrain__kept *states = dtrain__kept_of(j->strategy, &count);
    for (size_t i = 0; i < j->model.param_count; i++) {
        const dtrain_param *p = &j->model.params[i];
        for (int k = 0; k < SAMPLES_EACH && !p->alias_of; k++, s++)
            j->shared->residuals[j->rank][s] =
                residual_at(states, count, p, (int64_t)sample_at(p, i, k));
    }
    DTRAIN__TRY(dtrain_world_all_gather(j->world, NULL, 0, NULL));
    for (int i = 0; i < s; i++) {
        double kept = 0;
        for (int rank = 0; rank < j->ranks; rank++) kept += (double)j->shared->residuals[rank][i];
        if (!(fabs(kept + j->ranks * j->means[i] - j->sums[i]) <= 1e-5 * j->sizes[i]))
            j->correct = false;
    }
    return DTRAIN_OK;
}

/* ---- what the formula says ---- */

/* Return the bytes that a node sends. */
static double formula(const job *j, const method *m)
{
    const double n = j->ranks, nodes = j->at.nodes, g = j->at.node_ranks, away = n - g;
    const double reduced = m->hierarchical ? 2 * (nodes - 1) / nodes : 2 * g * away / n;
    const double gathered = m->hierarchical ? nodes - 1 : g * away;
    double whole = 0, selected = 0;
    for (size_t i = 0; i < j->model.param_count; i++) {
        const dtrain_param *p = &j->model.params[i];
        const double count = (double)p->count;
        const bool matrix = p->shape[1] > 0 && p->count >= 1024;
        if (p->alias_of) continue;
        if (m->compression == DTRAIN_COMPRESSION_TOPK && matrix)
            selected += fmax(1, floor((double)m->ratio * count + 0.5));
        else whole += count;
    }
    return reduced * whole * (m->reduce_dtype ? 2 : 4) + gathered * selected * 8;
}

/* A step with overlap: buckets in their order through one link, none before its last gradient. */
static double overlapped_seconds(const job *j, double backward, double seconds_each)
{
    const dtrain__layout *layout = &j->strategy->layout;
    double end = 0;
    for (size_t b = 0; b < layout->bucket_count; b++) {
        double share = 0, ready = 0;
        for (size_t i = j->model.param_count; i-- > 0;) {
            share += j->work[i];
            if (layout->entries[i].bucket == &layout->buckets[b]) ready = share * backward;
        }
        end = fmax(end, ready) + (double)layout->buckets[b].count * seconds_each;
    }
    return end;
}

static void predict(const job *j, const method *m, double gbps, result *r)
{
    const double bytes = formula(j, m);
    const double rate = gbps * 1e9 / 8 / j->at.shrink;
    const double latency = 1e-6 * opt.latency * 2;
    const double elements = j->at.gradient_bytes / 4;
    r->formula_bytes = bytes;
    r->formula = bytes / rate + latency + r->backward;
    if (m->backward && m->overlap)
        r->formula = overlapped_seconds(j, r->backward, bytes / rate / elements) + latency;
}

/* ---- one method on one rank ---- */

static dtrain_result run_speed(job *j, int which, int speed)
{
    const method *m = &methods[which];
    result *board_row = &j->shared->results[which][speed], r;
    memset(&r, 0, sizeof r);
    DTRAIN__TRY(set_link(j, speeds.items[speed], opt.latency));
    if (m->backward)
        r.backward = opt.backward_ms > 0
                         ? 1e-3 * opt.backward_ms
                         : median(j->shared->results[PLAIN][speed].seconds, (int)opt.reps);
    predict(j, m, speeds.items[speed], &r);
    for (int rep = 0; rep < opt.reps; rep++) {
        DTRAIN__TRY(measure(j, &r, rep));
        look(j, m);
    }
    r.valid = true;
    if (j->rank == 0) *board_row = r;
    return DTRAIN_OK;
}

static dtrain_result run_exchanges(job *j, int which)
{
    result first;
    memset(&first, 0, sizeof first);
    DTRAIN__TRY(measure(j, &first, 0)); /* pages are touched, Q has a beginning */
    look(j, &methods[which]);
    for (int s = 0; s < speeds.count; s++) DTRAIN__TRY(run_speed(j, which, s));
    if (methods[which].compression) DTRAIN__TRY(look_at_residuals(j));
    return DTRAIN_OK;
}

static dtrain_result run_method(job *j, int which)
{
    const dtrain_compression_desc compression = compression_desc(&methods[which]);
    dtrain_strategy_desc desc = strategy_desc(&methods[which]);
    desc.compression = &compression;
    bool all_correct[MAX_WORLD];
    j->correct = true;
    memset(j->sums, 0, sizeof j->sums);
    memset(j->sizes, 0, sizeof j->sizes);
    memset(j->means, 0, sizeof j->means);
    DTRAIN__TRY(set_link(j, 1e6 * j->at.shrink, 0));
    DTRAIN__TRY(dtrain_strategy_create(j->world, j->model.params, j->model.param_count, &desc,
                                       &j->strategy));
    const dtrain_result outcome = run_exchanges(j, which);
    dtrain_strategy_destroy(j->strategy);
    DTRAIN__TRY(outcome);
    DTRAIN__TRY(dtrain_world_all_gather(j->world, &j->correct, sizeof j->correct, all_correct));
    for (int s = 0; s < speeds.count && j->rank == 0; s++) {
        j->shared->results[which][s].correct = true;
        for (int i = 0; i < j->ranks; i++) j->shared->results[which][s].correct &= all_correct[i];
    }
    return DTRAIN_OK;
}

/* The plain exchange is what all else is compared with; nodes of one rank have nothing inside; overlap is
 * the same with more. */
static bool is_wanted(const method *m, const shape *at)
{
    if (m == &methods[PLAIN]) return true;
    if (at->node_ranks == 1 ? m->hierarchical : m->backward) return false;
    return listed(&opt.methods, m->id);
}

/* Backward multiplies by each matrix; the head, which is the embedding under another name, comes first,
 * and the embedding itself costs nothing. */
static dtrain_result prepare(job *j)
{
    gpt_config config;
    float *zeros = j->zeros;
    double total = 0;
    if (!model_config(&config)) return DTRAIN_ERROR_ARGUMENT;
    DTRAIN__TRY(gpt_create(&j->model, &config));
    shrink_model(&j->model, j->at.shrink);
    if (j->model.param_count * SAMPLES_EACH > MAX_SAMPLES)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT, "--model %s has %zu parameters, more than %d",
                           opt.model, j->model.param_count, MAX_SAMPLES / SAMPLES_EACH);
    j->work = (double *)bench_alloc(j->model.param_count * sizeof *j->work);
    j->table = (float *)bench_alloc(TABLE * sizeof *j->table);
    for (size_t i = 0; i < j->model.param_count; i++) {
        dtrain_param *p = &j->model.params[i];
        const int64_t *shape = (p->alias_of ? p->alias_of : p)->shape;
        const bool multiplies = p != j->model.wte && p != j->model.wpe && shape[1] > 0;
        j->work[i] = multiplies ? (double)(shape[0] * shape[1]) : 0;
        total += j->work[i];
        if (p->alias_of) continue;
        p->value = zeros;
        zeros += shape[0] * (shape[1] ? shape[1] : 1);
    }
    for (size_t i = 0; i < j->model.param_count; i++) j->work[i] /= total;
    for (uint32_t i = 0; i < TABLE; i++) {
        const double u = ((double)(mix(2 * i) >> 11) + 1) / 9007199254740993.0;
        j->table[i] =
            (float)(1e-3 * sqrt(-2 * log(u)) *
                    cos(6.283185307179586 * (double)(mix(2 * i + 1) >> 11) / 9007199254740992.0));
    }
    return DTRAIN_OK;
}

static int rank_main(dtrain_world *world, void *user)
{
    static job mine;
    dtrain_result outcome;
    mine = *(job *)user;
    mine.world = world;
    mine.rank = dtrain_world_rank(world);
    mine.ranks = dtrain_world_size(world);
    outcome = prepare(&mine);
    for (int m = 0; m < METHODS && outcome == DTRAIN_OK; m++)
        if (is_wanted(&methods[m], &mine.at)) outcome = run_method(&mine, m);
    free(mine.work);
    free(mine.table);
    gpt_free(&mine.model);
    if (outcome == DTRAIN_OK) return 0;
    dtrain_log(world, DTRAIN_LOG_ERROR, "%s: %s", dtrain_result_text(outcome), dtrain_last_error());
    return 1;
}

/* ---- all combinations ---- */

static double available_bytes(void)
{
    char text[4096];
    FILE *file = fopen("/proc/meminfo", "r");
    size_t got = file ? fread(text, 1, sizeof text - 1, file) : 0;
    text[got] = 0;
    if (file) fclose(file);
    return 1024 * number_after(text, "MemAvailable:", 0);
}

/* Gradients, residuals, selections and 16-bit copies of every rank; one model of values. */
static double needed_bytes(const shape *at)
{
    return at->gradient_bytes * (2.6 * at->nodes * at->node_ranks + 1);
}

static int measure_gradients(shape *at)
{
    gpt model;
    gpt_config config;
    if (!model_config(&config) || gpt_create(&model, &config) != DTRAIN_OK) {
        fprintf(stderr, "bench_comm: --model %s: %s\n", opt.model,
                *dtrain_last_error() ? dtrain_last_error() : "there is no such preset");
        return 1;
    }
    at->gradient_bytes = 4 * (double)shrink_model(&model, at->shrink);
    gpt_free(&model);
    return 0;
}

static int launch_shape(job *j)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = (uint32_t)(j->at.nodes * j->at.node_ranks);
    desc.threads_per_rank = 1;
    desc.options.log_level = DTRAIN_LOG_ERROR;
    emulate_links(&desc, j->at.node_ranks, 1e6, 0);
    if (dtrain_launch(&desc, rank_main, j, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "bench_comm: %s\n", dtrain_last_error());
    return 1;
}

static void keep_rows(const job *j)
{
    for (int s = 0; s < speeds.count; s++)
        for (int m = 0; m < METHODS && row_count < MAX_ROWS; m++) {
            if (!j->shared->results[m][s].valid) continue;
            rows[row_count].how = &methods[m];
            rows[row_count].at = j->at;
            rows[row_count].gbps = speeds.items[s];
            rows[row_count++].r = j->shared->results[m][s];
        }
}

static int run_shape(int nodes, int node_ranks)
{
    static job j;
    int failed;
    memset(&j, 0, sizeof j);
    j.at.nodes = nodes;
    j.at.node_ranks = node_ranks;
    for (j.at.shrink = opt.shrink ? (int)opt.shrink : 1;; j.at.shrink *= 2) {
        const double room = 0.85 * available_bytes();
        if (measure_gradients(&j.at)) return 1;
        if (needed_bytes(&j.at) <= room) break;
        if (opt.shrink || j.at.shrink > 64) {
            printf("skip %d nodes of %d ranks: %.1f GiB needed, %.1f free\n", nodes, node_ranks,
                   needed_bytes(&j.at) / 0x1p30, room / 0x1p30);
            return 0;
        }
    }
    j.shared = (board *)share(sizeof *j.shared);
    j.zeros = (float *)share((size_t)j.at.gradient_bytes);
    failed = launch_shape(&j);
    if (!failed) keep_rows(&j);
    munmap(j.shared, sizeof *j.shared);
    munmap(j.zeros, (size_t)j.at.gradient_bytes);
    return failed;
}

/* ---- report of links ---- */

static const row *find(const shape *at, double gbps, int which)
{
    for (int i = 0; i < row_count; i++)
        if (rows[i].how == &methods[which] && rows[i].gbps == gbps &&
            rows[i].at.nodes == at->nodes && rows[i].at.node_ranks == at->node_ranks)
            return &rows[i];
    return NULL;
}

static double milliseconds(const row *r) { return 1e3 * median(r->r.seconds, (int)opt.reps); }
static double cpu_ms(const row *r) { return 1e3 * median(r->r.cpu, (int)opt.reps); }
static double own_ms(const row *r) { return 1e3 * r->r.formula + cpu_ms(r); }

/* Speed-ups over the plain exchange: measured, by formula, for ranks with a core each. */
typedef struct gains {
    double measured, formula, own;
} gains;

static gains gains_of(const row *r)
{
    const row *base = find(&r->at, r->gbps, r->how->backward ? PLAIN_STEP : PLAIN);
    gains g = {0, 0, 0};
    if (!base) return g;
    g.measured = milliseconds(base) / milliseconds(r);
    g.formula = base->r.formula / r->r.formula;
    g.own = own_ms(base) / own_ms(r);
    return g;
}

static void print_title(const shape *at, double gbps)
{
    const row *step = find(at, gbps, PLAIN_STEP);
    char shrunk[64] = "", backward[64] = "";
    if (at->shrink > 1) snprintf(shrunk, sizeof shrunk, " (1/%d, as is the bandwidth)", at->shrink);
    if (step) snprintf(backward, sizeof backward, "; backward %.0f ms", 1e3 * step->r.backward);
    bench_title("%g Gb/s, %g us, %d nodes of %d rank%s, %.1f MB of gradients (%s)%s%s", gbps,
                opt.latency, at->nodes, at->node_ranks, at->node_ranks > 1 ? "s" : "",
                at->gradient_bytes / 1e6, opt.model, shrunk, backward);
}

static void report_row(const row *r)
{
    const spread seconds = spread_of(r->r.seconds, (int)opt.reps);
    const spread ms = {1e3 * seconds.median, 1e3 * seconds.min, 1e3 * seconds.max};
    const gains g = gains_of(r);
    bench_begin("comm");
    bench_string("model", 0, opt.model);
    bench_number("gbps", 0, 0, r->gbps);
    bench_number("latency_us", 0, 0, opt.latency);
    bench_number("nodes", 0, 0, r->at.nodes);
    bench_number("node_ranks", 0, 0, r->at.node_ranks);
    bench_number("shrink", 0, 0, r->at.shrink);
    bench_string("method", -25, r->how->name);
    bench_spread("ms", 8, 1, ms);
    bench_number("backward_ms", 0, 0, 1e3 * r->r.backward);
    bench_number("link_ms", 8, 1, 1e3 * r->r.formula);
    bench_number("cpu_ms", 8, 1, cpu_ms(r));
    bench_number("own_ms", 8, 1, own_ms(r));
    bench_number("MB/node", 8, 2, r->r.node_bytes / 1e6);
    bench_number("MB/rank", 8, 2, r->r.wire_bytes / 1e6);
    bench_number("formula_mb", 0, 0, r->r.formula_bytes / 1e6);
    bench_number("GB/s", 6, 2, r->at.gradient_bytes / seconds.median / 1e9);
    bench_number("x_plain", 7, 2, g.measured);
    bench_number("x_formula", 7, 2, g.formula);
    bench_number("x_own", 7, 2, g.own);
    bench_number("staged_bytes", 0, 0, (double)r->r.staged_bytes);
    bench_end(r->r.correct && r->r.staged_bytes == 0);
}

/* Print a target and whether it is met; ranks beyond the cores wait for each other's arithmetic. */
static void print_target(const char *what, const shape *at, double target, const row *r)
{
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (!r || bench.json) return;
    const gains g = gains_of(r);
    printf("target: %s, %d nodes of %d: %.1fx; %s %.2fx, %s (formula %.2fx, own cores %.2fx%s)\n",
           what, at->nodes, at->node_ranks, target, r->how->name, g.measured,
           g.measured >= target ? "met" : "missed", g.formula, g.own,
           at->nodes * at->node_ranks > cores ? "; ranks share cores" : "");
}

/* The fastest of the rows whose names begin so. */
static const row *best(const shape *at, const char *name)
{
    const row *found = NULL;
    for (int m = 0; m < METHODS; m++) {
        const row *r = find(at, 1, m);
        if (!r || strncmp(r->how->name, name, strlen(name)) != 0) continue;
        if (!found || gains_of(r).measured > gains_of(found).measured) found = r;
    }
    return found;
}

static void print_targets(const shape *at)
{
    if (at->node_ranks == 1) print_target("top-k 1 % at 1 Gb/s", at, 9.6, best(at, "top-k 1 %"));
    if (at->node_ranks == 4)
        print_target("hierarchy, 4 ranks a node, 1 Gb/s", at, 3.7, find(at, 1, HIERARCHICAL));
    if (at->node_ranks == 1) print_target("overlap, 1 Gb/s", at, 1.9, best(at, "step: overlapped"));
}

/* Report the rows of one shape, which begin at `first`. */
static void report_rows(int first)
{
    for (int i = first; i < row_count; i++) {
        if (i == first || rows[i - 1].gbps != rows[i].gbps) print_title(&rows[i].at, rows[i].gbps);
        report_row(&rows[i]);
    }
}

/* ---- break-even ----
 *
 * plain and method take link bytes / rate + latency + processor time each, on cores of their own: they meet
 * at rate = (bytes saved) / (processor time and latency added). */

static double least_cpu(const shape *at, int which)
{
    double least = INFINITY;
    for (int s = 0; s < speeds.count; s++) {
        const row *r = find(at, speeds.items[s], which);
        if (r) least = fmin(least, 1e-3 * cpu_ms(r));
    }
    return least;
}

static double model_seconds(const shape *at, int which, double gbps)
{
    const row *r = find(at, speeds.items[0], which);
    const double rate = 1e9 / 8 / at->shrink, bytes = r->r.formula_bytes;
    return bytes / (gbps * rate) + (r->r.formula - bytes / (speeds.items[0] * rate)) +
           least_cpu(at, which);
}

/* Gb/s up to which it pays; infinite where it always does. */
static double break_even(const shape *at, int which)
{
    const double low = 1e-3, plain = model_seconds(at, PLAIN, low),
                 cost = model_seconds(at, which, 1e12) - model_seconds(at, PLAIN, 1e12);
    const double saved = plain - model_seconds(at, which, low) + cost; /* at `low` */
    return cost > 0 ? low * saved / cost : INFINITY;
}

enum { CURVES = 3 };
static const int curves[CURVES] = {6, 8, 9}; /* places in the table of methods */

/* The plain exchange of the next shape with nodes of one rank, from place *i on, or NULL. */
static const shape *next_shape(int *i)
{
    for (; *i < row_count; ++*i)
        if (rows[*i].how == &methods[PLAIN] && rows[*i].gbps == speeds.items[0] &&
            rows[*i].at.node_ranks == 1)
            return &rows[(*i)++].at;
    return NULL;
}

static void report_break_even(void)
{
    const shape *at;
    bench_title("pays up to (Gb/s, by formula and processor time, a core for each rank)");
    for (int i = 0; (at = next_shape(&i)) != NULL;) {
        bench_begin("comm_break_even");
        bench_string("model", 0, opt.model);
        bench_number("nodes", 5, 0, at->nodes);
        for (int c = 0; c < CURVES; c++)
            bench_number(methods[curves[c]].name, 8, 1,
                         find(at, speeds.items[0], curves[c]) ? break_even(at, curves[c]) : NAN);
        bench_end(-1);
    }
}

static void draw_curve(plot *p, const shape *at, int colour)
{
    enum { STEPS = 48 };
    const int which = curves[colour];
    double x[STEPS + 1], y[STEPS + 1];
    for (int i = 0; i <= STEPS; i++) {
        x[i] = p->x_low * pow(p->x_high / p->x_low, (double)i / STEPS);
        y[i] = model_seconds(at, PLAIN, x[i]) / model_seconds(at, which, x[i]);
    }
    plot_line(p, colour, 0, x, y, STEPS + 1);
    for (int s = 0; s < speeds.count; s++) {
        const row *r = find(at, speeds.items[s], which);
        char what[96];
        if (!r) continue;
        snprintf(what, sizeof what, "%s, %g Gb/s: %.2f", r->how->name, r->gbps,
                 gains_of(r).measured);
        plot_point(p, colour, r->gbps, gains_of(r).measured, what);
    }
}

/* Draw a panel for each number of nodes: lines are the formula with processor time, points what was measured. */
static void draw(void)
{
    plot p = {.x_low = speeds.items[0],
              .x_high = speeds.items[speeds.count - 1],
              .y_low = 0.25,
              .y_high = 128};
    const shape *at;
    char title[160];
    int panels = 0;
    for (int i = 0; next_shape(&i);) panels++;
    snprintf(
        title, sizeof title,
        "When compression pays: exchange of %s's gradients. Lines: formula and processor time; "
        "points: measured on %ld cores",
        opt.model, sysconf(_SC_NPROCESSORS_ONLN));
    if (!plot_open(&p, opt.svg, title, "link, Gb/s", "times as fast as plain", panels)) {
        fprintf(stderr, "bench_comm: cannot write %s\n", opt.svg);
        exit(1);
    }
    for (int i = 0; (at = next_shape(&i)) != NULL;) {
        snprintf(title, sizeof title, "%d nodes", at->nodes);
        plot_panel(&p, title, speeds.items, speeds.count);
        for (int c = 0; c < CURVES; c++)
            if (find(at, speeds.items[0], curves[c])) draw_curve(&p, at, c);
    }
    for (int c = 0; c < CURVES; c++) plot_legend(&p, c, 0, methods[curves[c]].name);
    if (!plot_close(&p)) fprintf(stderr, "bench_comm: %s is incomplete\n", opt.svg), exit(1);
}

static int run_links(void)
{
    for (long e = 0; e < opt.node_ranks.count; e++)
        for (long n = 0; n < opt.nodes.count; n++) {
            const int first = row_count;
            if (run_shape((int)opt.nodes.items[n], (int)opt.node_ranks.items[e])) return 1;
            report_rows(first);
        }
    if (!bench.json) printf("\n");
    for (int i = 0; i < row_count; i++)
        if (rows[i].how == &methods[PLAIN] && rows[i].gbps == 1) print_targets(&rows[i].at);
    if (speeds.count > 1) report_break_even();
    if (opt.svg && speeds.count > 1) draw();
    return 0;
}

static int run_overlap(void)
{
    const struct options all = opt;
    const number_list all_speeds = speeds;
    const flag_list steps = {1, {ID_STEP}}, nodes = {1, {2}}, node_ranks = {1, {1}};
    row_count = 0;
    speeds.count = 1;
    if (strcmp(opt.model, "gpt2") == 0) opt.model = "gpt2_bytes";
    opt.methods = steps;
    opt.nodes = nodes;
    opt.node_ranks = node_ranks;
    opt.svg = NULL;
    const int failed = run_links();
    opt = all;
    speeds = all_speeds;
    return failed;
}

/* ---- copies ---- */

enum { COPIED = 7, COPY_COUNT = 1 << 18, COPY_RANKS = 2 };
static const char *const copied_names[COPIED] = {"all-reduce", "reduce-scatter", "all-gather",
                                                 "all-to-all", "broadcast",      "reduce",
                                                 "send, recv"};

static dtrain_result call_once(dtrain_comm *comm, int which, float *in, float *out)
{
    const size_t count = COPY_COUNT;
    dtrain_work *work;
    switch (which) {
    case 0:
        return dtrain_all_reduce(comm, in, out, count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, NULL);
    case 1:
        return dtrain_reduce_scatter(comm, in, out, count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                     NULL);
    case 2: return dtrain_all_gather(comm, in, out, count, DTRAIN_DTYPE_F32, NULL);
    case 3: return dtrain_all_to_all(comm, in, out, count, DTRAIN_DTYPE_F32, NULL);
    case 4: return dtrain_broadcast(comm, in, count, DTRAIN_DTYPE_F32, 0, NULL);
    case 5:
        return dtrain_reduce(comm, in, out, count, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM, 0, NULL);
    default: break;
    }
    const int peer = 1 - dtrain_comm_rank(comm);
    DTRAIN__TRY(dtrain_send(comm, in, count, DTRAIN_DTYPE_F32, peer, &work));
    DTRAIN__TRY(dtrain_recv(comm, out, count, DTRAIN_DTYPE_F32, peer, NULL));
    return dtrain_work_wait(work);
}

/* staged (2, COPIED) = bytes copied aside by this rank, in memory of the communicator and in others. */
static int copies_main(dtrain_world *world, void *user)
{
    const size_t bytes = (size_t)COPY_COUNT * COPY_RANKS * sizeof(float);
    uint64_t *staged = (uint64_t *)user;
    dtrain_comm *comm = dtrain_world_comm(world);
    dtrain_comm_info before, after;
    void *shared = NULL;
    char *own = (char *)bench_alloc(2 * bytes);
    if (dtrain_comm_alloc(comm, 2 * bytes, &shared) != DTRAIN_OK) return 1;
    for (int i = 0; i < 2 * COPIED; i++) {
        char *memory = i < COPIED ? (char *)shared : own;
        dtrain_comm_query(comm, &before);
        if (call_once(comm, i % COPIED, (float *)(void *)memory, (float *)(void *)(memory + bytes)))
            return 1;
        dtrain_comm_query(comm, &after);
        if (dtrain_world_rank(world) == 0) staged[i] = after.staged_bytes - before.staged_bytes;
    }
    dtrain_comm_free(comm, shared, 2 * bytes);
    free(own);
    return 0;
}

/* Messages between two ranks always go through a channel, whose cells are the wire: counted, not judged. */
static int run_copies(void)
{
    uint64_t *staged = (uint64_t *)share(2 * COPIED * sizeof *staged);
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = COPY_RANKS;
    desc.threads_per_rank = 1;
    if (dtrain_launch(&desc, copies_main, staged, NULL) != DTRAIN_OK) {
        fprintf(stderr, "bench_comm: copies: %s\n", dtrain_last_error());
        return 1;
    }
    bench_title(
        "bytes copied aside, %d ranks, %d elements, in the communicator's memory and in other",
        COPY_RANKS, COPY_COUNT);
    for (int i = 0; i < COPIED; i++) {
        bench_begin("comm_copies");
        bench_string("operation", -16, copied_names[i]);
        bench_number("comm_memory", 12, 0, (double)staged[i]);
        bench_number("other_memory", 12, 0, (double)staged[COPIED + i]);
        bench_end(i == COPIED - 1 ? -1 : staged[i] == 0);
    }
    munmap(staged, 2 * COPIED * sizeof *staged);
    return 0;
}

/* ---- training: speed without slow links, and loss ---- */

static const struct variant {
    const char *name, *flags;
    bool sparse;
} variants[] = {{"none", "", false},
                {"bf16", "--reduce-dtype bf16", false},
                {"top-k 1 %", "--compression topk --topk-ratio 0.01", true},
                {"top-k 0.1 %", "--compression topk --topk-ratio 0.001", true}};
enum { VARIANTS = sizeof variants / sizeof *variants };

/* Write the flags that begin a compressed run, in shares of its steps: 20 % without compression, as
 * long as AdamW estimates second moments; then, with top-k, 50 % in which the share falls to its last
 * value. Clipping the norm would cut the sums that arrive after a while, and no residual keeps what is
 * cut: off. */
static void schedule_flags(const struct variant *v, int steps, char *flags, size_t room)
{
    const int dense = steps / 5;
    flags[0] = 0;
    if (v->sparse)
        snprintf(flags, room,
                 " --dense-steps %d --variance-steps %d --compression-warmup %d --clip 0", dense,
                 dense, steps / 2);
}

/* Train on two ranks. */
static int run_variant(train_run *run, const char *model, const char *data, const struct variant *v,
                       const char *flags)
{
    return train(opt.program, run, "--model %s --data %s --ranks 2 --threads 1 %s %s %s", model,
                 data, v->flags, flags, opt.flags);
}

/* Rounds of all variants one after the other; ratios are taken round by round. */
static int run_train_model(const char *model)
{
    static train_run run;
    double rate[VARIANTS][MAX_REPS];
    double first = NAN; /* loss, before the first exchange */
    bool same[VARIANTS];
    for (int round = 0; round < opt.rounds; round++)
        for (int v = 0; v < VARIANTS; v++) {
            const bool compressed = strstr(variants[v].flags, "--compression") != NULL;
            if (run_variant(&run, model, opt.data, &variants[v],
                            compressed ? "--steps 12 --eval-batches 0 --dense-steps 0"
                                       : "--steps 12 --eval-batches 0"))
                return 1;
            rate[v][round] = run.rate;
            if (v == 0) first = run.losses[0];
            same[v] = run.losses[0] == first && isfinite(run.losses[run.steps - 1]);
        }
    bench_title(
        "%s, 2 ranks, no slow link; step_of_none: time of a step over that of none; target 1.1",
        model);
    for (int v = 0; v < VARIANTS; v++) {
        bench_begin("comm_train");
        bench_string("model", 0, model);
        bench_string("compression", -20, variants[v].name);
        bench_spread("tokens/s", 8, 0, spread_of(rate[v], (int)opt.rounds));
        bench_spread("step_of_none", 6, 3, ratios_of(rate[0], rate[v], (int)opt.rounds, 1));
        bench_end(same[v]);
    }
    return 0;
}

static int run_train(void)
{
    for (long m = 0; m < opt.train_models.count; m++)
        if (run_train_model(model_names[opt.train_models.items[m]])) return 1;
    return 0;
}

static int run_loss(void)
{
    static train_run run;
    char begin[128], flags[192];
    double none = NAN;
    bench_title(
        "%s, 2 ranks, AdamW, %ld steps, validation loss on %s. Compressed runs begin with 20 %% "
        "whole\ngradients; top-k: then AdamW's second moments stay, and the share falls for "
        "50 %%; no clipping",
        opt.loss_model, opt.steps, opt.data);
    for (int v = 0; v < VARIANTS; v++) {
        schedule_flags(&variants[v], (int)opt.steps, begin, sizeof begin);
        snprintf(flags, sizeof flags, "--steps %ld --eval-every 0%s", opt.steps, begin);
        if (run_variant(&run, opt.loss_model, opt.data, &variants[v], flags)) return 1;
        if (v == 0) none = run.val_loss;
        bench_begin("comm_loss");
        bench_string("model", 0, opt.loss_model);
        bench_string("data", 0, opt.data);
        bench_number("steps", 0, 0, (double)opt.steps);
        bench_string("compression", -20, variants[v].name);
        bench_number("val_loss", 8, 4, run.val_loss);
        bench_number("percent_over_none", 8, 2, 100 * (run.val_loss / none - 1));
        bench_end(run.val_loss > 0 && learned(&run));
    }
    return 0;
}

/* ---- options ---- */

static const flag flag_table[] = {
    {"--parts", 'W', &opt.parts, 0, 0, "all, or several of", part_names},
    {"--model", 's', &opt.model, 0, 0, "of links: gpt2_bytes (256 tokens) or one of train_gpt's",
     NULL},
    {"--gbps", 's', &opt.gbps, 0, 0, "bandwidths of a link", NULL},
    {"--latency", 'f', &opt.latency, 0, 1e6, "of a message, in us", NULL},
    {"--nodes", 'I', &opt.nodes, 2, MAX_WORLD, "numbers of nodes: 2,4,8", NULL},
    {"--node-ranks", 'I', &opt.node_ranks, 1, MAX_WORLD, "numbers of ranks a node: 1,4", NULL},
    {"--methods", 'W', &opt.methods, 0, 0, "all, or several of", method_ids},
    {"--backward-ms", 'f', &opt.backward_ms, 0, 1e6, "in rows of a step; 0: as the exchange", NULL},
    {"--reps", 'i', &opt.reps, 1, MAX_REPS, "exchanges of a row", NULL},
    {"--shrink", 'i', &opt.shrink, 0, 4096, "divides gradients and bandwidth; 0: to fit memory",
     NULL},
    {"--svg", 's', &opt.svg, 0, 0, "draw the break-even curves to this file", NULL},
    {"--program", 's', &opt.program, 0, 0, "the trainer", NULL},
    {"--train-models", 'W', &opt.train_models, 0, 0, "baby, or several of", model_names},
    {"--loss-model", 's', &opt.loss_model, 0, 0, "of the part loss", NULL},
    {"--data", 's', &opt.data, 0, 0, "text to train on", NULL},
    {"--flags", 's', &opt.flags, 0, 0, "more flags of the trainer", NULL},
    {"--steps", 'i', &opt.steps, 1, BENCH_MOST * 1024, "of a run for its loss", NULL},
    {"--rounds", 'i', &opt.rounds, 1, MAX_REPS, "of runs for their speed", NULL},
    BENCH_FLAGS};

static void check_options(void)
{
    gpt_config config;
    bool good = model_config(&config);
    bench_numbers("bench_comm", "--gbps", opt.gbps, 1e-3, 1e6, &speeds);
    good = good && speeds.count <= MAX_SPEEDS;
    for (long n = 0; n < opt.nodes.count; n++)
        for (long e = 0; e < opt.node_ranks.count; e++)
            good = good && opt.nodes.items[n] * opt.node_ranks.items[e] <= MAX_WORLD;
    if (good) return;
    fprintf(
        stderr,
        "bench_comm: --model takes a model of train_gpt or gpt2_bytes, --gbps %d numbers; nodes x "
        "ranks are at most %d\n",
        MAX_SPEEDS, MAX_WORLD);
    exit(2);
}

int main(int argc, char **argv)
{
    static int (*const parts[])(void) = {run_copies, run_links, run_overlap, run_train, run_loss};
    int failed = 0;
    if (is_quick(argc, argv)) {
        const flag_list two = {1, {2}}, both = {2, {1, 2}}, tiny = {1, {0}};
        opt.model = "tiny";
        opt.gbps = "10,100";
        opt.latency = 5;
        opt.nodes = two;
        opt.node_ranks = both;
        opt.train_models = tiny;
        opt.flags = "--layers 1 --channels 32 --seq 16 --batch 2";
        opt.reps = opt.rounds = 1;
        opt.steps = 40;
    }
    bench_start("bench_comm", "exchanges of gradients over slow links", flag_table,
                sizeof flag_table / sizeof *flag_table, argc, argv);
    check_options();
    for (long i = 0; i < opt.parts.count && !failed; i++) failed = parts[opt.parts.items[i]]();
    return failed || bench.wrong > 0;
}
