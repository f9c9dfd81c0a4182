/* links.h: --probe-links: how fast the links are, and what a step that was measured makes of them. */
#ifndef PLAN_LINKS_H
#define PLAN_LINKS_H

#include "tools/plan/probe.h"
#include "tools/run/run.h"

enum {
    LINKS_STEP = 4
}; /* the step whose time the forecast uses: the first ones touch cold memory */

/* Print what pairs of one kind have measured. */
static void show_link(const char *where, const probe_link *link)
{
    if (!link->pair_count) return;
    printf("links   %s: %.3g GB/s, %.3g us; slowest from rank %d to rank %d, %.3g GB/s\n", where,
           1e-9 * link->bytes_per_second, link->latency_us, link->slow_rank, link->slow_peer,
           1e-9 * link->worst_bytes_per_second);
}

/* The links and the number of collectives over the data axis so far, only on rank 0, which reports; and the program
 * that trains over them. */
static probe_info probed_links;
static uint64_t probed_calls;
static const run_program *probed_program;

/* Measure the links and print them, before the first step. */
static dtrain_result start_probed(dtrain_world *world, const run_job *j)
{
    probe_info links;
    dtrain_result result = probed_program->start(world, j);
    if (result == DTRAIN_OK) result = measure_links(world, 2, &links);
    if (result != DTRAIN_OK || dtrain_world_rank(world)) return result;
    probed_links = links;
    show_link("inside of a node", &links.inside);
    show_link("between nodes", &links.between);
    printf("links   all-reduce: %.3g GB/s a rank, %.3g us; probed for %.1f s\n",
           1e-9 * links.reduce_bytes_per_second, links.reduce_us, links.seconds);
    return DTRAIN_OK;
}

/* Compare the links with what a step has needed, and warn when they are the limit. */
static void forecast_links(dtrain_world *world, run_job *j, const dtrain_step_record *record)
{
    /* next to nothing beside a slow link: clocks of several ranks may make it less */
    const double compute_ms = fmax(0, dtrain_record_value(record, "step_ms") -
                                          dtrain_record_value(record, "exposed_comm_ms") -
                                          dtrain_record_value(record, "data_ms"));
    const double sent = dtrain_record_value(record, "comm_bytes");
    dtrain_strategy_info info;
    probe_step step = {0};
    probe_forecast forecast;
    if (dtrain_world_rank(world)) return;
    dtrain_strategy_query(j->strategy, &info);
    step.call_count = info.traffic.operation_count - probed_calls;
    probed_calls = info.traffic.operation_count;
    if (record->step != LINKS_STEP) return;
    step.compute_seconds = compute_ms / 1e3;
    step.wire_bytes = (uint64_t)sent;
    if (compute_ms == 0 && sent == 0) return;
    predict_step(&probed_links, &step, &forecast);
    dtrain_log(world, forecast.limited ? DTRAIN_LOG_WARNING : DTRAIN_LOG_INFO, "%s", forecast.text);
}

static dtrain_result validate_probed(dtrain_world *world, run_job *j, int64_t done, bool stopping,
                                     dtrain_step_record *record)
{
    forecast_links(world, j, record);
    return probed_program->validate(world, j, done, stopping, record);
}

/* Train as a program does, with the links measured first and compared with a step. Return main's exit status. */
static int train_and_probe(run_settings *s, const run_program *program)
{
    static run_program probing;
    probed_program = program;
    probing = *program;
    probing.start = start_probed;
    probing.validate = validate_probed;
    return run_training(s, &probing);
}

#endif /* PLAN_LINKS_H */
