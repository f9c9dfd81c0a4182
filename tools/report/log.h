/* log.h: the log of a run, as train_gpt --log and dtrain_metrics_desc.jsonl_path write it: what its lines say of the
 * run, and the numbers of its steps. */
#ifndef REPORT_LOG_H
#define REPORT_LOG_H

/* Keys of a line that are drawn or listed; a log may lack any of them. */
#define LOG_KEYS(X)                                                      \
    X(STEP, "step")                                                      \
    X(WALL_TIME, "wall_time")                                            \
    X(LOSS, "loss")                                                      \
    X(VAL_LOSS, "val_loss")                                              \
    X(VAL_ACCURACY, "val_accuracy")                                      \
    X(GRAD_NORM, "grad_norm")                                            \
    X(LR, "lr")                                                          \
    X(RATE, "tokens_per_second")                                         \
    X(STEP_MS, "step_ms")                                                \
    X(DATA_MS, "data_ms")                                                \
    X(FORWARD_MS, "forward_ms")                                          \
    X(BACKWARD_MS, "backward_ms")                                        \
    X(OPTIMIZER_MS, "optimizer_ms")                                      \
    X(EXPOSED_MS, "exposed_comm_ms")                                     \
    X(COMM_MS, "comm_ms")                                                \
    X(MEMORY, "memory_bytes")                                            \
    X(MEMORY_PEAK, "memory_peak_bytes")                                  \
    /* of the last line */                                               \
    X(STEPS, "steps")                                                    \
    X(TOKENS, "tokens")                                                  \
    X(SECONDS, "seconds")                                                \
    X(FIRST_LOSS, "first_loss")                                          \
    X(LAST_LOSS, "last_loss")                                            \
    /* of the first line; a log without one has the ranks in its last */ \
    X(RANKS, "ranks")                                                    \
    X(NODES, "nodes")                                                    \
    X(THREADS, "threads")                                                \
    X(SHARD_RANKS, "shard_ranks")                                        \
    X(REPLICAS, "replicas")                                              \
    X(PARAMETERS, "parameters")

enum {
#define LOG_NUMBER(ID, name) ID,
    LOG_KEYS(LOG_NUMBER) KEYS
#undef LOG_NUMBER
};
static const char *const key_names[KEYS] = {
#define LOG_NAME(ID, name) name,
    LOG_KEYS(LOG_NAME)
#undef LOG_NAME
};

/* Texts of the first line. */
enum { RUN, HOST, DEVICE, STRATEGY, VERSION, CONFIG, TEXTS };
static const char *const text_names[TEXTS] = {"run",      "host",   "device",
                                              "strategy", "dtrain", "config"};

typedef struct run {
    const char *path, *label;
    double ranks;         /* NAN: not known */
    double (*rows)[KEYS]; /* (count) a step each; NAN: not in the log, or null */
    size_t count, room;
    double start[KEYS], summary[KEYS]; /* of the last first line, and of the last line */
    char *texts[TEXTS];                /* NULL: not in the log */
    int starts;                        /* more than one: the run was resumed */
    bool ended;
} run;

/* A line that is read: its numbers, and for the first line of a run its texts. */
typedef struct log_line {
    double row[KEYS];
    char *texts[TEXTS];
    bool start, final;
} log_line;

/* Read a line; false when it is no JSON. */
static bool read_line(const char *path, const char *text, size_t length, log_line *line)
{
    char name[64];
    dtrain__json json = dtrain__json_begin(path, text, length);
    memset(line, 0, sizeof *line);
    for (int k = 0; k < KEYS; k++) line->row[k] = NAN;
    if (!dtrain__json_enter(&json, '{')) return false;
    while (dtrain__json_member(&json, name, sizeof name)) {
        const char kind = dtrain__json_peek(&json);
        int k = 0, t = 0;
        while (k < KEYS && strcmp(key_names[k], name) != 0) k++;
        while (t < TEXTS && strcmp(text_names[t], name) != 0) t++;
        line->start |= kind == 't' && strcmp(name, "start") == 0;
        line->final |= kind == 't' && strcmp(name, "final") == 0;
        if (kind == '0' && k < KEYS) line->row[k] = strtod(json.at, NULL);
        if (kind == '"' && t < TEXTS && !line->texts[t] &&
            (line->texts[t] = (char *)malloc(length)))
            (void)dtrain__json_string(&json, line->texts[t], length); /* decoded it is shorter */
        else (void)dtrain__json_skip(&json);
    }
    if (dtrain__json_end(&json) == DTRAIN_OK) return true;
    for (int t = 0; t < TEXTS; t++) free(line->texts[t]);
    return false;
}

/* Add a step. A run that was resumed, or has rolled back, makes steps again: the new ones count. */
static int add_step(run *r, const double *row)
{
    while (r->count && row[STEP] <= r->rows[r->count - 1][STEP]) r->count--;
    if (r->count == r->room) {
        const size_t room = r->room ? 2 * r->room : 1024;
        double(*more)[KEYS] = (double(*)[KEYS])realloc(r->rows, room * sizeof *more);
        if (!more) return say(stderr, "there is no memory for %s\n", r->path), 2;
        r->rows = more;
        r->room = room;
    }
    memcpy(r->rows[r->count++], row, sizeof *r->rows);
    return 0;
}

/* Take what a line says. A later first line is that of a run that goes on, perhaps with other ranks. */
static int take_line(run *r, log_line *line)
{
    if (!isnan(line->row[RANKS])) r->ranks = line->row[RANKS];
    if (line->start) {
        memcpy(r->start, line->row, sizeof r->start);
        for (int k = 0; k < KEYS; k++) r->summary[k] = NAN;
        r->starts++;
        r->ended = false;
    }
    for (int t = 0; t < TEXTS; t++) {
        free(line->start ? r->texts[t] : line->texts[t]);
        if (line->start) r->texts[t] = line->texts[t];
    }
    if (line->final) {
        memcpy(r->summary, line->row, sizeof r->summary);
        r->ended = true;
    }
    return line->start || line->final ? 0 : add_step(r, line->row);
}

/* Read a log. The last line of a run that goes on, or was killed, may be cut off. */
static int read_run(run *r)
{
    const char *why;
    FILE *in = open_to_read(r->path, &why);
    char *text = NULL;
    size_t room = 0, number = 0;
    ssize_t length;
    int failed = 0;
    if (!in) return say(stderr, "%s cannot be read: %s\n", r->path, why), 2;
    for (int k = 0; k < KEYS; k++) r->summary[k] = r->start[k] = NAN;
    while (!failed && (length = getline(&text, &room, in)) > 0) {
        log_line line;
        const bool cut = text[length - 1] != '\n';
        number++;
        if (length == 1 && !cut) continue;
        if (read_line(r->path, text, (size_t)length, &line)) failed = take_line(r, &line);
        else if (!cut)
            failed = (say(stderr, "%s: line %zu: %s\n", r->path, number, dtrain_last_error()), 2);
    }
    fclose(in);
    free(text);
    return failed;
}

/* Return the mean of a key over the steps; NAN: no step has it. */
static double mean_of(const run *r, int key)
{
    double sum = 0;
    size_t used = 0;
    for (size_t i = 0; i < r->count; i++)
        if (isfinite(r->rows[i][key])) sum += r->rows[i][key], used++;
    return used ? sum / (double)used : NAN;
}

/* Return what was done a second in the time of all steps, or where the log has no times the mean rate of steps. */
static double rate_of(const run *r)
{
    double done = 0, ms = 0;
    for (size_t i = 0; i < r->count; i++) {
        const double rate = r->rows[i][RATE], own = r->rows[i][STEP_MS];
        if (isfinite(rate) && isfinite(own)) done += rate * own, ms += own;
    }
    return ms > 0 ? done / ms : mean_of(r, RATE);
}

/* Return the first or last value of a key that a step has; NAN: no step has it. */
static double end_of(const run *r, int key, bool last)
{
    for (size_t i = 0; i < r->count; i++) {
        const double value = r->rows[last ? r->count - 1 - i : i][key];
        if (!isnan(value)) return value;
    }
    return NAN;
}

/* Return the largest value of a key in any step; NAN: no step has it. */
static double most_of(const run *r, int key)
{
    double most = NAN;
    for (size_t i = 0; i < r->count; i++) most = fmax(most, r->rows[i][key]);
    return most;
}

#endif /* REPORT_LOG_H */
