/* pipeline.c: a deep network on the program's arrays, with its own backward, whose layers are divided over ranks. There
 * is no tape: a schedule says what each rank does next, and a runner sends activations and gradients.
 *
 *   build:   cc -O2 -I. examples/pipeline.c -o pipeline -lm -lpthread
 *   run:     ./pipeline   (as RANKS KIND: 2 3; kinds are 0 1F1B, 1 GPipe, 2 interleaved, 3 ZB-H1)
 *   expect, and the same losses with any other ranks and kind:
 *     rank 0   F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
 *     rank 1   .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3
 *     2 ranks are idle 7.7 % of the time; rank 0 keeps up to 2 passes
 *     step 100 loss 0.096313
 *     step 200 loss 0.068285
 *
 * The runner tells the program to compute a forward (F), a backward (B) or the gradients of weights (W). The program
 * keeps a pass in the slot that the action names, reads messages from its inbox, and says where the message to send
 * lies. src/parallel/pipeline.h explains the kinds; tools/schedule.h checks, draws and reads schedules. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"
#include "tools/schedule.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(call)                             \
    do {                                        \
        const dtrain_result result = (call);    \
        if (result != DTRAIN_OK) return result; \
    } while (0)

enum { LAYERS = 16, ROWS = 16, C = 8, AREA = ROWS * C, MICROS = 4, STEPS = 200 };
enum { CHUNKS = 2, SLOTS = CHUNKS * MICROS }; /* no schedule needs more slots */

/* What a pass of a stage keeps: the inputs of its layers and the output of the last one; the gradient of each input of
 * an activation; the gradient from the next stage, and the gradient for the stage before, also in the form that is
 * sent. */
typedef struct pass {
    float x[LAYERS + 1][AREA], d_sum[LAYERS][AREA], d_out[AREA], d_in[AREA], sent[AREA];
} pass;

typedef struct model {
    const dtrain_pipeline_schedule *schedule;
    int rank, step, stage[CHUNKS], first[CHUNKS], layers[CHUNKS]; /* first: its first layer */
    float w[LAYERS * C * C], g[LAYERS * C * C], loss;
    pass slots[SLOTS];
    float inboxes[SLOTS][AREA];
} model;

static float sample(const model *a, int micro, int i)
{
    return dtrain_random_normal(2, (uint64_t)(a->step % 8 * MICROS + micro), (uint64_t)i);
}

/* Layer: y = x + tanh(x W^T) / 2, rows of C. The network learns y = -tanh(x). */
static void forward(model *a, const dtrain_pipeline_action *action)
{
    const int chunk = action->chunk, m = action->micro_batch, n = a->layers[chunk];
    const float *w = a->w + a->first[chunk] * C * C;
    pass *p = &a->slots[action->slot];
    for (int i = 0; i < AREA; i++)
        p->x[0][i] = a->stage[chunk] == 0 ? sample(a, m, i) : a->inboxes[action->inbox][i];
    for (int l = 0; l < n; l++)
        for (int i = 0; i < AREA; i++) {
            float sum = 0;
            for (int c = 0; c < C; c++) sum += p->x[l][i / C * C + c] * w[(l * C + i % C) * C + c];
            p->x[l + 1][i] = p->x[l][i] + tanhf(sum) / 2;
        }
    for (int i = 0; i < AREA && a->first[chunk] + n == LAYERS; i++) {
        const float error = p->x[n][i] + tanhf(sample(a, m, i));
        a->loss += error * error / (2 * AREA * MICROS); /* micro-batches add up to the mean */
        p->d_out[i] = error / (AREA * MICROS);
    }
}
/* Compute the gradients of inputs, d_in, from d_out, which the loss or a message has filled. */
static void backward(model *a, const dtrain_pipeline_action *action)
{
    const float *w = a->w + a->first[action->chunk] * C * C;
    pass *p = &a->slots[action->slot];
    memcpy(p->d_in, p->d_out, sizeof p->d_in);
    for (int l = a->layers[action->chunk] - 1; l >= 0; l--) {
        for (int i = 0; i < AREA; i++) {
            const float t = 2 * (p->x[l + 1][i] - p->x[l][i]);
            p->d_sum[l][i] = p->d_in[i] * (1 - t * t) / 2;
        }
        for (int i = 0; i < AREA; i++)
            for (int c = 0; c < C; c++)
                p->d_in[i / C * C + c] += p->d_sum[l][i] * w[(l * C + i % C) * C + c];
    }
}
/* Compute the gradients of weights; a schedule can do that later. */
static void weight(model *a, const dtrain_pipeline_action *action)
{
    const pass *p = &a->slots[action->slot];
    float *g = a->g + a->first[action->chunk] * C * C;
    for (int l = 0; l < a->layers[action->chunk]; l++)
        for (int i = 0; i < AREA; i++)
            for (int c = 0; c < C; c++)
                g[(l * C + i % C) * C + c] += p->d_sum[l][i] * p->x[l][i / C * C + c];
}

static dtrain_result compute(void *user, const dtrain_pipeline_action *action)
{
    model *a = (model *)user;
    const uint32_t kind = a->schedule->kind, act = action->act;
    const bool apart = kind == DTRAIN_PIPELINE_ZB_H1;
    if (act == DTRAIN_PIPELINE_ACT_FORWARD) forward(a, action);
    if (act == DTRAIN_PIPELINE_ACT_BACKWARD) backward(a, action);
    if (act == (apart ? DTRAIN_PIPELINE_ACT_WEIGHT : DTRAIN_PIPELINE_ACT_BACKWARD))
        weight(a, action);
    for (int i = 0; i < LAYERS * C * C && act == DTRAIN_PIPELINE_ACT_STEP; i++)
        a->w[i] -= a->g[i], a->g[i] = 0;
    return DTRAIN_OK; /* REDUCE: with a data axis, sum the chunk's gradients over it */
}

/* Say where a message lies; in this program it is one tensor. */
static dtrain_result part(void *user, const dtrain_pipeline_action *action, size_t i,
                          dtrain_pipeline_part *out)
{
    model *a = (model *)user;
    pass *p = &a->slots[action->slot < 0 ? 0 : action->slot]; /* a RECEIVE has no slot yet */
    if (i == 1) return DTRAIN_OK;
    if (action->act == DTRAIN_PIPELINE_ACT_SEND) out->address = p->x[a->layers[action->chunk]];
    if (action->act == DTRAIN_PIPELINE_ACT_RECEIVE) out->address = a->inboxes[action->inbox];
    if (action->act == DTRAIN_PIPELINE_ACT_SEND_GRADIENT)
        out->address = memcpy(p->sent, p->d_in, sizeof p->sent);
    if (action->act == DTRAIN_PIPELINE_ACT_RECEIVE_GRADIENT) out->address = p->d_out;
    out->count = AREA;
    out->dtype = DTRAIN_DTYPE_F32;
    return DTRAIN_OK;
}

static dtrain_result train(model *a, dtrain_comm *comm)
{
    const dtrain_pipeline_schedule *s = a->schedule;
    const dtrain_pipeline_work work = {compute, part, a};
    schedule_report report;
    char text[16384];
    CHECK(schedule_check(s, NULL, a->rank, &report));
    CHECK(schedule_draw(s, text, sizeof text, NULL));
    if (a->rank == 0)
        printf("%s%d ranks are idle %.1f %% of the time; rank 0 keeps up to %d passes\n", text,
               (int)s->ranks, 100 * report.bubble, report.peak);
    for (int c = 0; c < s->chunks; c++) {
        a->stage[c] = c * s->ranks + a->rank;
        a->first[c] = LAYERS * a->stage[c] / (s->ranks * s->chunks);
        a->layers[c] = LAYERS * (a->stage[c] + 1) / (s->ranks * s->chunks) - a->first[c];
    }
    for (int i = 0; i < LAYERS * C * C; i++)
        a->w[i] = 0.3f * dtrain_random_normal(1, 0, (uint64_t)i);
    for (a->step = 1; a->step <= STEPS; a->step++) {
        a->loss = 0; /* except on the rank of the last stage */
        CHECK(dtrain_pipeline_run(s, comm, &work));
        CHECK(dtrain_all_reduce(comm, &a->loss, &a->loss, 1, DTRAIN_DTYPE_F32, DTRAIN_REDUCE_SUM,
                                NULL));
        if (a->rank == 0 && a->step % 100 == 0) printf("step %3d loss %.6f\n", a->step, a->loss);
    }
    return DTRAIN_OK;
}

static int rank_main(dtrain_world *world, void *user)
{
    const dtrain_mesh_desc desc = {.pipeline = dtrain_world_size(world)};
    model *a = (model *)calloc(1, sizeof *a);
    dtrain_mesh *mesh;
    if (!a || dtrain_mesh_create(world, &desc, &mesh) != DTRAIN_OK) return 1;
    a->schedule = (const dtrain_pipeline_schedule *)user;
    a->rank = dtrain_world_rank(world);
    const dtrain_result result = train(a, dtrain_mesh_comm(mesh, DTRAIN_AXIS_PIPELINE));
    dtrain_mesh_destroy(mesh);
    free(a);
    return result != DTRAIN_OK;
}

int main(int argc, char **argv)
{
    dtrain_launch_desc launch = {.rank_count = 2};
    dtrain_pipeline_desc desc = {.kind = DTRAIN_PIPELINE_ZB_H1};
    dtrain_pipeline_schedule *schedule;
    if (argc > 1) launch.rank_count = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2) desc.kind = (uint32_t)strtoul(argv[2], NULL, 10);
    if (launch.rank_count < 1 || launch.rank_count > LAYERS / CHUNKS) {
        fprintf(stderr, "usage: pipeline [RANKS, 1 to %d [KIND, 0 to 3]]\n", LAYERS / CHUNKS);
        return 2;
    }
    dtrain_result result = dtrain_pipeline_create(&desc, (int)launch.rank_count, MICROS, &schedule);
    if (result == DTRAIN_OK) {
        result = dtrain_launch(&launch, rank_main, schedule, NULL);
        dtrain_pipeline_destroy(schedule);
    }
    if (result == DTRAIN_OK) return 0;
    fprintf(stderr, "pipeline: %s\n", dtrain_last_error());
    return 1;
}
