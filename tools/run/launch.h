/* launch.h: from switches to dtrain_launch. */
#ifndef RUN_LAUNCH_H
#define RUN_LAUNCH_H

#include "tools/emulated_links.h"
#include "tools/run/checks.h"
#include "tools/run/loop.h"

/* Choose device and communicator. Without --comm the library chooses the communicator: on the cpu
 * local, or the one that joins hosts; for GPUs NCCL. */
static int choose_backends(const run_settings *s, dtrain_launch_desc *launch)
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
    if (!cpu && !s->comm && !s->emulate) {
        setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1",
               0); /* a stream for the tensor axis: dtrain_nccl.h, Streams */
        launch->comm_ops = dtrain_nccl_comm_ops();
    }
#endif
    if (s->emulate)
        emulate_links(launch, (int)s->emulation.node_ranks, s->emulation.gigabits_per_second,
                      s->emulation.latency_us);
    launch->options.trace.path = s->trace;
    return 0;
}

/* Print a message as the library would; the launcher's begins a line, where "^C" may stand in one. */
static void print_message(void *user, dtrain_log_level level, int rank, const char *text)
{
    static const char *const names[] = {"", "error", "warning", "info", "debug"};
    (void)user;
    if (level >= DTRAIN_LOG_INFO && rank > 0) return;
    if (rank < 0) fprintf(stderr, "%sdtrain %s: %s\n", isatty(2) ? "\n" : "", names[level], text);
    else fprintf(stderr, "dtrain %s (rank %d): %s\n", names[level], rank, text);
}

/* Fill in what the library is asked to start. Return 0, or main's exit status. */
static int launch_desc(const run_settings *s, bool trains, dtrain_launch_desc *launch)
{
    memset(launch, 0, sizeof *launch);
    if (choose_backends(s, launch)) return 2;
    launch->options.tune = s->tune_gemm != 0;
    launch->options.math = s->precision == TF32 ? DTRAIN_MATH_TF32 : DTRAIN_MATH_DEFAULT;
    launch->options.memory_limit = (uint64_t)s->memory_limit << 20;
    launch->rank_count = (uint32_t)s->ranks;
    launch->default_rank_count = default_ranks(s, trains);
    launch->threads_per_rank = (uint32_t)s->threads;
    launch->timeout_ms = (uint32_t)s->timeout * 1000;
    launch->restarts = (uint32_t)s->restarts;
    launch->job = hash_job();
    launch->options.log = print_message;
    launch->mode = s->thread_ranks ? DTRAIN_LAUNCH_THREADS : DTRAIN_LAUNCH_PROCESSES;
    return 0;
}

/* Start the ranks; return main's exit status. MPI is this program's to begin, where this process is
 * one rank of several, and to end, unless a rank has failed: it would wait for that one. */
static int launch_ranks(const dtrain_launch_desc *launch, dtrain_rank_fn rank, void *user)
{
    dtrain_launch_info info;
#ifdef DTRAIN_USE_MPI
    dtrain_launch_place place;
    int level;
    const bool joins = dtrain_launch_plan(launch, &place) == DTRAIN_OK && place.rank_count > 1 &&
                       place.started_count == 1;
    if (joins) signal(SIGPIPE, SIG_IGN); /* MPI writes to sockets of ranks that have ended */
    if (joins) MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level);
#endif
    const dtrain_result result = dtrain_launch(launch, rank, user, &info);
#ifdef DTRAIN_USE_MPI
    if (joins && result == DTRAIN_OK) MPI_Finalize();
#endif
    if (result == DTRAIN_OK)
        return run_stopped || info.signal ? stopped_status(&run_flags, info.signal) : 0;
    if (info.exit_code == 128 + SIGINT)
        fprintf(stderr, "\n" RUN_NAME ": stopped at once, as asked%s\n",
                run_flags.checkpoints ? "; what was saved before is there" : "");
    else fprintf(stderr, RUN_NAME ": %s\n", dtrain_last_error());
    return info.exit_code ? info.exit_code : 1;
}

#endif /* RUN_LAUNCH_H */
