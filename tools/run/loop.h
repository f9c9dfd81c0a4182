/* loop.h: what every rank of a run does: steps, validations, checkpoints; requests to stop and roll-backs. */
#ifndef RUN_LOOP_H
#define RUN_LOOP_H

#include "tools/run/job.h"
#include "tools/run/report.h"
#include "tools/run/same.h"

#include <signal.h>

/* Tell whether the state after `done` steps is to be saved. */
static bool save_due(const run_job *j, int64_t done, bool validated, bool stopping)
{
    const run_settings *s = j->s;
    if (!j->checkpoint) return false;
    return stopping || done == j->steps || (s->save_every && done % s->save_every == 0) ||
           (s->keep_best && validated);
}

/* Save the state after `done` steps where that is due. */
static dtrain_result save(run_job *j, int64_t done, const dtrain_step_record *record, bool stopping)
{
    if (!save_due(j, done, !isnan(record->val_loss), stopping)) return DTRAIN_OK;
    return dtrain_checkpoint_save(j->checkpoint, done, record->val_loss);
}

/* After a NaN: load the last checkpoint and go on behind the batch that led to it. Twice from the same checkpoint
 * would be a crash loop. */
static dtrain_result roll_back(run_job *j, int64_t *step)
{
    dtrain_loader_info data;
    dtrain_load_info from;
    dtrain_result result = DTRAIN_OK;
    (void)dtrain_checkpoint_wait(j->checkpoint); /* not saved: an older one is loaded */
    dtrain_loader_query(j->loader, &data);
    TRY(load_newest(j, false, &from));
    if (from.step < 0)
        TRY(dtrain_fail(DTRAIN_ERROR_NUMERIC, "step %lld is not finite, and nothing is saved yet",
                        (long long)*step + 1));
    if (from.step == j->rolled_back)
        TRY(dtrain_fail(DTRAIN_ERROR_NUMERIC,
                        "step %lld is not finite again after a roll-back to step %lld: lower the "
                        "learning rate, clip gradients or look at the data",
                        (long long)*step + 1, (long long)from.step));
    dtrain_loader_seek(j->loader, data.position);
    j->rolled_back = from.step;
    *step = from.step - 1; /* the loop adds one */
cleanup:
    return result;
}

/* Train from the step that the run begins or goes on with. A signal that asks a rank to stop makes all of them
 * stop after the same step, with a checkpoint. */
static dtrain_result train_steps(dtrain_world *world, run_job *j)
{
    dtrain_result result = DTRAIN_OK;
    bool stopping = false;
    for (int64_t step = j->resumed.step > 0 ? j->resumed.step : 0; step < j->steps && !stopping;
         step++) {
        dtrain_step_record record;
        result = dtrain_trainer_step(j->trainer, &record);
        if (result == DTRAIN_ERROR_NUMERIC && j->s->nonfinite == ROLLBACK) {
            TRY(roll_back(j, &step));
            continue;
        }
        TRY(result);
        j->sent = (uint64_t)(dtrain_record_value(&record, "comm_bytes") -
                             fmax(0, dtrain_record_value(&record, "tensor_bytes")) -
                             fmax(0, dtrain_record_value(&record, "pipeline_bytes")));
        TRY(j->program->validate(world, j, step + 1, record.stop_requested, &record));
        stopping =
            record.stop_requested; /* in the step, or in the validation, which has ended then */
        if (stopping) j->stopped_at = step + 1;
        TRY(nvml_step(&j->gpus, &record));
        TRY(dtrain_metrics_step(j->metrics, &record));
        TRY(save(j, step + 1, &record, stopping));
    }
    j->saved = j->checkpoint && dtrain_checkpoint_wait(j->checkpoint) == DTRAIN_OK;
    j->stopped = stopping;
cleanup:
    return result;
}

static dtrain_result finish_job(dtrain_world *world, run_job *j)
{
    dtrain_result result = DTRAIN_OK;
    dtrain_metrics_info info;
    uint64_t hash = 0;
    const bool first = dtrain_world_rank(world) == 0;
    dtrain_metrics_query(j->metrics, &info);
    if (j->s->deterministic) result = dtrain_strategy_verify(j->strategy, &hash);
    if (dtrain_metrics_finish(j->metrics) != DTRAIN_OK) /* a torn log is no torn training */
        fprintf(stderr, "\n" RUN_NAME ": warning: %s\n", dtrain_last_error());
    if (result != DTRAIN_OK) return result;
    if (first) show_end(world, j, &info.summary);
    if (first && j->s->deterministic)
        printf("  parameters           %016llx   bit-identical on all ranks%s\n",
               (unsigned long long)hash,
               j->s->tensor > 1 ? "; another --tensor has another hash of the same values" : "");
    return j->program->finish ? j->program->finish(world, j) : DTRAIN_OK;
}

/* End a rank: flush what it printed, and return its exit status. */
static int end_rank(dtrain_result result)
{
    if (result != DTRAIN_OK) return 1;
    if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
    fprintf(stderr, RUN_NAME ": what it had to say could not be written: %s\n", strerror(errno));
    return 1;
}

/* Whether a signal to any rank has stopped the run; known to a process that is itself a rank. */
static bool run_stopped;

/* Return the exit status of a run that was stopped. Without a checkpoint the run is lost, so it is a shell's for a
 * signal: 128 + its number (0: it came to another process, and counts as SIGTERM). */
static int stopped_status(const run_settings *s, int number)
{
    if (s->checkpoints || s->stop_status) return (int)s->stop_status;
    return 128 + (number ? number : SIGTERM);
}

/* Train as the switches say. A rank that fails prints nothing: dtrain_launch quotes the first error. */
static int run_rank(dtrain_world *world, void *user)
{
    const run_program *program = (const run_program *)user;
    void *own = calloc(1, program->own_bytes);
    run_job j = new_job(&run_flags, program, own);
    dtrain_result result =
        own ? DTRAIN_OK : dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for a job");
    if (result != DTRAIN_OK) return 1;
    TRY(same_flags(world));
    TRY(open_job(world, &j));
    TRY(program->start(world, &j));
    fflush(stdout);
    TRY(train_steps(world, &j));
    TRY(finish_job(world, &j));
    if (j.checkpoint) TRY(dtrain_checkpoint_wait(j.checkpoint)); /* the error of the last save */
    if (j.stopped &&
        stopped_status(j.s, 0)) { /* together: launchers kill the others when one has failed */
        char all[DTRAIN_MAX_RANKS];
        TRY(dtrain_world_all_gather(world, "", 1, all));
        run_stopped = !j.s->thread_ranks;
    }
cleanup:
    /* this rank met the limit, or quotes another that did */
    if (j.s->memory_limit && result != DTRAIN_OK &&
        (result == DTRAIN_ERROR_MEMORY || strstr(dtrain_last_error(), "memory limit:")))
        name_error(result, "--memory-limit", "");
    close_job(&j);
    free(own);
    return j.refused ? 2 : end_rank(result);
}

#endif /* RUN_LOOP_H */
