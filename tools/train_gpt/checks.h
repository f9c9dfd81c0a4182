/* checks.h: what is refused before any rank starts, with one sentence each: flags that contradict each
 * other, sizes, memory, data. Functions return 0, or main's exit status after the sentence. */
#ifndef CHECKS_H
#define CHECKS_H

#include "report.h"

/* Refuse flags of compression that would do nothing, and what compression cannot go with. What a
 * strategy cannot do, check_memory finds. */
static int check_compression(const settings *s)
{
    static const struct {
        const char *name;
        long needs; /* 0: either */
    } list[] = {
        {"--topk-ratio", DTRAIN_COMPRESSION_TOPK},
        {"--topk-momentum", DTRAIN_COMPRESSION_TOPK},
        {"--sparse-exchange", DTRAIN_COMPRESSION_TOPK},
        {"--compression-warmup", DTRAIN_COMPRESSION_TOPK},
        {"--warmup-ratio", DTRAIN_COMPRESSION_TOPK},
        {"--powersgd-rank", DTRAIN_COMPRESSION_POWERSGD},
        {"--dense-steps", 0},
        {"--dense-below", 0},
        {"--no-error-feedback", 0},
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        const bool serves = list[i].needs ? s->compression == list[i].needs : s->compression;
        if (given(list[i].name) && !serves)
            return BAD("%s does nothing without --compression %s", list[i].name,
                       list[i].needs ? compressions[list[i].needs] : "topk or powersgd");
    }
    if (given("--warmup-ratio") && !s->warmup_steps)
        return BAD("--warmup-ratio does nothing without --compression-warmup");
    if (s->compression && s->precision == 3)
        return BAD("--compression and --precision fp16: what is kept for later steps has the loss "
                   "scale of its own step; use bf16");
    if (s->compression && s->graph)
        return BAD("--compression and --graph: what is sent changes in the first steps, and a "
                   "recorded step does not");
    if (s->compression && s->strategy != DTRAIN_STRATEGY_DDP - 1)
        return BAD("--compression works with --strategy ddp: the others reduce shards");
    return 0;
}

/* Refuse flags of another optimizer, and strategies that cut the matrices that Muon needs whole. */
static int check_optimizer(const settings *s)
{
    const char *const name = optimizers[s->optimizer];
    const bool muon = is_optimizer(s, DTRAIN_OPTIMIZER_MUON);
    const bool adamw = muon || is_optimizer(s, DTRAIN_OPTIMIZER_ADAMW);
    const long kind = s->strategy + 1;
    if (given("--muon-lr") && !muon) return BAD("--muon-lr does nothing without --optimizer muon");
    if ((given("--beta2") || given("--variance-steps")) && !adamw)
        return BAD("%s does nothing with --optimizer %s, which has no second moments",
                   given("--beta2") ? "--beta2" : "--variance-steps", name);
    if (s->topk_momentum > 0 && (muon || is_optimizer(s, DTRAIN_OPTIMIZER_LION)))
        return BAD("--topk-momentum and --optimizer %s, which has a momentum of its own: use adamw "
                   "or sgd",
                   name);
    if (muon && !(s->lr > 0))
        return BAD("--lr is %g; --optimizer muon needs one above 0 for what is not its own", s->lr);
    if (muon && kind != DTRAIN_STRATEGY_DDP && kind != DTRAIN_STRATEGY_ZERO3)
        return BAD("--optimizer muon needs whole matrices and --strategy %s cuts them: use zero3, "
                   "which shards by whole tensors, or ddp",
                   strategies[s->strategy]);
    return 0;
}

/* Read --emulate, "2x4:10:50": two nodes of four ranks, 10 Gb/s, 50 us. Set the number of ranks. */
static int read_emulation(settings *s)
{
    dtrain_emulation *e = &s->emulation;
    long nodes = 0, ranks = 0;
    int used = 0;
    if (!s->emulate) return 0;
    const int found = sscanf(s->emulate, "%ldx%ld:%lf:%lf%n", &nodes, &ranks,
                             &e->gigabits_per_second, &e->latency_us, &used);
    if (found != 4 || s->emulate[used])
        return BAD("--emulate is \"%s\"; it takes NODESxRANKS:GBPS:LATENCY_US, as in 2x4:10:50",
                   s->emulate);
    if (nodes < 1 || ranks < 1 || nodes > DTRAIN_MAX_RANKS || ranks > DTRAIN_MAX_RANKS / nodes)
        return BAD(
            "--emulate %ldx%ld: nodes and ranks are at least 1, and their product at most %d",
            nodes, ranks, DTRAIN_MAX_RANKS);
    if (!(e->gigabits_per_second > 0 && isfinite(e->gigabits_per_second)) ||
        !(e->latency_us >= 0 && e->latency_us <= 1e6))
        return BAD("--emulate %s: GBPS must be positive and LATENCY_US from 0 to 1e6", s->emulate);
    if (s->ranks && s->ranks != nodes * ranks)
        return BAD("--ranks is %ld, and --emulate %s has %ld", s->ranks, s->emulate, nodes * ranks);
    if (s->comm && strcmp(s->comm, "local") != 0)
        return BAD("--emulate and --comm %s: it is the local communicator that emulates", s->comm);
    s->ranks = nodes * ranks;
    e->node_ranks = (uint32_t)ranks;
    return 0;
}

/* The number of ranks or, where only a launcher will know it, the least that it can be. */
static int rank_count(const settings *s, bool cpu)
{
    if (s->ranks) return (int)s->ranks;
    if (!trains(s)) return 1;
    return s->node_size > 1 || !cpu ? (int)(s->node_size ? s->node_size : 1) : 2;
}

/* Count, without allocating, a rank's parameters, gradients, optimizer and buffers, and refuse what
 * does not fit and what a strategy cannot do. For auto: what its last choice needs. */
static int check_memory(const settings *s, bool cpu)
{
    dtrain_compression_desc compression;
    dtrain_strategy_desc desc = strategy_desc(s, &compression);
    const int ranks = rank_count(s, cpu);
    const double have = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    dtrain_memory memory;
    gpt model;
    dtrain_result result = DTRAIN_ERROR_MEMORY;
    if (desc.kind == DTRAIN_STRATEGY_AUTO)
        desc.kind = ranks > 1 || s->offload ? DTRAIN_STRATEGY_FULL_SHARD : DTRAIN_STRATEGY_DDP;
    if (create_model(s, &model) == DTRAIN_OK)
        result = dtrain_strategy_plan(model.params, model.param_count, &desc, ranks, &memory);
    gpt_free(&model);
    if (result != DTRAIN_OK)
        return BAD("--strategy %s: %s", strategies[s->strategy], dtrain_last_error());
    if (cpu && (double)memory.total * ranks > have)
        return BAD("%d ranks need %.1f GiB each for parameters, gradients, optimizer and buffers; "
                   "this machine has %.1f GiB: use another --strategy, fewer --ranks or a smaller "
                   "model",
                   ranks, mib(memory.total) / 1024, have / 1073741824.0);
    if (s->memory_limit && mib(memory.total) > (double)s->memory_limit)
        return BAD("--memory-limit is %ld MiB and --strategy %s needs %.1f MiB a rank before any "
                   "activation: use one that shards more (full_shard, zero3, auto) or more --ranks",
                   s->memory_limit, strategies[s->strategy], mib(memory.total));
    return 0;
}

static int check_checkpoints(const settings *s)
{
    static const char *const needing[] = {"--save-every",    "--keep",     "--keep-best",
                                          "--save-blocking", "--restarts", "--snapshot-every"};
    for (size_t i = 0; i < sizeof needing / sizeof needing[0]; i++)
        if (given(needing[i]) && !s->checkpoints)
            return BAD("%s does nothing without --checkpoint DIR", needing[i]);
    if (s->snapshot_every && !s->restarts)
        return BAD("--snapshot-every does nothing without --restarts");
    if (s->resume && strcmp(s->resume, "auto") == 0 && !s->checkpoints)
        return BAD(
            "--resume auto looks into --checkpoint DIR, which is not given; or name a checkpoint");
    if (s->nonfinite == 2 && !s->checkpoints)
        return BAD("--nonfinite rollback needs --checkpoint DIR");
    if (s->keep_best && !s->eval_batches)
        return BAD("--keep-best compares validations, and --eval-batches is 0");
    return 0;
}

static int check_sizes(const settings *s)
{
    const bool cpu = strcmp(s->device, "cpu") == 0;
    if (s->channels % s->heads)
        return BAD("--heads is %ld; it must divide --channels %ld", s->heads, s->channels);
    if (cpu && s->precision == 1)
        return BAD("--precision tf32 needs a GPU (--device cuda): the cpu has no such arithmetic");
    if (cpu && s->offload)
        return BAD("--offload needs a GPU (--device cuda): the cpu's memory is the host's");
    if (cpu && (s->graph || s->tune))
        return BAD("%s needs a GPU (--device cuda)", s->graph ? "--graph" : "--tune");
    if (s->accum && s->global_batch)
        return BAD("--accum and --global-batch: the second chooses the first; use one of them");
    if (s->deterministic && s->auto_batch && !s->memory_limit)
        return BAD("--deterministic and --auto-batch: free memory differs from run to run; give a "
                   "--memory-limit");
    if (s->deterministic && s->tune)
        return BAD("--deterministic and --tune: timings choose the bits; use one of them");
#ifdef DTRAIN_USE_CBLAS
    if (s->deterministic && cpu)
        return BAD("--deterministic: this build calls an external BLAS, whose bits may change from "
                   "run to run");
#endif
    return check_memory(s, cpu);
}

/* Open the tokenizer, which all ranks share. */
static int open_tokenizer(settings *s)
{
    static tokenizer opened;
    if (!s->tokenizer_path) return 0;
    if (tokenizer_open(&opened, s->tokenizer_path) != DTRAIN_OK)
        return BAD("--tokenizer: %s", dtrain_last_error());
    s->tokenizer = &opened;
    return 0;
}

/* Write tokens as llm.c does: a header, and then 16 bits for each, or 32 for a large vocabulary. */
static int write_token_file(FILE *file, const token_list *list, bool wide)
{
    const uint32_t header[3] = {wide ? 20240801 : 20240520, wide ? 7 : 1, (uint32_t)list->count};
    const int each = wide ? 4 : 2;
    for (int i = 0; i < 1024; i++)
        putc(i < 12 ? (int)(header[i / 4] >> 8 * (i % 4) & 0xff) : 0, file);
    for (size_t i = 0; i < list->count; i++)
        for (int k = 0; k < each; k++) putc(list->at[i] >> 8 * k & 0xff, file);
    return fflush(file) == 0 && !ferror(file) ? 0 : -1;
}

/* Encode the text of --data once, to a file without a name, which goes with the process; ranks, which
 * are its children or have done the same, read that. Tokens stay what they are. */
static int encode_data(settings *s)
{
    static char path[32];
    static const uint32_t magics[] = {20240520, 20240801};
    token_list list = {NULL, 0, 0};
    char *text = NULL;
    size_t bytes = 0;
    uint32_t magic = 0;
    FILE *file = NULL;
    if (!s->tokenizer || s->data_format >= (long)DTRAIN_DATA_BIN) return 0; /* tokens already */
    dtrain_result result = tokenizer_read_file(s->data, &text, &bytes);
    if (result != DTRAIN_OK)
        return BAD("--data: %s; --tokenizer encodes one file of text, and files that have tokens "
                   "already need --data-format bin or u16",
                   dtrain_last_error());
    for (size_t i = 0; i < 4 && i < bytes; i++) magic |= (uint32_t)(uint8_t)text[i] << 8 * i;
    const bool encoded = magic == magics[0] || magic == magics[1];
    if (result == DTRAIN_OK && !encoded)
        result = tokenizer_encode(s->tokenizer, text, bytes, &list);
    free(text);
    if (result == DTRAIN_OK && !encoded) {
        file = tmpfile(); /* closed by the end of the process */
        if (!file || list.count > INT32_MAX ||
            write_token_file(file, &list, s->tokenizer->count > 65536) != 0)
            result = dtrain_fail(DTRAIN_ERROR_FILE, "a temporary file for %zu tokens: %s",
                                 list.count, strerror(errno));
        else snprintf(path, sizeof path, "/dev/fd/%d", fileno(file)), s->tokens = path;
    }
    free(list.at);
    return result == DTRAIN_OK ? 0 : BAD("--data %s: %s", s->data, dtrain_last_error());
}

/* Refuse what would be found out only at the end: a text to go on from, a file to write. */
static int check_text(const settings *s)
{
    token_list list = {NULL, 0, 0};
    const bool writes = s->generate || s->sample;
    const dtrain_result result = writes ? prompt_tokens(s, &list) : DTRAIN_OK;
    free(list.at);
    if (result != DTRAIN_OK) return BAD("%s", dtrain_last_error());
    if (s->export_to && ends_with(s->export_to, ".bin") && s->export_dtype == 2)
        return BAD("--export-dtype fp16 and --export %s: llm.c has fp32 and bf16", s->export_to);
    if (given("--export-dtype") && !s->export_to)
        return BAD("--export-dtype does nothing without --export");
    return 0;
}

/* Refuse a run without training that has no model, or nothing to do. */
static int check_model(const settings *s)
{
    if (!s->import_from == !s->resume)
        return BAD("%s needs a model: --import FILE or --resume CHECKPOINT",
                   s->generate ? "--generate" : "--steps 0");
    if (s->resume && strcmp(s->resume, "auto") == 0)
        return BAD("%s: --resume takes a checkpoint, or the directory of several",
                   s->generate ? "--generate" : "--steps 0");
    if (!s->generate && !s->export_to) return BAD("--steps 0 without --export does nothing");
    if (s->checkpoints) return BAD("--checkpoint: there is nothing to save without training");
    return 0;
}

/* Open the data once as the ranks will, so that a bad file is one sentence before any rank starts.
 * Sets the vocabulary to that of the file. */
static int check_data(settings *s)
{
    dtrain_dataset_desc desc = dataset_desc(s);
    dtrain_dataset *dataset = NULL;
    dtrain_loader *loader = NULL;
    dtrain_result result;
    TRY(dtrain_dataset_open(NULL, &desc, &dataset));
    s->vocab = (long)dataset_info(dataset).vocab_count;
    for (int side = 0; side < 2; side++) {
        dtrain_loader_desc window = loader_desc(s, dataset, s->batch, side == 1);
        TRY(dtrain_loader_create(NULL, &window, &loader));
        dtrain_loader_destroy(loader);
    }
cleanup:
    dtrain_dataset_close(dataset);
    return result == DTRAIN_OK ? 0 : BAD("%s", dtrain_last_error());
}

#endif /* CHECKS_H */
