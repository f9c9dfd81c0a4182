/* train_gpt.c: trains a GPT on any text, data-parallel or sharded, over CPU cores or GPUs.
 *
 *   build:   cc -O2 -I. tools/train_gpt/train_gpt.c -o build/train_gpt -lm -lpthread
 *   run:     build/train_gpt                              (two ranks learn dtrain.h, byte by byte)
 *            build/train_gpt --data shakespeare.txt --ranks 2 --steps 2000 --log run.jsonl
 *            build/train_gpt --model gpt2 --data tokens.bin --ranks 1 --threads 2
 *            build/train_gpt --data shards --data-format u16 --workers 2   (a folder of files of nanoGPT)
 *            build/train_gpt --strategy auto --memory-limit 200 --auto-batch --global-batch 64
 *            build/train_gpt --import gpt2_124M.bin --tokenizer DIR --generate 100 --prompt "Hello"
 *   GPUs:    nvcc -O3 -I. -DDTRAIN_USE_CUDA tools/train_gpt/train_gpt.c dtrain_cuda.cu -lcublasLt -o train_gpt
 *            (add -DDTRAIN_USE_NCCL -ldl for several GPUs that talk over NCCL)
 *            ./train_gpt --device cuda --precision bf16 --graph --model gpt2 --data tokens.bin --seq 1024
 *
 * What to expect: a progress line, the validation loss now and then, a sample of what the model has
 * learned to write, and a table with loss, speed, communication and memory. --help lists all flags.
 *
 * --strategy changes where parameters, gradients and optimizer state live, and nothing else: model,
 * loop and losses are the same.
 *
 * How to read it: gpt.h (the model) -> settings.h (flags) -> job.h (what a run consists of) ->
 * report.h (what rank 0 prints) -> checks.h (what is refused before a rank starts) -> here train(),
 * which every rank runs -> main(). Beside that road: weights.h and llmc.h (a GPT-2 in files of others),
 * tokenizer.h (its text), cache.h and generate.h (what it writes). */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#ifdef DTRAIN_USE_NCCL
#define DTRAIN_NCCL_IMPLEMENTATION
#include "dtrain_nccl.h"
#endif

#include "gpt.h"
#include "settings.h"
#include "job.h"
#include "report.h"
#include "checks.h"

/* Compute the validation loss, on the same random windows each time. */
static dtrain_result validate(job *j, double *val_loss)
{
    dtrain_loader_seek(j->held_out.loader, 0);
    return dtrain_trainer_evaluate(j->trainer, next_batch, &j->held_out, j->s->eval_batches,
                                   val_loss);
}

/* Tell whether the state after `done` steps is to be saved. */
static bool save_due(const job *j, long done, bool validated, bool stopping)
{
    const settings *s = j->s;
    if (!j->checkpoint) return false;
    return stopping || done == s->steps || (s->save_every && done % s->save_every == 0) ||
           (s->keep_best && validated);
}

/* Save the state after `done` steps where that is due. What goes to the disk goes to memory as well, so that the newest
 * snapshot is never older than the newest checkpoint. */
static dtrain_result save(job *j, long done, const dtrain_step_record *record, bool validated,
                          bool stopping)
{
    const long every = j->s->snapshot_every;
    const bool due = save_due(j, done, validated, stopping);
    dtrain_result result = DTRAIN_OK;
    if (due) TRY(dtrain_checkpoint_save(j->checkpoint, done, record->val_loss));
    if (every && (due || done % every == 0))
        TRY(dtrain_checkpoint_save(j->snapshots, done, record->val_loss));
cleanup:
    return result;
}

/* After a NaN: load the last checkpoint and go on behind the batch that led to it. Twice from the same checkpoint
 * would be a crash loop. */
static dtrain_result roll_back(dtrain_world *world, job *j, long *step)
{
    dtrain_loader_info data;
    dtrain_load_info from;
    dtrain_result result = DTRAIN_OK;
    TRY(dtrain_checkpoint_wait(j->checkpoint));
    dtrain_loader_query(j->train.loader, &data);
    TRY(load_newest(world, j, &from));
    if (from.step < 0)
        TRY(dtrain_fail(DTRAIN_ERROR_NUMERIC, "step %ld is not finite, and nothing is saved yet",
                        *step));
    if (from.step == j->rolled_back)
        TRY(dtrain_fail(DTRAIN_ERROR_NUMERIC,
                        "step %ld is not finite again after a roll-back to step %lld: lower the "
                        "learning rate, clip "
                        "gradients or look at the data",
                        *step, (long long)from.step));
    dtrain_loader_seek(j->train.loader, data.position);
    j->rolled_back = from.step;
    *step = (long)from.step - 1; /* the loop adds one */
cleanup:
    return result;
}

/* Train from the step that the run begins or goes on with. A signal that asks a rank to stop makes all of them
 * stop after the same step, with a checkpoint. */
static dtrain_result train_steps(dtrain_world *world, job *j)
{
    const settings *s = j->s;
    dtrain_result result = DTRAIN_OK;
    bool stopping = false;
    for (long step = j->resumed.step > 0 ? (long)j->resumed.step : 0; step < s->steps && !stopping;
         step++) {
        dtrain_step_record record;
        bool due = step + 1 == s->steps || (s->eval_every && (step + 1) % s->eval_every == 0);
        result = dtrain_trainer_step(j->trainer, &record);
        if (result == DTRAIN_ERROR_NUMERIC && s->nonfinite == 2) {
            TRY(roll_back(world, j, &step));
            continue;
        }
        TRY(result);
        stopping = record.stop_requested;
        due = due && s->eval_batches && !stopping;
        if (due) TRY(validate(j, &record.val_loss));
        TRY(dtrain_metrics_step(j->metrics, &record));
        TRY(save(j, step + 1, &record, due, stopping));
    }
    if (j->checkpoint) TRY(dtrain_checkpoint_wait(j->checkpoint));
    j->stopped = stopping;
cleanup:
    return result;
}

static dtrain_result finish_job(dtrain_world *world, job *j)
{
    const settings *s = j->s;
    dtrain_result result = DTRAIN_OK;
    dtrain_summary summary;
    uint64_t hash = 0;
    bool first = dtrain_world_rank(world) == 0;
    dtrain_metrics_summary(j->metrics, &summary);
    if (s->deterministic) result = dtrain_strategy_verify(j->strategy, &hash);
    if (dtrain_metrics_finish(j->metrics) != DTRAIN_OK) /* a torn log is no torn training */
        fprintf(stderr, "\ntrain_gpt: warning: %s\n", dtrain_last_error());
    if (result != DTRAIN_OK) return result;
    if (first) show_end(world, j, &summary);
    if (first && s->deterministic)
        printf("  parameters           %016llx   bit-identical on all ranks\n",
               (unsigned long long)hash);
    if (s->export_to && !j->stopped) {
        result = export_weights(world, s, &j->model, j->strategy);
        if (result != DTRAIN_OK) return result;
        if (first) printf("  exported             %s\n", s->export_to);
    }
    if (!s->sample || j->stopped) return DTRAIN_OK;
    return show_sample(world, j, first);
}

/* End a rank: flush what it printed, and return its exit status. */
static int end_rank(dtrain_result result)
{
    if (result != DTRAIN_OK) return 1;
    if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
    fprintf(stderr, "train_gpt: what it had to say could not be written: %s\n", strerror(errno));
    return 1;
}

/* Whether a signal to any rank has stopped the run; known to a process that is itself a rank. */
static bool stopped;

/* Every rank runs this function, if there is something to train. A rank that fails prints nothing:
 * dtrain_launch quotes the first error. */
static int train(dtrain_world *world, void *user)
{
    const settings *s = (const settings *)user;
    char all[DTRAIN_MAX_RANKS];
    job j;
    dtrain_result result;
    TRY(open_job(world, s, &j));
    if (dtrain_world_rank(world) == 0) show_start(world, &j);
    fflush(stdout);
    TRY(train_steps(world, &j));
    TRY(finish_job(world, &j));
    if (j.stopped && s->stop_status) { /* together: launchers kill the others when one has failed */
        TRY(dtrain_world_all_gather(world, "", 1, all));
        stopped = !s->thread_ranks;
    }
cleanup:
    close_job(&j);
    return end_rank(result);
}

/* Or this one, if not: export a model, or let it write. */
static int use_model(dtrain_world *world, void *user)
{
    const settings *s = (const settings *)user;
    const bool first = dtrain_world_rank(world) == 0;
    job j;
    dtrain_result result;
    TRY(open_model(world, s, &j));
    if (s->export_to) TRY(export_weights(world, s, &j.model, j.strategy));
    if (s->export_to && first) printf("  exported             %s\n", s->export_to);
    if (s->generate) TRY(show_generated(world, &j, first));
cleanup:
    close_job(&j);
    return end_rank(result);
}

/* Choose device and communicator. Without --comm the library chooses the communicator: on the cpu
 * local, or the one that joins hosts; for GPUs NCCL. */
static int choose_backends(const settings *s, dtrain_launch_desc *launch)
{
    if (dtrain_device_ops_by_name(s->device, &launch->device_ops) != DTRAIN_OK)
        return BAD("--device: %s", dtrain_last_error());
    const bool cpu = launch->device_ops->host_memory;
    if (s->comm && dtrain_comm_ops_by_name(s->comm, &launch->comm_ops) != DTRAIN_OK)
        return BAD("--comm: %s", dtrain_last_error());
    if (!cpu && s->comm && strcmp(s->comm, "local") != 0)
        return BAD("--comm %s moves host memory, and --device is %s: leave it out, or say local",
                   s->comm, s->device);
    if (!cpu) launch->comm_ops = NULL; /* local, through host memory */
#ifdef DTRAIN_USE_NCCL
    if (!cpu && !s->comm && !s->emulate) launch->comm_ops = dtrain_nccl_comm_ops();
#endif
    launch->emulation = s->emulation;
    return 0;
}

/* How much the launcher may keep for snapshots: an old one and a new one, of values and two moments, of two arrays a
 * rank that compression keeps, and of what is in no tensor. It is committed when it is used. */
static int reserve_snapshots(const settings *s, dtrain_launch_desc *launch)
{
    const uint64_t ranks = launch->rank_count ? launch->rank_count : launch->default_rank_count;
    uint64_t elements = 0;
    gpt model;
    if (!s->snapshot_every) return 0;
    const dtrain_result result = create_model(s, &model);
    for (size_t i = 0; result == DTRAIN_OK && i < model.param_count; i++)
        elements += (uint64_t)(model.params[i].shape[0] *
                               (model.params[i].shape[1] ? model.params[i].shape[1] : 1));
    gpt_free(&model);
    if (result != DTRAIN_OK) return BAD("--snapshot-every: no memory for a model's names");
    launch->kept_bytes = 2 * sizeof(float) * elements * (3 + (s->compression ? 2 * ranks : 0)) +
                         ((uint64_t)16 << 20) + ((uint64_t)4 << 20) * ranks;
    return 0;
}

/* The command line as one text, cut off where it has no room. */
static const char *join_words(int argc, char **argv)
{
    static char text[4096];
    for (int a = 0; a < argc; a++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", a ? " " : "", argv[a]);
    return text;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc launch;
    dtrain_launch_info info;
    settings *s = &flags;
    for (int a = 1; a < argc; a++)
        if (strcmp(argv[a], "--help") == 0 || strcmp(argv[a], "-h") == 0) return print_help(), 0;
    if (read_flags(argc - 1, argv + 1)) return 2;
    if (import_sizes(s) || open_tokenizer(s) || apply_preset(s)) return 2;
    if (trains(s) ? encode_data(s) || check_data(s) || check_optimizer(s) || check_compression(s)
                  : check_model(s))
        return 2;
    if (check_text(s) || read_emulation(s) || check_sizes(s) || check_checkpoints(s)) return 2;
    s->command = join_words(argc, argv);
    memset(&launch, 0, sizeof launch);
    if (choose_backends(s, &launch)) return 2;
    launch.tune = s->tune != 0;
    launch.math = s->precision == 1 ? DTRAIN_MATH_TF32 : DTRAIN_MATH_DEFAULT;
    launch.memory_limit = (uint64_t)s->memory_limit << 20;
    launch.rank_count = (uint32_t)s->ranks;
    launch.default_rank_count = launch.device_ops->host_memory && trains(s) ? 2 : 1;
    launch.threads_per_rank = (uint32_t)s->threads;
    launch.timeout_ms = (uint32_t)s->timeout * 1000;
    launch.restarts = (uint32_t)s->restarts;
    if (reserve_snapshots(s, &launch)) return 2;
    launch.catch_signals = s->checkpoints != NULL;
    launch.mode = s->thread_ranks ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES;
    if (dtrain_launch(&launch, trains(s) ? train : use_model, s, &info) == DTRAIN_OK)
        return stopped || info.signal ? (int)s->stop_status : 0;
    fprintf(stderr, "train_gpt: %s\n", dtrain_last_error());
    return info.exit_code ? info.exit_code : 1;
}
