/* line.h: a pipeline that multiplies, for schedules over NCCL: a stage multiplies its rows by a factor, forwards and
 * backwards, on the device. All values are exact, and what is read too early is another micro-batch's. */
#ifndef DTRAIN_TEST_LINE_H
#define DTRAIN_TEST_LINE_H

#include "dtrain.h"

#include <stdlib.h>
#include <string.h>

#ifndef LINE_WIDTH
#define LINE_WIDTH 4 /* values of a row */
#endif
enum { LINE_MICROS = 16, LINE_CHUNKS = 3 }; /* at most */

typedef struct line {
    const dtrain_pipeline_schedule *s;
    dtrain_device *device;
    int rank;
    float *samples, *losses, *results;                  /* (micro-batches) rows */
    float *outputs, *gradients, *made, *sent, *inboxes; /* (chunks * micro-batches) rows */
} line;

static float *line_row(float *rows, int i)
{
    return i < 0 ? NULL : rows + (size_t)i * LINE_WIDTH;
} /* -1: none */
static float line_factor(int stage)
{
    static const float factors[] = {2, 0.5f, -1};
    return factors[stage % 3];
}
static int line_stage(const line *l, int chunk) { return chunk * l->s->ranks + l->rank; }
static dtrain_result line_multiply(const line *l, float factor, const float *from, float *to)
{
    dtrain_axpby_args args;
    memset(&args, 0, sizeof args);
    args.count = LINE_WIDTH;
    args.a = factor;
    args.x = from;
    args.y = to;
    args.dtype = DTRAIN_DTYPE_F32;
    return l->device->ops->axpby(l->device, &args);
}

static dtrain_result line_compute(void *user, const dtrain_pipeline_action *a)
{
    line *l = (line *)user;
    const int stage = line_stage(l, a->chunk), micro = a->micro_batch;
    const float factor = line_factor(stage);
    if (a->act == DTRAIN_PIPELINE_ACT_FORWARD) {
        float *output = line_row(l->outputs, a->slot);
        const float *input =
            stage == 0 ? line_row(l->samples, micro) : line_row(l->inboxes, a->inbox);
        dtrain_result result = line_multiply(l, factor, input, output);
        if (result != DTRAIN_OK || stage + 1 < l->s->ranks * l->s->chunks) return result;
        result = line_multiply(l, 1, output, line_row(l->losses, micro));
        if (result != DTRAIN_OK) return result;
        return line_multiply(l, 1, output, line_row(l->gradients, a->slot));
    }
    if (a->act != DTRAIN_PIPELINE_ACT_BACKWARD) return DTRAIN_OK;
    return line_multiply(l, factor, line_row(l->gradients, a->slot),
                         stage == 0 ? line_row(l->results, micro) : line_row(l->made, a->slot));
}

/* Activations go in two parts. */
static dtrain_result line_part(void *user, const dtrain_pipeline_action *a, size_t i,
                               dtrain_pipeline_part *out)
{
    line *l = (line *)user;
    const bool activation =
        a->act == DTRAIN_PIPELINE_ACT_SEND || a->act == DTRAIN_PIPELINE_ACT_RECEIVE;
    float *row = line_row(l->gradients, a->slot);
    if (i == (activation ? 2 : 1)) return DTRAIN_OK;
    if (a->act == DTRAIN_PIPELINE_ACT_SEND) row = line_row(l->outputs, a->slot);
    if (a->act == DTRAIN_PIPELINE_ACT_RECEIVE) row = line_row(l->inboxes, a->inbox);
    if (a->act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT) {
        const float *made = line_row(l->made, a->slot);
        row = line_row(l->sent, a->slot);
        const dtrain_result result = line_multiply(l, 1, made, row);
        if (result != DTRAIN_OK) return result;
    }
    out->address = row + (i ? LINE_WIDTH - 1 : 0);
    out->count = i ? 1 : activation ? LINE_WIDTH - 1 : LINE_WIDTH;
    out->dtype = DTRAIN_DTYPE_F32;
    return DTRAIN_OK;
}

/* Run the schedule twice, then read what the first and the last stage have made where they are. */
static dtrain_result line_run(line *l, dtrain_comm *comm, float *host, long *wrong)
{
    const dtrain_pipeline_work work = {line_compute, line_part, l};
    const int stages = l->s->ranks * l->s->chunks;
    const size_t values = (size_t)l->s->micro_batches * LINE_WIDTH;
    float factor = 1;
    dtrain_result result = DTRAIN_OK;
    for (int step = 0; step < 2 && result == DTRAIN_OK; step++)
        result = dtrain_pipeline_run(l->s, comm, &work);
    if (result == DTRAIN_OK) result = l->device->ops->synchronize(l->device);
    for (int stage = 0; stage < stages; stage++) factor *= line_factor(stage);
    for (int c = 0; c < l->s->chunks; c++) {
        for (int last = 0; last < 2 && result == DTRAIN_OK; last++) { /* a stage may be both */
            if (line_stage(l, c) != (last ? stages - 1 : 0)) continue;
            result = l->device->ops->copy(l->device, host, last ? l->losses : l->results,
                                          values * sizeof *host, DTRAIN_COPY_DEVICE_TO_HOST);
            for (size_t i = 0; i < values && result == DTRAIN_OK; i++)
                *wrong += host[i] != (float)(i + 1) * factor * (last ? 1 : factor);
        }
    }
    return result;
}

/* Run a schedule over all ranks of comm; *wrong values of this rank are not what they should be. */
static dtrain_result line_try(dtrain_comm *comm, uint32_t kind, uint32_t chunks, int micros,
                              long *wrong)
{
    const dtrain_pipeline_desc desc = {kind, chunks, NULL};
    const int slots = (int)chunks * micros;
    const size_t values = (size_t)micros * LINE_WIDTH;
    const size_t bytes = (size_t)(3 * micros + 5 * slots) * LINE_WIDTH * sizeof(float);
    dtrain_pipeline_schedule *s = NULL;
    void *memory = NULL;
    line l;
    memset(&l, 0, sizeof l);
    dtrain_result result = dtrain_pipeline_create(&desc, dtrain_comm_size(comm), micros, &s);
    if (result != DTRAIN_OK) return result;
    float *host = (float *)malloc(values * sizeof *host);
    l.s = s;
    l.device = dtrain_world_device(comm->world);
    l.rank = dtrain_comm_rank(comm);
    result = host ? l.device->ops->alloc(l.device, bytes, &memory) : DTRAIN_ERROR_MEMORY;
    if (result == DTRAIN_OK) {
        l.samples = (float *)memory;
        l.losses = line_row(l.samples, micros);
        l.results = line_row(l.losses, micros);
        l.outputs = line_row(l.results, micros);
        l.gradients = line_row(l.outputs, slots);
        l.made = line_row(l.gradients, slots);
        l.sent = line_row(l.made, slots);
        l.inboxes = line_row(l.sent, slots);
        for (size_t i = 0; i < values; i++) host[i] = (float)(i + 1);
        result = l.device->ops->copy(l.device, l.samples, host, values * sizeof *host,
                                     DTRAIN_COPY_HOST_TO_DEVICE);
    }
    if (result == DTRAIN_OK) result = line_run(&l, comm, host, wrong);
    if (memory) l.device->ops->free(l.device, memory, bytes);
    dtrain_pipeline_destroy(s);
    free(host);
    return result;
}

#endif
