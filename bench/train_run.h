/* train_run.h: a run of train_gpt or resnet_cifar and its figures. Include it behind bench.h. */
#ifndef DTRAIN_TRAIN_RUN_H
#define DTRAIN_TRAIN_RUN_H

/* Medians are over the steps without the first two. Memory is that of rank 0, in MiB. */
typedef struct train_run {
    double losses[BENCH_MOST], val_loss; /* NaN: not evaluated */
    double rate, step_ms, exposed_ms, bubble_ms,
        sent_mib;      /* medians; rate: tokens/s of all ranks */
    double parameters; /* elements */
    double params, grads, optimizer, buffers, activations, activation_grads; /* as planned */
    double resident, peak, predicted; /* of the whole process */
    int steps, tokens;                /* tokens: of a step, all ranks */
    int batch, sequence;              /* samples of a rank and micro-batch, tokens of a sample */
    int layers, heads, channels, vocab;
    char hash[20]; /* of the parameters, with --deterministic */
} train_run;

/* Read train_gpt's log, which is closed; 0 when there was something to measure. */
static inline int train_run_log(FILE *file, train_run *run)
{
    static double rate[BENCH_MOST], step[BENCH_MOST], exposed[BENCH_MOST], bubble[BENCH_MOST];
    char line[8192];
    int count = 0;
    run->val_loss = NAN;
    if (!file) return 1;
    while (fgets(line, sizeof line, file)) {
        run->val_loss = number_after(line, "\"val_loss\": ", run->val_loss);
        if (strstr(line, "\"start\": true") || strstr(line, "\"final\": true")) continue;
        if (run->steps == BENCH_MOST) continue;
        run->losses[run->steps++] = number_after(line, "\"loss\": ", NAN);
        if (run->steps == 1) run->tokens = (int)number_after(line, "\"tokens\": ", 0);
        if (run->steps <= 2) continue;
        rate[count] = number_after(line, "\"tokens_per_second\": ", 0);
        step[count] = number_after(line, "\"step_ms\": ", 0);
        bubble[count] = number_after(line, "\"bubble_ms\": ", 0);
        exposed[count++] = number_after(line, "\"exposed_comm_ms\": ", 0);
        run->sent_mib = number_after(line, "\"comm_bytes\": ", 0) / 1048576;
    }
    fclose(file);
    run->rate = median(rate, count);
    run->step_ms = median(step, count);
    run->exposed_ms = median(exposed, count);
    run->bubble_ms = median(bubble, count);
    return count == 0;
}

/* Read what the trainer prints: the lines "model", "strategy" and "memory" above the steps, and the summary. */
static inline void train_run_text(const char *text, train_run *run)
{
    const char *plan = strstr(text, "a rank will need"), *end = strstr(text, "\n  process memory ");
    const char *hash = strstr(text, "\n  parameters "), *model = strstr(text, "\nmodel ");
    const char *step = strstr(text, "\nstep ");
    run->sequence = 1;                                   /* of an image */
    if (!end) end = strstr(text, "\n  library memory "); /* a GPU's */
    if (step) sscanf(step, "\nstep %d x %d tokens", &run->batch, &run->sequence);
    if (model)
        sscanf(model, "\nmodel %*[^:]: %d layers, %d heads, %d channels, %*d %*[^,], %d symbols",
               &run->layers, &run->heads, &run->channels, &run->vocab);
    run->parameters = number_after(text, "M parameters (", number_after(text, "ResNet-20: ", 0));
    run->params = number_after(plan, "parameters ", 0);
    run->grads = number_after(plan, "gradients ", 0);
    run->optimizer = number_after(plan, "optimizer ", 0);
    run->buffers = number_after(plan, "buffers ", 0);
    run->activations = number_after(plan, "activations ", 0);
    run->activation_grads = number_after(plan ? strstr(plan, "activations ") : NULL, "+ ", 0);
    run->resident = number_after(end, "memory", 0);
    run->peak = number_after(end, "rank 0,", run->resident);
    run->predicted = number_after(end, "peak,", 0);
    if (hash) sscanf(hash + 13, "%17s", run->hash);
}

/* Run `program` with these flags. 0, or 1 after the command and its output went to stderr. */
__attribute__((format(printf, 3, 4))) static inline int
run_trainer(const char *program, train_run *run, const char *flags, ...)
{
    static char text[1 << 20];
    char command[2048], log[64];
    va_list args;
    memset(run, 0, sizeof *run);
    snprintf(log, sizeof log, "/tmp/dtrain_bench.%ld.jsonl", (long)getpid());
    int used = snprintf(command, sizeof command, "%s --log %s ", program, log);
    va_start(args, flags);
    used += vsnprintf(command + used, sizeof command - (size_t)used, flags, args);
    va_end(args);
    text[0] = 0;
    const int failed = used >= (int)sizeof command || capture(command, text, sizeof text);
    if (failed || train_run_log(fopen(log, "r"), run))
        return fprintf(stderr, "failed: %s\n%s", command, text), 1;
    remove(log);
    train_run_text(text, run);
    return 0;
}

/* The same for train_gpt, whose flags begin with a literal. */
#define train(program, run, ...) run_trainer(program, run, "--sample 0 " __VA_ARGS__)

/* Return whether the losses of the second half of a run are below those of the first: two steps alone differ by
 * their batches. */
static inline bool learned(const train_run *run)
{
    double change = 0;
    for (int i = 0; i < run->steps / 2; i++)
        change += run->losses[run->steps - 1 - i] - run->losses[i];
    return change < 0;
}

/* Return whether two runs had the same losses step by step, to `tolerance`; 0: the same bits. */
static inline bool same_losses(const train_run *a, const train_run *b, double tolerance)
{
    for (int i = 0; i < a->steps; i++)
        if (!(fabs(a->losses[i] - b->losses[i]) <= tolerance)) return false;
    return a->steps == b->steps;
}

#endif
