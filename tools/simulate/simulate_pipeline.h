/* simulate_pipeline.h: a step over a pipeline axis. Part of simulate.c: included behind one step of a rank.
 *
 *     units   what a micro-batch takes in each, with the messages of the tensor axis: run on the virtual clock
 *     stages  runs of units, the longest as short as possible
 *     order   dtrain_pipeline_create makes it, and its replay says when each action begins; messages between stages
 *             take time and keep no rank busy, as the runner's are asynchronous
 *     tail    for each rank: the last micro-batch's gradients become final in the backward that the replay has for
 *             them, and the strategy sends them along the data axis meanwhile; whoever ends last delays the optimizer
 *
 * GPUs are tensor x data x pipeline, the pipeline slowest: stages that do not share a node send each other over the
 * network, all GPUs of a node at the same time. */
#ifndef SIMULATE_PIPELINE_H
#define SIMULATE_PIPELINE_H

typedef struct stage_cost {
    dtrain_pipeline_costs seconds;
    double tensor; /* of them, waiting for the tensor axis */
} stage_cost;

/* Where a rank's stages are in the model, and what the replay says of them. */
typedef struct pipeline_stage {
    size_t first, end; /* parameters */
    stage_cost cost;
    double last; /* when the last micro-batch's gradients begin to be made */
} pipeline_stage;

typedef struct pipeline_run {
    dtrain_pipeline_schedule *schedule;
    dtrain_mesh *mesh;
    dtrain_comm *comm;
    pipeline_stage stages[MOST_STAGES];
    int count;        /* of stages */
    int ranks, nodes; /* of a stage: tensor x data */
    bool splits;      /* gradients of weights are actions of their own */
    double makespan;
} pipeline_run;

/* The layers from first to end - 1: shares the arrays of m. */
static model model_part(const model *m, size_t first, size_t end)
{
    model part = *m;
    part.params += first;
    part.layers += first;
    part.names += first;
    part.count = end - first;
    return part;
}

/* The backward of some layers, or a half of it; what checkpointing dropped is made again first. */
static dtrain_result backward_part(const model *m, long batch, int half)
{
    for (size_t i = m->count; i-- > 0;) {
        if (half != HALF_WEIGHTS &&
            (i + 1 == m->count || m->params[i + 1].unit != m->params[i].unit))
            TRY(forward_again(m, i, batch));
        TRY(backward_layer(m, i, batch, half));
    }
    return DTRAIN_OK;
}

/* Time one micro-batch in some layers. */
static dtrain_result time_part(const model *m, long batch, bool splits, stage_cost *cost)
{
    double at = sim.now;
    const double exposed = sim.exposed;
    for (size_t i = 0; i < m->count; i++) TRY(forward_layer(m, i, batch));
    cost->seconds.forward = sim.now - at;
    at = sim.now;
    TRY(backward_part(m, batch, splits ? HALF_INPUTS : HALF_BOTH));
    cost->seconds.backward = sim.now - at;
    at = sim.now;
    if (splits) TRY(backward_part(m, batch, HALF_WEIGHTS));
    cost->seconds.weight = sim.now - at;
    cost->tensor = sim.exposed - exposed;
    return DTRAIN_OK;
}

/* Whether so many stages, none of them empty, are enough where none takes longer than most; from the last unit on, so
 * that earlier stages have fewer. ends[s], or NULL: the unit behind stage s. */
static bool fill_stages(const double *units, int unit_count, int stages, double longest, int *ends)
{
    int unit = unit_count;
    for (int s = stages; s-- > 0;) {
        double sum = 0;
        if (ends) ends[s] = unit;
        while (unit > s && (sum == 0 || sum + units[unit - 1] <= longest)) sum += units[--unit];
        if (sum > longest) return false;
    }
    return unit == 0;
}

/* Cut units into stages: the longest as short as possible. */
static void cut_units(const double *units, int unit_count, int stages, int *ends)
{
    double low = 0, high = 0;
    for (int u = 0; u < unit_count; u++) high += units[u];
    for (int i = 0; i < 50; i++) {
        const double middle = 0.5 * (low + high);
        if (fill_stages(units, unit_count, stages, middle, NULL)) high = middle;
        else low = middle;
    }
    fill_stages(units, unit_count, stages, high, ends);
}

/* Seconds of a message between two ranks of the pipeline axis. */
static double stage_message(const pipeline_run *run, const model *m, long batch, int from, int to)
{
    const long per_node = sim.machine.gpus_per_node;
    const group two = {2, from * run->ranks / per_node != to * run->ranks / per_node ? 2 : 1};
    const group all = {(int)flags.tensor, 1};
    const double bytes = stage_bytes(m, batch);
    const double part = flags.scatter_stages ? bytes / (double)flags.tensor : bytes;
    const cost sent = collective_cost(&sim.machine, DTRAIN_COLLECTIVE_SEND, part, two);
    cost gathered = {0, 0, 0, 0};
    if (flags.scatter_stages)
        gathered = collective_cost(&sim.machine, DTRAIN_COLLECTIVE_ALL_GATHER, bytes, all);
    return sent.links + sent.latency + sent.own + gathered.links + gathered.latency + gathered.own;
}

/* What a model's stages take, and where they begin. */
static dtrain_result make_stages(const model *m, const row *r, pipeline_run *run)
{
    const dtrain_pipeline_schedule *s = run->schedule;
    const int units = (int)m->units;
    double *seconds = (double *)calloc(m->units, sizeof *seconds);
    int ends[MOST_STAGES];
    size_t at = 0, unit_first = 0;
    dtrain_result result = seconds ? DTRAIN_OK : dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory");
    run->count = s->ranks * s->chunks;
    if (result == DTRAIN_OK && (run->count > units || run->count > MOST_STAGES))
        result = dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                             "--pipeline %d of %d chunks: %d stages, and the model has %d units: "
                             "expected at most %d stages",
                             (int)s->ranks, (int)s->chunks, run->count, units,
                             units < MOST_STAGES ? units : MOST_STAGES);
    for (size_t i = 1; i <= m->count && result == DTRAIN_OK; i++) {
        if (i < m->count && m->params[i].unit == m->params[i - 1].unit) continue;
        const model part = model_part(m, unit_first, i);
        stage_cost cost;
        result = time_part(&part, r->batch, run->splits, &cost);
        seconds[m->params[i - 1].unit] =
            cost.seconds.forward + cost.seconds.backward + cost.seconds.weight;
        unit_first = i;
    }
    if (result == DTRAIN_OK) cut_units(seconds, units, run->count, ends);
    for (int k = 0; k < run->count && result == DTRAIN_OK; k++) {
        pipeline_stage *stage = &run->stages[k];
        stage->first = at;
        while (at < m->count && m->params[at].unit < (uint32_t)ends[k]) at++;
        stage->end = at;
        const model part = model_part(m, stage->first, stage->end);
        result = time_part(&part, r->batch, run->splits, &stage->cost);
    }
    free(seconds);
    return result;
}

/* Find where stages are: ranks[stage], and take the longer of the messages to both neighbours. */
static void add_messages(const model *m, const row *r, pipeline_run *run, int *ranks)
{
    const dtrain_pipeline_schedule *s = run->schedule;
    for (int rank = 0; rank < s->ranks; rank++)
        for (int c = 0; c < s->chunks; c++) ranks[c * s->ranks + rank] = rank;
    for (int k = 0; k < run->count; k++)
        for (int to = k - 1; to <= k + 1; to += 2)
            if (to >= 0 && to < run->count && ranks[to] != ranks[k])
                run->stages[k].cost.seconds.message =
                    most(run->stages[k].cost.seconds.message,
                         stage_message(run, m, r->batch, ranks[k], ranks[to]));
}

/* When a pass of a stage has what it needs, forward and backward: -1, not yet. */
typedef struct pipeline_pass {
    double arrived[2];
} pipeline_pass;

/* Let a rank do what it can; *clock is its time. Returns how many actions are done. */
static size_t play_rank(pipeline_run *run, const int *ranks, pipeline_pass *passes, int rank,
                        size_t at, double *clock)
{
    const dtrain_pipeline_schedule *s = run->schedule;
    for (; s->first[rank] + at < s->first[rank + 1]; at++) {
        const dtrain_pipeline_action *a = &s->actions[s->first[rank] + at];
        if (a->act > DTRAIN_PIPELINE_ACT_WEIGHT) continue;
        const int k = a->chunk * s->ranks + rank;
        const bool back = a->act == DTRAIN_PIPELINE_ACT_BACKWARD;
        const int to = back ? k - 1 : k + 1;
        const dtrain_pipeline_costs *costs = &run->stages[k].cost.seconds;
        pipeline_pass *pass = &passes[k * s->micro_batches + a->micro_batch];
        const bool last = a->micro_batch == s->micro_batches - 1;
        if (a->act == DTRAIN_PIPELINE_ACT_WEIGHT) {
            if (last) run->stages[k].last = *clock;
            *clock += costs->weight;
            continue;
        }
        if (pass->arrived[back] < 0) return at;
        *clock = most(*clock, pass->arrived[back]);
        if (back && last && !run->splits) run->stages[k].last = *clock;
        *clock += back ? costs->backward : costs->forward;
        if (to < 0) continue;
        if (to == run->count) pass->arrived[1] = *clock; /* the loss */
        else
            pass[(to - k) * s->micro_batches].arrived[back] =
                *clock + (ranks[to] == rank ? 0 : costs->message);
    }
    return at;
}

/* Find when the gradients of the last micro-batch begin to be made in each stage: a replay as that of
 * schedule_check, which has found that it ends. */
static dtrain_result find_last(pipeline_run *run, const int *ranks)
{
    const dtrain_pipeline_schedule *s = run->schedule;
    const size_t count = (size_t)run->count * (size_t)s->micro_batches;
    pipeline_pass *passes = (pipeline_pass *)calloc(count, sizeof *passes);
    size_t at[MOST_STAGES] = {0};
    double clock[MOST_STAGES] = {0};
    if (!passes) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory for %zu passes", count);
    for (size_t i = 0; i < count; i++) {
        passes[i].arrived[0] = i < (size_t)s->micro_batches ? 0 : -1;
        passes[i].arrived[1] = -1;
    }
    for (bool moved = true; moved;) {
        moved = false;
        for (int rank = 0; rank < s->ranks; rank++) {
            const size_t before = at[rank];
            at[rank] = play_rank(run, ranks, passes, rank, before, &clock[rank]);
            moved = moved || at[rank] != before;
        }
    }
    free(passes);
    for (int rank = 0; rank < s->ranks; rank++) run->makespan = most(run->makespan, clock[rank]);
    return DTRAIN_OK;
}

/* The model of one rank: its stages one behind the other, units counted anew. A weight that another rank has too is a
 * copy of its own. */
static dtrain_result rank_model(const model *m, const pipeline_run *run, int rank, model *own)
{
    const dtrain_pipeline_schedule *s = run->schedule;
    *own = *m;
    own->count = own->units = 0;
    own->params = (dtrain_param *)calloc(m->count, sizeof *own->params);
    own->layers = (layer *)calloc(m->count, sizeof *own->layers);
    own->names = NULL;
    if (!own->params || !own->layers) return dtrain_fail(DTRAIN_ERROR_MEMORY, "no memory");
    for (int c = 0; c < s->chunks; c++) {
        const pipeline_stage *stage = &run->stages[c * s->ranks + rank];
        for (size_t i = stage->first; i < stage->end; i++) {
            dtrain_param *p = &own->params[own->count];
            *p = m->params[i];
            if (i == stage->first || m->params[i].unit != m->params[i - 1].unit) own->units++;
            p->unit = own->units - 1;
            p->alias_of =
                m->params[i].alias_of && own->count && own->params[0].name == m->params[0].name
                    ? &own->params[0]
                    : NULL;
            own->layers[own->count++] = m->layers[i];
        }
    }
    return DTRAIN_OK;
}

/* Run the tail of a rank's step, which began at `start`; chunks in the order of the replay. */
static dtrain_result rank_tail(dtrain_strategy *strategy, const model *m, const model *own,
                               const pipeline_run *run, int rank, long batch)
{
    const dtrain_pipeline_schedule *s = run->schedule;
    const double start = sim.now;
    TRY(dtrain_strategy_accumulate(strategy, false));
    for (uint32_t u = 0; u < own->units; u++) {
        TRY(dtrain_strategy_gather(strategy, u, DTRAIN_PASS_FORWARD));
        TRY(dtrain_strategy_release(strategy, u));
    }
    size_t behind = own->count;
    for (int c = s->chunks; c-- > 0;) {
        const pipeline_stage *stage = &run->stages[c * s->ranks + rank];
        sim.now = most(sim.now, start + stage->last);
        behind -= stage->end - stage->first;
        for (size_t i = stage->end; i-- > stage->first;) {
            if (!run->splits && (i + 1 == m->count || m->params[i + 1].unit != m->params[i].unit))
                TRY(forward_again(m, i, batch));
            TRY(backward_layer(m, i, batch, run->splits ? HALF_WEIGHTS : HALF_BOTH));
            TRY(dtrain_strategy_ready(strategy, behind + i - stage->first));
        }
    }
    return dtrain_strategy_finish(strategy);
}

/* What one rank of the pipeline adds to a step: when its gradients are ready, and the optimizer's time; its memory. */
static dtrain_result simulate_rank(dtrain_world *world, const model *m, row *r,
                                   const pipeline_run *run, int rank, double *ready, double *update)
{
    const dtrain_pipeline_schedule *s = run->schedule;
    double kept = 0, again = 0, bytes = 0;
    int32_t slots = 0, inboxes = 0;
    library lib;
    model own;
    memset(&own, 0, sizeof own);
    dtrain_result result = rank_model(m, run, rank, &own);
    for (size_t i = s->first[rank]; i < s->first[rank + 1]; i++) {
        if (s->actions[i].slot >= slots) slots = s->actions[i].slot + 1;
        if (s->actions[i].inbox >= inboxes) inboxes = s->actions[i].inbox + 1;
    }
    for (int c = 0; c < s->chunks; c++) {
        const pipeline_stage *stage = &run->stages[c * s->ranks + rank];
        const model part = model_part(m, stage->first, stage->end);
        kept = most(kept, kept_bytes(&part, r->batch));
        again = most(again, again_bytes(&part, r->batch));
    }
    const double activations = slots * kept + again + inboxes * stage_bytes(m, r->batch);
    if (result == DTRAIN_OK)
        result = library_open(world, &own, r, run->ranks, run->nodes, activations, &lib);
    for (int step = 0; step < 2 && result == DTRAIN_OK; step++) {
        const double start = sim.now;
        const uint64_t sent = sim.sent;
        result = rank_tail(lib.strategy, m, &own, run, rank, r->batch);
        *ready = sim.now - start;
        if (result == DTRAIN_OK) result = dtrain_optimizer_step(lib.optimizer, 1e-3f, 1);
        *update = sim.now - start - *ready;
        r->sent = sim.sent - sent > r->sent ? sim.sent - sent : r->sent;
    }
    result = library_close(world, &own, r, run->ranks, &lib, result, &bytes);
    r->memory_gib = most(r->memory_gib, (bytes + activations) / 1073741824.0);
    free(own.params);
    free(own.layers);
    return result;
}

/* The sum of a weight that the first and the last stage have. */
static double tied_seconds(const model *m, const pipeline_run *run)
{
    const dtrain_pipeline_schedule *s = run->schedule;
    const dtrain_param *head = &m->params[m->count - 1];
    const group two = {2, (s->ranks - 1) * run->ranks / sim.machine.gpus_per_node ? 2 : 1};
    if (!head->alias_of) return 0;
    const double bytes = 4.0 * (double)(head->shape[0] * head->shape[1]) / (double)flags.tensor;
    return collective_cost(&sim.machine, DTRAIN_COLLECTIVE_ALL_REDUCE, bytes, two).links;
}

/* All ranks of one schedule. */
static dtrain_result simulate_schedule(dtrain_world *world, const model *m, row *r,
                                       pipeline_run *run)
{
    const dtrain_pipeline_schedule *s = run->schedule;
    dtrain_pipeline_costs costs[MOST_STAGES];
    schedule_report report;
    int ranks[MOST_STAGES] = {0};
    double ready = 0, update = 0, waited = 0;
    TRY(make_stages(m, r, run));
    add_messages(m, r, run, ranks);
    for (int k = 0; k < run->count; k++) costs[k] = run->stages[k].cost.seconds;
    TRY(schedule_check(s, costs, 0, &report));
    TRY(find_last(run, ranks));
    if (fabs(run->makespan / report.makespan - 1) > 1e-9)
        return dtrain_fail(DTRAIN_ERROR_INTERNAL, "a replay takes %g s, schedule_check says %g s",
                           run->makespan, report.makespan);
    for (int rank = 0; rank < s->ranks; rank++) {
        double own_ready = 0, own_update = 0, own_waited = 0;
        TRY(simulate_rank(world, m, r, run, rank, &own_ready, &own_update));
        for (int c = 0; c < s->chunks; c++)
            own_waited += run->stages[c * s->ranks + rank].cost.tensor;
        ready = most(ready, own_ready);
        update = most(update, own_update);
        waited = most(waited, own_waited * s->micro_batches);
    }
    ready = most(ready, report.makespan) + tied_seconds(m, run);
    r->compute_ms = 1e3 * report.makespan * (1 - report.bubble);
    r->straggler_ms = r->compute_ms * flags.straggler / 100 * expected_maximum((double)r->gpus);
    r->step_ms = 1e3 * (ready + update) + r->straggler_ms;
    r->bubble_ms = 1e3 * report.makespan * report.bubble;
    r->tensor_ms = 1e3 * waited;
    r->data_ms = 1e3 * (ready - report.makespan + update);
    r->exposed_ms = r->tensor_ms + r->data_ms;
    r->rate = 1e3 * (double)(r->batch * r->accum) * m->samples / r->step_ms /
              (double)(flags.tensor * flags.pipeline);
    return DTRAIN_OK;
}

/* Fills the rest of r, as simulate does, for --pipeline above 1. */
static dtrain_result simulate_pipeline(dtrain_world *world, const model *m, row *r)
{
    const long per_node = sim.machine.gpus_per_node, t = flags.tensor;
    pipeline_run run;
    dtrain_pipeline_desc desc = {0};
    memset(&run, 0, sizeof run);
    desc.kind = (uint32_t)flags.pipeline_schedule;
    desc.chunks = (uint32_t)flags.chunks;
    if (r->gpus % (t * flags.pipeline))
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "--tensor %ld x --pipeline %ld does not divide the %ld GPUs", t,
                           flags.pipeline, r->gpus);
    if (r->strategy > 1)
        return dtrain_fail(DTRAIN_ERROR_ARGUMENT,
                           "--pipeline works with --strategies ddp and zero1, not with %s",
                           strategies[r->strategy]);
    run.ranks = (int)(r->gpus / flags.pipeline);
    if (r->nodes > 1 && per_node % run.ranks && run.ranks % per_node)
        return dtrain_fail(
            DTRAIN_ERROR_ARGUMENT,
            "%ld GPUs in %ld stages, on nodes of %ld: expected stages of whole nodes, or "
            "whole stages on each node",
            r->gpus, flags.pipeline, per_node);
    run.nodes = run.ranks > per_node ? (int)(run.ranks / per_node) : 1;
    run.splits = desc.kind == DTRAIN_PIPELINE_ZB_H1;
    TRY(dtrain_pipeline_create(&desc, (int)flags.pipeline, (int)r->accum, &run.schedule));
    dtrain_result result = mesh_open(world, run.ranks, run.nodes, &run.comm, &run.mesh);
    if (result == DTRAIN_OK)
        result = axis_open(world, m, dtrain_mesh_comm(run.mesh, DTRAIN_AXIS_TENSOR), r->batch);
    if (result == DTRAIN_OK) result = simulate_schedule(world, m, r, &run);
    axis_close(world);
    dtrain_mesh_destroy(run.mesh);
    dtrain_comm_destroy(run.comm);
    dtrain_pipeline_destroy(run.schedule);
    return result;
}

#endif
