/* bench_comm.c: what an exchange of gradients costs over slow links, and what helps: buckets, overlap, nodes,
 * fewer bits, fewer elements, low rank.
 *
 *   run:     make bench-comm ARGS="--svg comm.svg"                        (three quarters of an hour on two cores)
 *            build/bench/bench_comm --parts links --nodes 2 --gbps 1,10   (GPT-2's 148 tensors, 124 M gradients)
 *            build/bench/bench_comm --parts loss --data shakespeare.txt --steps 2000
 *
 * copies   bytes that an operation copies aside: collectives none in memory of dtrain_comm_alloc.
 *
 * links    ranks of this machine as nodes with emulated links (dtrain_launch_desc.emulation), in every
 *          combination of --gbps, --nodes and --node-ranks. Gradients are random numbers, new in each exchange;
 *          all of them are ready at once. Compression begins at once too (dense_steps 0), with error feedback.
 *          Rows of a step have a backward before or around the exchange, modelled by waiting: tensor by tensor,
 *          by elements, the head first; it lasts --backward-ms, or as long as the plain exchange took, where
 *          overlap has most to gain. The tied embedding is final last, so nothing can hide it.
 *
 *            ms          of an exchange (or step), on the slowest rank: median over --reps, least and most
 *            link ms     by the alpha-beta formula: rounds x latency + bytes a node sends x 8 / bandwidth
 *            cpu ms      processor time of a rank in it, waiting with sched_yield included
 *            own         ms if every rank had a core of its own, at most: link + cpu. Ranks share the cores of
 *                        this machine; those of a cluster do not
 *            MB/node     over the link of a node, counted; MB/rank: the communicators' wire_bytes
 *            GB/s        bytes of gradients / time
 *            x plain     time of the plain exchange (rows of a step: of the plain step) / time; then by formula
 *                        alone, then for cores of their own
 *            correct     against sums of the ranks' gradients on a sample of elements; what is compressed:
 *                        residuals + N x means so far = gradients so far
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
#include "tools/train_gpt/gpt.h"

enum {
    MAX_REPS = 16,
    MAX_SPEEDS = 8,
    MAX_LIST = 8,
    MAX_ROWS = 1024,
    MAX_WORLD = 64,
    SAMPLES_EACH = 4,
    MAX_SAMPLES = 1024,
    TABLE = 65536,
    POWERSGD_RANK = 4
};

static struct options {
    const char *parts, *model, *gbps, *nodes, *node_ranks, *methods, *program, *data, *svg, *flags;
    const char *train_models, *loss_model;
    double latency, backward_ms;
    int reps, shrink, steps, rounds, json;
} opt = {.parts = "copies,links,overlap,train,loss",
         .model = "gpt2",
         .gbps = "1,10,25,100",
         .nodes = "2,4,8",
         .node_ranks = "1,4",
         .methods = "all",
         .program = "build/train_gpt",
         .data = "dtrain.h",
         .flags = "",
         .train_models = "baby",
         .loss_model = "tiny",
         .latency = 50,
         .reps = 3,
         .steps = 2000,
         .rounds = 3};

/* ---- how gradients travel ---- */

typedef struct method {
    const char *id, *name;
    uint32_t compression, exchange, reduce_dtype;
    float ratio;
    bool hierarchical, backward, overlap;
    size_t bucket_bytes;
} method;

#define ONE_BUCKET ((size_t)1 << 40)
#define MIB ((size_t)1 << 20)

enum { PLAIN = 0, PLAIN_STEP = 2, HIERARCHICAL = 5 }; /* places in the table below */
static const method methods[] = {
    {"plain", "plain, one bucket", 0, 0, 0, 0, false, false, false, ONE_BUCKET},
    {"bucketed", "bucketed, 25 MiB", 0, 0, 0, 0, false, false, false, 25 * MIB},
    {"step", "step: backward, plain", 0, 0, 0, 0, false, true, false, ONE_BUCKET},
    {"step", "step: overlapped, 25 MiB", 0, 0, 0, 0, false, true, true, 25 * MIB},
    {"step", "step: overlapped, 4 MiB", 0, 0, 0, 0, false, true, true, 4 * MIB},
    {"hier", "hierarchical", 0, 0, 0, 0, true, false, true, 25 * MIB},
    {"bf16", "bf16", 0, 0, DTRAIN_DTYPE_BF16, 0, false, false, true, 25 * MIB},
    {"bf16", "hierarchical, bf16", 0, 0, DTRAIN_DTYPE_BF16, 0, true, false, true, 25 * MIB},
    {"topk", "top-k 1 %", DTRAIN_COMPRESSION_TOPK, 0, 0, 0.01f, false, false, true, 25 * MIB},
    {"topk", "top-k 1 %, balanced", DTRAIN_COMPRESSION_TOPK, 1, 0, 0.01f, false, false, true,
     25 * MIB},
    {"topk", "top-k 0.1 %", DTRAIN_COMPRESSION_TOPK, 0, 0, 0.001f, false, false, true, 25 * MIB},
    {"topk", "top-k 0.1 %, balanced", DTRAIN_COMPRESSION_TOPK, 1, 0, 0.001f, false, false, true,
     25 * MIB},
    {"topk", "hierarchical, top-k 1 %", DTRAIN_COMPRESSION_TOPK, 0, 0, 0.01f, true, false, true,
     25 * MIB},
    {"powersgd", "PowerSGD, rank 4", DTRAIN_COMPRESSION_POWERSGD, 0, 0, 0, false, false, true,
     25 * MIB},
};
enum { METHODS = sizeof methods / sizeof *methods };

static dtrain_strategy_desc strategy_desc(const method *m)
{
    dtrain_strategy_desc desc = {0};
    desc.no_overlap = !m->overlap;
    desc.bucket_bytes = m->bucket_bytes;
    desc.first_bucket_bytes = m->bucket_bytes < ONE_BUCKET ? MIB : m->bucket_bytes;
    desc.reduce_dtype = m->reduce_dtype;
    desc.hierarchical = m->hierarchical;
    return desc;
}

static dtrain_compression_desc compression_desc(const method *m)
{
    dtrain_compression_desc desc = {0};
    desc.kind = m->compression;
    desc.sparse_exchange = m->exchange;
    desc.powersgd_rank = POWERSGD_RANK;
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

static double speeds[MAX_SPEEDS];
static int speed_count;

/* In shared memory: ranks are processes. */
typedef struct board {
    result results[METHODS][MAX_SPEEDS];
    float residuals[MAX_WORLD][MAX_SAMPLES];
} board;

/* Numbers between commas; the count, or -1. */
static int split_numbers(const char *text, double *numbers)
{
    int count = 0;
    while (*text) {
        char *end;
        numbers[count] = strtod(text, &end);
        if (end == text || !(numbers[count] > 0) || (*end && *end != ',')) return -1;
        text = *end ? end + 1 : end;
        if (++count == MAX_LIST && *text) return -1;
    }
    return count > 0 ? count : -1;
}

static bool has_word(const char *list, const char *word)
{
    const size_t length = strlen(word);
    for (const char *at = list; (at = strstr(at, word)) != NULL; at++)
        if ((at == list || at[-1] == ',') && (at[length] == 0 || at[length] == ',')) return true;
    return false;
}

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
    j->world->emulation.gigabits_per_second = gbps / j->at.shrink;
    j->world->emulation.latency_us = latency;
    return dtrain_world_all_gather(j->world, NULL, 0, NULL);
}

/* ---- books ---- */

typedef struct books {
    double slow, wire,
        staged; /* bytes so far: over this node's link, by the ring formula, copied aside */
} books;

/* Every kind of collective here sends each other rank as much, so those on other nodes have their share. */
static void add_comm(const job *j, const dtrain_comm *comm, books *sum)
{
    dtrain_comm_info info;
    int away = 0;
    dtrain_comm_query(comm, &info);
    for (int i = 0; i < comm->size; i++)
        away += comm->world_ranks[i] / j->at.node_ranks != j->rank / j->at.node_ranks;
    sum->wire += (double)info.wire_bytes;
    sum->staged += (double)info.staged_bytes;
    if (comm->size > 1) sum->slow += (double)info.wire_bytes * away / (comm->size - 1);
}

static books books_of(const job *j)
{
    books sum = {0, 0, 0};
    add_comm(j, j->strategy->comm, &sum);
    for (int i = 0; i < DTRAIN__GROUPS; i++)
        if (j->strategy->groups[i]) add_comm(j, j->strategy->groups[i], &sum);
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

/* Behind an exchange: the books of sampled elements; what travels whole is right in each of them. */
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

static float residual_at(const dtrain_compression_state *states, size_t count,
                         const dtrain_param *p, int64_t at)
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
    const dtrain_compression_state *states;
    size_t count;
    int s = 0;
    DTRAIN__TRY(dtrain_strategy_compression(j->strategy, &states, &count));
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

typedef struct traffic {
    double bytes; /* a node sends */
    int rounds;
} traffic;

static traffic formula(const job *j, const method *m)
{
    const double n = j->ranks, nodes = j->at.nodes, g = j->at.node_ranks, away = n - g;
    const double reduced = m->hierarchical ? 2 * (nodes - 1) / nodes : 2 * g * away / n;
    const double gathered = m->exchange ? reduced : m->hierarchical ? nodes - 1 : g * away;
    double whole = 0, selected = 0, factors = 0;
    traffic t = {0, 2};
    for (size_t i = 0; i < j->model.param_count; i++) {
        const dtrain_param *p = &j->model.params[i];
        const double count = (double)p->count,
                     sides = POWERSGD_RANK * (double)(p->shape[0] + p->shape[1]);
        const bool matrix = p->shape[1] > 0 && p->count >= 1024;
        if (p->alias_of) continue;
        if (m->compression == DTRAIN_COMPRESSION_TOPK && matrix)
            selected += fmax(1, floor((double)m->ratio * count + 0.5));
        else if (m->compression == DTRAIN_COMPRESSION_POWERSGD && matrix && 2 * sides < count)
            factors += sides;
        else whole += count;
    }
    t.bytes = reduced * (whole * (m->reduce_dtype ? 2 : 4) + factors * 4) + gathered * selected * 8;
    if (factors > 0) t.rounds = 4;
    return t;
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
            if (layout->entries[i].bucket == (uint32_t)b) ready = share * backward;
        }
        end = fmax(end, ready) + (double)layout->buckets[b].count * seconds_each;
    }
    return end;
}

static void predict(const job *j, const method *m, double gbps, result *r)
{
    const traffic t = formula(j, m);
    const double rate = gbps * 1e9 / 8 / j->at.shrink;
    const double latency = 1e-6 * opt.latency * t.rounds;
    const double elements = j->at.gradient_bytes / 4;
    r->formula_bytes = t.bytes;
    r->formula = t.bytes / rate + latency + r->backward;
    if (m->backward && m->overlap)
        r->formula = overlapped_seconds(j, r->backward, t.bytes / rate / elements) + latency;
}

/* ---- one method on one rank ---- */

static dtrain_result run_speed(job *j, int which, int speed)
{
    const method *m = &methods[which];
    result *board_row = &j->shared->results[which][speed], r;
    memset(&r, 0, sizeof r);
    DTRAIN__TRY(set_link(j, speeds[speed], opt.latency));
    if (m->backward)
        r.backward = opt.backward_ms > 0
                         ? 1e-3 * opt.backward_ms
                         : median(j->shared->results[PLAIN][speed].seconds, opt.reps);
    predict(j, m, speeds[speed], &r);
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
    for (int s = 0; s < speed_count; s++) DTRAIN__TRY(run_speed(j, which, s));
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
    for (int s = 0; s < speed_count && j->rank == 0; s++) {
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
    return has_word(opt.methods, "all") || has_word(opt.methods, m->id);
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
    j->work = (double *)calloc(j->model.param_count, sizeof *j->work);
    j->table = (float *)malloc(TABLE * sizeof *j->table);
    if (!j->work || !j->table) return DTRAIN_ERROR_MEMORY;
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
    return j->model.param_count * SAMPLES_EACH <= MAX_SAMPLES ? DTRAIN_OK : DTRAIN_ERROR_ARGUMENT;
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
    dtrain_log(world, DTRAIN_LOG_ERROR, "%s: %s", dtrain_result_name(outcome), dtrain_last_error());
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
    if (!model_config(&config) || gpt_create(&model, &config) != DTRAIN_OK) return 1;
    at->gradient_bytes = 4 * (double)shrink_model(&model, at->shrink);
    gpt_free(&model);
    return 0;
}

static void *map_shared(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static int launch_shape(job *j)
{
    dtrain_launch_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = (uint32_t)(j->at.nodes * j->at.node_ranks);
    desc.threads_per_rank = 1;
    desc.log_level = DTRAIN_LOG_ERROR;
    desc.emulation.node_ranks = (uint32_t)j->at.node_ranks;
    desc.emulation.gigabits_per_second = 1e6;
    if (dtrain_launch(&desc, rank_main, j, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "bench_comm: %s\n", dtrain_last_error());
    return 1;
}

static void keep_rows(const job *j)
{
    for (int s = 0; s < speed_count; s++)
        for (int m = 0; m < METHODS && row_count < MAX_ROWS; m++) {
            if (!j->shared->results[m][s].valid) continue;
            rows[row_count].how = &methods[m];
            rows[row_count].at = j->at;
            rows[row_count].gbps = speeds[s];
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
    for (j.at.shrink = opt.shrink ? opt.shrink : 1;; j.at.shrink *= 2) {
        const double room = 0.85 * available_bytes();
        if (measure_gradients(&j.at)) return 1;
        if (needed_bytes(&j.at) <= room) break;
        if (opt.shrink || j.at.shrink > 64) {
            printf("skip %d nodes of %d ranks: %.1f GiB needed, %.1f free\n", nodes, node_ranks,
                   needed_bytes(&j.at) / 0x1p30, room / 0x1p30);
            return 0;
        }
    }
    j.shared = (board *)map_shared(sizeof *j.shared);
    j.zeros = (float *)map_shared((size_t)j.at.gradient_bytes);
    failed = !j.shared || !j.zeros || launch_shape(&j);
    if (!failed) keep_rows(&j);
    if (j.shared) munmap(j.shared, sizeof *j.shared);
    if (j.zeros) munmap(j.zeros, (size_t)j.at.gradient_bytes);
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

static double milliseconds(const row *r) { return 1e3 * median(r->r.seconds, opt.reps); }
static double cpu_ms(const row *r) { return 1e3 * median(r->r.cpu, opt.reps); }
static double own_ms(const row *r) { return 1e3 * r->r.formula + cpu_ms(r); }

/* How much faster than what it is compared with, by the clock, by formula, on cores of their own. */
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

static void print_heading(const shape *at, double gbps)
{
    const row *plain = find(at, gbps, PLAIN);
    printf("\n%g Gb/s, %g us, %d nodes of %d rank%s, %.1f MB of gradients", gbps, opt.latency,
           at->nodes, at->node_ranks, at->node_ranks > 1 ? "s" : "", at->gradient_bytes / 1e6);
    if (at->shrink > 1) printf(" (1/%d, as is the bandwidth)", at->shrink);
    if (plain && find(at, gbps, PLAIN_STEP))
        printf("; backward %.0f ms", 1e3 * find(at, gbps, PLAIN_STEP)->r.backward);
    printf("\n%-25s %8s %8s %8s %8s %8s %8s  %8s %8s %7s  %7s %7s %7s  %s\n", "", "ms", "min",
           "max", "link ms", "cpu ms", "own", "MB/node", "MB/rank", "GB/s", "x plain", "formula",
           "own", "correct");
}

static void print_row(const row *r)
{
    const spread ms = spread_of(r->r.seconds, opt.reps);
    const gains g = gains_of(r);
    printf("%-25s %8.1f %8.1f %8.1f %8.1f %8.1f %8.1f  %8.2f %8.2f %7.2f  %7.2f %7.2f %7.2f  %s\n",
           r->how->name, 1e3 * ms.median, 1e3 * ms.min, 1e3 * ms.max, 1e3 * r->r.formula, cpu_ms(r),
           own_ms(r), r->r.node_bytes / 1e6, r->r.wire_bytes / 1e6,
           r->at.gradient_bytes / ms.median / 1e9, g.measured, g.formula, g.own,
           r->r.correct ? "yes" : "NO");
}

static void print_row_json(const row *r)
{
    const spread ms = spread_of(r->r.seconds, opt.reps);
    const gains g = gains_of(r);
    printf("{\"bench\": \"comm\", \"model\": \"%s\", \"gbps\": %g, \"latency_us\": %g, \"nodes\": "
           "%d, \"node_ranks\": %d, \"shrink\": %d, \"method\": \"%s\", \"ms\": %.6g, \"min\": "
           "%.6g, \"max\": %.6g, \"backward_ms\": %.6g, \"link_ms\": %.6g, \"cpu_ms\": %.6g, "
           "\"node_mb\": %.6g, \"rank_mb\": %.6g, \"formula_mb\": %.6g, \"gbytes_per_second\": "
           "%.4g, \"x_plain\": %.4g, \"x_plain_formula\": %.4g, \"x_plain_own_cores\": %.4g, "
           "\"staged_bytes\": %llu, \"correct\": %s}\n",
           opt.model, r->gbps, opt.latency, r->at.nodes, r->at.node_ranks, r->at.shrink,
           r->how->name, 1e3 * ms.median, 1e3 * ms.min, 1e3 * ms.max, 1e3 * r->r.backward,
           1e3 * r->r.formula, cpu_ms(r), r->r.node_bytes / 1e6, r->r.wire_bytes / 1e6,
           r->r.formula_bytes / 1e6, r->at.gradient_bytes / ms.median / 1e9, g.measured, g.formula,
           g.own, (unsigned long long)r->r.staged_bytes, r->r.correct ? "true" : "false");
}

/* What was asked of a figure; ranks beyond the cores wait for each other's arithmetic. */
static void print_target(const char *what, const shape *at, double target, const row *r)
{
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (!r || opt.json) return;
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

/* Prints the rows from `first` on, of one shape; returns how many have wrong sums or copies. */
static int report_rows(int first)
{
    int bad = 0;
    for (int i = first; i < row_count; i++) {
        const row *r = &rows[i];
        bad += !r->r.correct + (r->r.staged_bytes > 0);
        if (r->r.staged_bytes)
            fprintf(stderr, "bench_comm: %s copied %llu bytes aside\n", r->how->name,
                    (unsigned long long)r->r.staged_bytes);
        if (opt.json) print_row_json(r);
        else {
            if (i == first || r[-1].gbps != r->gbps) print_heading(&r->at, r->gbps);
            print_row(r);
        }
    }
    return bad;
}

/* ---- break-even ----
 *
 * plain and method take link bytes / rate + latency + processor time each, on cores of their own: they meet
 * at rate = (bytes saved) / (processor time and latency added). */

static double least_cpu(const shape *at, int which)
{
    double least = INFINITY;
    for (int s = 0; s < speed_count; s++) {
        const row *r = find(at, speeds[s], which);
        if (r) least = fmin(least, 1e-3 * cpu_ms(r));
    }
    return least;
}

static double model_seconds(const shape *at, int which, double gbps)
{
    const row *r = find(at, speeds[0], which);
    const double rate = 1e9 / 8 / at->shrink, bytes = r->r.formula_bytes;
    return bytes / (gbps * rate) + (r->r.formula - bytes / (speeds[0] * rate)) +
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

enum { CURVES = 5 };
static const struct {
    int method;
    const char *color;
} curves[CURVES] = {
    {6, "#0072b2"}, {8, "#d55e00"}, {9, "#e69f00"}, {10, "#009e73"}, {13, "#cc79a7"}};

static void print_break_even(void)
{
    bool headed = false;
    for (int i = 0; i < row_count; i++) {
        const shape *at = &rows[i].at;
        if (rows[i].how != &methods[PLAIN] || rows[i].gbps != speeds[0] || at->node_ranks > 1)
            continue;
        if (!headed) {
            printf(
                "\npays up to (Gb/s, by formula and processor time, a core for each rank)\n%-25s",
                "");
            for (int c = 0; c < CURVES; c++) printf(" %22s", methods[curves[c].method].name);
            headed = true;
        }
        printf("\n%d nodes %-17s", at->nodes, "");
        for (int c = 0; c < CURVES; c++) {
            if (!find(at, speeds[0], curves[c].method)) printf(" %22s", "-");
            else printf(" %22.1f", break_even(at, curves[c].method));
        }
    }
    if (headed) printf("\n");
}

/* ---- the drawing: one panel for each number of nodes, x Gb/s, y times as fast as plain ---- */

enum { PANEL = 330, HEIGHT = 270, LEFT = 62, TOP = 78, GAP = 48 };
static const double y_least = 0.25, y_most = 128;

static double x_of(double gbps)
{
    return (log10(gbps) - log10(speeds[0])) / (log10(speeds[speed_count - 1]) - log10(speeds[0])) *
           PANEL;
}
static double y_of(double times)
{
    const double t = fmin(fmax(times, y_least), y_most);
    return HEIGHT * (1 - (log2(t) - log2(y_least)) / (log2(y_most) - log2(y_least)));
}

static void draw_axes(FILE *svg, const shape *at, bool first)
{
    static const double marks[] = {0.1, 1, 2, 5, 10, 25, 50, 100, 200, 400};
    fprintf(svg, "<rect width='%d' height='%d' fill='none' stroke='#888'/>\n", PANEL, HEIGHT);
    fprintf(svg, "<text x='%d' y='-10' text-anchor='middle' font-weight='bold'>%d nodes</text>\n",
            PANEL / 2, at->nodes);
    for (double y = y_least; y <= y_most; y *= 2) {
        fprintf(svg, "<path d='M0 %.1fH%d' stroke='%s'/>\n", y_of(y), PANEL,
                y == 1 ? "#333" : "#e4e4e4");
        if (first)
            fprintf(svg, "<text x='-8' y='%.1f' text-anchor='end'>%g</text>\n", y_of(y) + 4, y);
    }
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        if (marks[i] < speeds[0] || marks[i] > speeds[speed_count - 1]) continue;
        fprintf(svg, "<path d='M%.1f 0V%d' stroke='#e4e4e4'/>\n", x_of(marks[i]), HEIGHT);
        fprintf(svg, "<text x='%.1f' y='%d' text-anchor='middle'>%g</text>\n", x_of(marks[i]),
                HEIGHT + 18, marks[i]);
    }
    fprintf(svg, "<text x='%d' y='%d' text-anchor='middle'>link, Gb/s</text>\n", PANEL / 2,
            HEIGHT + 38);
}

static void draw_curve(FILE *svg, const shape *at, int which, const char *color)
{
    const double first = speeds[0], last = speeds[speed_count - 1];
    fprintf(svg, "<path fill='none' stroke='%s' stroke-width='2' d='", color);
    for (int i = 0; i <= 48; i++) {
        const double gbps = first * pow(last / first, i / 48.0);
        fprintf(svg, "%s%.1f %.1f", i ? "L" : "M", x_of(gbps),
                y_of(model_seconds(at, PLAIN, gbps) / model_seconds(at, which, gbps)));
    }
    fprintf(svg, "'/>\n");
    for (int s = 0; s < speed_count; s++) {
        const row *r = find(at, speeds[s], which);
        if (r)
            fprintf(svg,
                    "<circle cx='%.1f' cy='%.1f' r='4' fill='%s' stroke='#fff'><title>%s, %g Gb/s: "
                    "%.2f</title></circle>\n",
                    x_of(speeds[s]), y_of(gains_of(r).measured), color, r->how->name, speeds[s],
                    gains_of(r).measured);
    }
}

static void draw_legend(FILE *svg)
{
    int x = LEFT;
    fprintf(svg,
            "<text transform='translate(18 %d) rotate(-90)' text-anchor='middle'>times as fast as "
            "plain</text>\n",
            TOP + HEIGHT / 2);
    for (int c = 0; c < CURVES; c++) {
        const char *name = methods[curves[c].method].name;
        fprintf(svg,
                "<path d='M%d 46h22' stroke='%s' stroke-width='3'/><text x='%d' y='50'>%s</text>\n",
                x, curves[c].color, x + 28, name);
        x += 52 + 7 * (int)strlen(name);
    }
}

static int draw(void)
{
    int panels = 0;
    FILE *svg = fopen(opt.svg, "w");
    if (!svg) {
        fprintf(stderr, "bench_comm: cannot write %s\n", opt.svg);
        return 1;
    }
    for (int i = 0; i < row_count; i++)
        panels += rows[i].how == &methods[PLAIN] && rows[i].gbps == speeds[0] &&
                  rows[i].at.node_ranks == 1;
    const int width = LEFT + (panels > 1 ? panels : 2) * (PANEL + GAP);
    const int height = TOP + HEIGHT + 86;
    fprintf(svg,
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 %d %d' width='%d' height='%d' "
            "font-family='sans-serif' font-size='12'>\n<rect width='100%%' height='100%%' "
            "fill='#fff'/>\n<text x='%d' y='24' font-size='15'>When compression pays: exchange of "
            "%s's gradients, times as fast as fp32 in one bucket</text>\n",
            width, height, width, height, LEFT, opt.model);
    draw_legend(svg);
    panels = 0;
    for (int i = 0; i < row_count; i++) {
        const shape *at = &rows[i].at;
        if (rows[i].how != &methods[PLAIN] || rows[i].gbps != speeds[0] || at->node_ranks > 1)
            continue;
        fprintf(svg, "<g transform='translate(%d %d)'>\n", LEFT + panels * (PANEL + GAP), TOP);
        draw_axes(svg, at, panels++ == 0);
        for (int c = 0; c < CURVES; c++)
            if (find(at, speeds[0], curves[c].method))
                draw_curve(svg, at, curves[c].method, curves[c].color);
        fprintf(svg, "</g>\n");
    }
    fprintf(svg,
            "<text x='%d' y='%d' fill='#555'>points: measured, all ranks on %ld cores; lines: "
            "formula (%g us) and processor time, a core for each rank; below 1 plain is "
            "faster</text>\n</svg>\n",
            LEFT, height - 14, sysconf(_SC_NPROCESSORS_ONLN), opt.latency);
    return fclose(svg) != 0;
}

static int run_links(void)
{
    double nodes[MAX_LIST], each[MAX_LIST];
    const int node_count = split_numbers(opt.nodes, nodes),
              each_count = split_numbers(opt.node_ranks, each);
    int bad = 0;
    for (int e = 0; e < each_count; e++)
        for (int n = 0; n < node_count; n++) {
            const int first = row_count;
            if (run_shape((int)nodes[n], (int)each[e])) return 1;
            bad += report_rows(first);
        }
    if (!opt.json) printf("\n");
    for (int i = 0; i < row_count; i++)
        if (rows[i].how == &methods[PLAIN] && rows[i].gbps == 1) print_targets(&rows[i].at);
    if (!opt.json && speed_count > 1) print_break_even();
    if (opt.svg && speed_count > 1) bad += draw();
    return bad;
}

static int run_overlap(void)
{
    const struct options all = opt;
    int bad;
    row_count = 0;
    speed_count = 1;
    if (strcmp(opt.model, "gpt2") == 0) opt.model = "gpt2_bytes";
    opt.methods = "step";
    opt.nodes = "2";
    opt.node_ranks = "1";
    opt.svg = NULL;
    bad = run_links();
    opt = all;
    return bad;
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
    char *own = (char *)calloc(2, bytes);
    if (!own || dtrain_comm_alloc(comm, 2 * bytes, &shared) != DTRAIN_OK) return 1;
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
    uint64_t *staged = (uint64_t *)map_shared(2 * COPIED * sizeof *staged);
    dtrain_launch_desc desc;
    int bad = 0;
    memset(&desc, 0, sizeof desc);
    desc.rank_count = COPY_RANKS;
    desc.threads_per_rank = 1;
    if (!staged || dtrain_launch(&desc, copies_main, staged, NULL) != DTRAIN_OK) {
        fprintf(stderr, "bench_comm: copies: %s\n", dtrain_last_error());
        return 1;
    }
    if (!opt.json)
        printf("bytes copied aside, %d ranks, %d elements\n%-16s %22s %14s\n", COPY_RANKS,
               COPY_COUNT, "", "communicator's memory", "other memory");
    for (int i = 0; i < COPIED; i++) {
        const unsigned long long shared = staged[i], own = staged[COPIED + i];
        bad += shared != 0 && i < COPIED - 1;
        if (opt.json)
            printf("{\"bench\": \"comm_copies\", \"operation\": \"%s\", \"comm_memory_bytes\": "
                   "%llu, \"other_memory_bytes\": %llu, \"correct\": %s}\n",
                   copied_names[i], shared, own, shared && i < COPIED - 1 ? "false" : "true");
        else printf("%-16s %22llu %14llu\n", copied_names[i], shared, own);
    }
    if (!opt.json)
        printf("target: no collective copies from memory of the communicator: %s\n",
               bad ? "missed" : "met");
    munmap(staged, 2 * COPIED * sizeof *staged);
    return bad;
}

/* ---- training: speed without slow links, and loss ---- */

static const struct variant {
    const char *name, *flags;
    bool sparse;
} variants[] = {{"none", "", false},
                {"bf16", "--reduce-dtype bf16", false},
                {"top-k 1 %", "--compression topk --topk-ratio 0.01", true},
                {"top-k 0.1 %", "--compression topk --topk-ratio 0.001", true},
                {"PowerSGD, rank 4", "--compression powersgd --powersgd-rank 4", false}};
enum { VARIANTS = sizeof variants / sizeof *variants };

/* How a run of `steps` begins, in shares of it: 20 % without compression, as long as AdamW estimates second
 * moments; then, with top-k, 50 % in which the share falls to its last value. Clipping the norm would cut
 * the sums that arrive after a while, and what is cut is in no residual: off. */
static void schedule_flags(const struct variant *v, int steps, char *flags, size_t room)
{
    const int dense = steps / 5;
    flags[0] = 0;
    if (v->sparse)
        snprintf(flags, room,
                 " --dense-steps %d --variance-steps %d --compression-warmup %d --clip 0", dense,
                 dense, steps / 2);
    else if (strstr(v->flags, "powersgd")) snprintf(flags, room, " --dense-steps %d", dense);
}

/* The log of a run, line by line; NULL when it failed. */
static FILE *train(const char *model, const struct variant *v, const char *flags)
{
    static char text[1 << 20];
    char command[1024], log[64];
    FILE *lines;
    snprintf(log, sizeof log, "/tmp/bench_comm.%ld.jsonl", (long)getpid());
    snprintf(command, sizeof command,
             "%s --model %s --data %s --ranks 2 --threads 1 --sample 0 --log %s %s %s %s",
             opt.program, model, opt.data, log, v->flags, flags, opt.flags);
    if (capture(command, text, sizeof text)) {
        fprintf(stderr, "bench_comm: failed: %s\n%s\n", command, text);
        return NULL;
    }
    lines = fopen(log, "r");
    remove(log); /* it stays until it is closed */
    return lines;
}

/* Median of tokens/s over the steps without the first two. */
static double train_rate(const char *model, const struct variant *v)
{
    static bench_log run;
    char flags[96];
    snprintf(flags, sizeof flags, "--steps 12 --eval-batches 0%s",
             strstr(v->flags, "--compression") ? " --dense-steps 0" : "");
    return read_log(train(model, v, flags), &run) ? 0 : run.rate;
}

/* Rounds of all variants one after the other; ratios are taken round by round. */
static int run_train_model(const char *model)
{
    double rate[VARIANTS][MAX_REPS], ratio[MAX_REPS];
    for (int round = 0; round < opt.rounds; round++)
        for (int v = 0; v < VARIANTS; v++)
            if ((rate[v][round] = train_rate(model, &variants[v])) <= 0) return 1;
    if (!opt.json)
        printf("\n%s, 2 ranks, no slow link: tokens/s\n%-20s %10s %10s %10s %12s\n", model, "",
               "median", "min", "max", "time of none");
    for (int v = 0; v < VARIANTS; v++) {
        for (int i = 0; i < opt.rounds; i++) ratio[i] = rate[0][i] / rate[v][i];
        const spread r = spread_of(rate[v], opt.rounds), x = spread_of(ratio, opt.rounds);
        if (opt.json)
            printf("{\"bench\": \"comm_train\", \"model\": \"%s\", \"compression\": \"%s\", "
                   "\"tokens_per_second\": %.6g, \"min\": %.6g, \"max\": %.6g, \"step_of_none\": "
                   "%.4g, \"step_of_none_min\": %.4g, \"step_of_none_max\": %.4g}\n",
                   model, variants[v].name, r.median, r.min, r.max, x.median, x.min, x.max);
        else
            printf("%-20s %10.0f %10.0f %10.0f %11.3fx  %s\n", variants[v].name, r.median, r.min,
                   r.max, x.median,
                   v == 0            ? ""
                   : x.median <= 1.1 ? "target 1.1x: met"
                                     : "target 1.1x: missed");
    }
    return 0;
}

static int run_train(void)
{
    char model[32];
    for (const char *at = opt.train_models; *at;) {
        const size_t length = strcspn(at, ",");
        snprintf(model, sizeof model, "%.*s", (int)length, at);
        if (run_train_model(model)) return 1;
        at += length + (at[length] == ',');
    }
    return 0;
}

static double validation_loss(const struct variant *v, const char *model)
{
    char line[2048], begin[128], flags[192];
    double loss = NAN;
    schedule_flags(v, opt.steps, begin, sizeof begin);
    snprintf(flags, sizeof flags, "--steps %d --eval-every 0%s", opt.steps, begin);
    FILE *log = train(model, v, flags);
    if (!log) return NAN;
    while (fgets(line, sizeof line, log)) loss = number_after(line, "\"val_loss\": ", loss);
    fclose(log);
    return loss;
}

static int run_loss(void)
{
    double none = NAN;
    if (!opt.json)
        printf("\n%s, 2 ranks, AdamW, %d steps, validation loss on %s. Compressed runs begin with "
               "20 %% whole\n"
               "gradients; top-k: then AdamW's second moments stay, and the share falls for 50 %%; "
               "no clipping\n",
               opt.loss_model, opt.steps, opt.data);
    for (int v = 0; v < VARIANTS; v++) {
        const double loss = validation_loss(&variants[v], opt.loss_model);
        if (!(loss > 0)) return 1;
        if (v == 0) none = loss;
        const double percent = 100 * (loss / none - 1);
        if (opt.json)
            printf("{\"bench\": \"comm_loss\", \"model\": \"%s\", \"steps\": %d, \"compression\": "
                   "\"%s\", \"val_loss\": %.6g, \"of_none\": %.6g}\n",
                   opt.loss_model, opt.steps, variants[v].name, loss, loss / none);
        else
            printf("%-20s %9.4f %+8.2f %%%s\n", variants[v].name, loss, percent,
                   strncmp(variants[v].name, "top-k 1 %", 9) != 0 || opt.steps < 2000 ? ""
                   : percent <= 1 ? "  target within 1 %: met"
                                  : "  target within 1 %: missed");
        fflush(stdout);
    }
    return 0;
}

/* ---- options ---- */

static const bench_option option_table[] = {
    {"--parts", NULL, NULL, &opt.parts, "of copies, links, overlap, train, loss; all of them"},
    {"--model", NULL, NULL, &opt.model, "of links: gpt2, gpt2_bytes (256 tokens), baby, ...; gpt2"},
    {"--gbps", NULL, NULL, &opt.gbps, "bandwidths of a link; 1,10,25,100"},
    {"--latency", NULL, &opt.latency, NULL, "of a message, in us; 50"},
    {"--nodes", NULL, NULL, &opt.nodes, "numbers of nodes; 2,4,8"},
    {"--node-ranks", NULL, NULL, &opt.node_ranks, "numbers of ranks a node; 1,4"},
    {"--methods", NULL, NULL, &opt.methods, "bucketed, step, hier, bf16, topk, powersgd; all"},
    {"--backward-ms", NULL, &opt.backward_ms, NULL, "of rows of a step; as long as the exchange"},
    {"--reps", &opt.reps, NULL, NULL, "exchanges of a row; 3"},
    {"--shrink", &opt.shrink, NULL, NULL, "divides gradients and bandwidth; as memory asks for"},
    {"--svg", NULL, NULL, &opt.svg, "draws the break-even curves to this file"},
    {"--program", NULL, NULL, &opt.program, "the trainer; build/train_gpt"},
    {"--train-models", NULL, NULL, &opt.train_models, "of train; baby"},
    {"--loss-model", NULL, NULL, &opt.loss_model, "of loss; tiny"},
    {"--data", NULL, NULL, &opt.data, "text to train on; dtrain.h"},
    {"--flags", NULL, NULL, &opt.flags, "more flags of the trainer"},
    {"--steps", &opt.steps, NULL, NULL, "of a run for its loss; 2000"},
    {"--rounds", &opt.rounds, NULL, NULL, "of runs for their speed; 3"},
};
enum { OPTIONS = sizeof option_table / sizeof *option_table };

static int check_options(void)
{
    double numbers[MAX_LIST], each[MAX_LIST];
    const int nodes = split_numbers(opt.nodes, numbers),
              ranks = split_numbers(opt.node_ranks, each);
    gpt_config config;
    bool good = nodes > 0 && ranks > 0 && model_config(&config);
    for (int n = 0; n < nodes; n++)
        for (int e = 0; e < ranks; e++)
            good = good && numbers[n] >= 2 && numbers[n] * each[e] <= MAX_WORLD;
    speed_count = split_numbers(opt.gbps, speeds);
    if (good && speed_count > 0 && opt.reps >= 1 && opt.reps <= MAX_REPS && opt.shrink >= 0 &&
        opt.steps > 0 && opt.rounds >= 1 && opt.rounds <= MAX_REPS && opt.latency >= 0)
        return 0;
    fprintf(stderr,
            "bench_comm: expected a model of train_gpt or gpt2_bytes, --nodes of 2 and more, at "
            "most %d ranks and %d numbers in a list, --reps and --rounds of 1 to %d\n",
            MAX_WORLD, MAX_LIST, MAX_REPS);
    return 2;
}

static int parse(int argc, char **argv)
{
    if (bench_parse("bench_comm", option_table, OPTIONS, &opt.json, argc, argv)) return 2;
    return check_options();
}

int main(int argc, char **argv)
{
    static const struct part {
        const char *name;
        int (*run)(void);
    } parts[] = {{"copies", run_copies},
                 {"links", run_links},
                 {"overlap", run_overlap},
                 {"train", run_train},
                 {"loss", run_loss}};
    int bad = 0;
    if (argc > 1 && strcmp(argv[1], "--help") == 0)
        return bench_usage(
            "bench_comm: exchanges of gradients over slow links; see the top of its source",
            option_table, OPTIONS);
    if (parse(argc, argv)) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (has_word(opt.parts, parts[i].name)) bad += parts[i].run();
    return bad ? 1 : 0;
}
