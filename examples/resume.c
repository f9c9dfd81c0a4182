/* resume.c: a run that survives the death of a rank. It saves checkpoints, its ranks are started again, and later it
 * continues with another number of ranks under another strategy.
 *
 *   build:   cc -O2 -I. examples/resume.c -o resume -lm -lpthread
 *   run:     ./resume [directory]                    default: resume_checkpoints
 *   expect:
 *     undisturbed:
 *     2 ranks begin at step 0
 *     2 ranks end at step 100: average loss 7.2531, parameters HASH
 *     with an accident, checkpoints in resume_checkpoints:
 *     2 ranks begin at step 0
 *     2 ranks begin at step 50, started again
 *     2 ranks end at step 100: average loss 7.2531, parameters HASH
 *     gone on with other ranks:
 *     3 ranks begin at step 100
 *     3 ranks end at step 150: average loss 3.7858, parameters HASH2
 *
 * HASH and HASH2 stand for hashes, which depend on the processor's instruction set. The first two are the same: in step
 * 60 rank 1 kills itself, both ranks start again from their last checkpoint, and end with the same bits. Then three
 * ranks continue the run, with sharded parameters. A second call of the program finds all steps done.
 *
 * The model is a matrix W that learns to be a given one; the loop, its data and its gradient are the program's own.
 * dtrain_state lists once what a run must remember: the values, AdamW's moments and steps come from the strategy and
 * the optimizer, and the program adds its own, the loss averaged over steps. */
#define DTRAIN_IMPLEMENTATION
#include "dtrain.h"

#include <signal.h>
#include <stdio.h>

enum { ROWS = 32, COLUMNS = 16, SAVE_EVERY = 25 };

typedef struct run {
    const char *directory; /* of checkpoints; NULL: none */
    uint32_t kind;
    int steps;
    bool accident; /* rank 1 dies in step 60, unless it was started again */
} run;

#define CHECK(call)                        \
    do {                                   \
        if ((call) != DTRAIN_OK) return 1; \
    } while (0)

static float wanted(int i) { return (float)(i * 7 % 13) / 13; }

/* One step: the gradient of |W x - wanted x|^2 for an x that depends on step and rank. */
static dtrain_result backward(dtrain_strategy *strategy, dtrain_param *w, int step, int rank,
                              float *loss)
{
    dtrain_result result = dtrain_strategy_gather(strategy, 0, DTRAIN_PASS_FORWARD);
    if (result == DTRAIN_OK) result = dtrain_strategy_gather(strategy, 0, DTRAIN_PASS_BACKWARD);
    if (result != DTRAIN_OK) return result;
    *loss = 0;
    for (int r = 0; r < ROWS; r++) {
        float x[COLUMNS], error = 0;
        for (int c = 0; c < COLUMNS; c++) {
            x[c] = dtrain_random_normal(1, (uint64_t)rank, (uint64_t)(step * COLUMNS + c));
            error += (w->value[r * COLUMNS + c] - wanted(r * COLUMNS + c)) * x[c];
        }
        for (int c = 0; c < COLUMNS; c++) w->grad[r * COLUMNS + c] = 2 * error * x[c];
        *loss += error * error / ROWS;
    }
    result = dtrain_strategy_ready(strategy, 0);
    if (result == DTRAIN_OK) result = dtrain_strategy_release(strategy, 0);
    return result == DTRAIN_OK ? dtrain_strategy_finish(strategy) : result;
}

/* Every rank runs this function, again after a restart. */
static int train(dtrain_world *world, void *user)
{
    const run *r = user;
    const int rank = dtrain_world_rank(world);
    dtrain_param w = {
        .name = "w", .shape = {ROWS, COLUMNS}, .init = DTRAIN_INIT_NORMAL, .init_scale = 1};
    dtrain_strategy_desc where = {.kind = r->kind};
    const dtrain_optimizer_desc adamw = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_ADAMW);
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_state *state;
    dtrain_checkpoint *checkpoint = NULL;
    dtrain_load_info from = {.step = -1};
    dtrain_world_info info;
    float average = 0;
    uint64_t hash;

    dtrain_world_query(world, &info);
    CHECK(dtrain_strategy_create(world, &w, 1, &where, &strategy));
    CHECK(dtrain_optimizer_create(world, strategy, &adamw, &optimizer));
    const dtrain_state_item own = {.name = "average loss", .count = 1, .memory = &average};
    const dtrain_state_desc what = {
        .strategy = strategy, .optimizer = optimizer, .items = &own, .item_count = 1};
    CHECK(dtrain_state_create(world, &what, &state));
    if (r->directory) {
        const dtrain_result loaded = dtrain_checkpoint_load(state, r->directory, NULL, &from);
        if (loaded != DTRAIN_OK && loaded != DTRAIN_ERROR_NOT_FOUND) return 1; /* or none yet */
        const dtrain_checkpoint_desc how = {.directory = r->directory, .state = state};
        CHECK(dtrain_checkpoint_open(world, &how, &checkpoint));
    }
    int step = from.step > 0 ? (int)from.step : 0;
    if (rank == 0)
        printf("%d ranks begin at step %d%s\n", info.size, step,
               info.restart_count ? ", started again" : "");
    fflush(stdout);
    for (; step < r->steps; step++) {
        float loss;
        if (r->accident && step == 60 && rank == 1 && !info.restart_count) raise(SIGKILL);
        CHECK(backward(strategy, &w, step, rank, &loss));
        CHECK(dtrain_optimizer_step(optimizer, 0.02f, 1));
        CHECK(dtrain_all_reduce(dtrain_world_comm(world), &loss, &loss, 1, DTRAIN_DTYPE_F32,
                                DTRAIN_REDUCE_MEAN, NULL));
        average = 0.9f * average + 0.1f * loss;
        if (checkpoint && (step + 1) % SAVE_EVERY == 0)
            CHECK(dtrain_checkpoint_save(checkpoint, step + 1, loss));
    }
    CHECK(dtrain_checkpoint_close(checkpoint));
    CHECK(dtrain_strategy_verify(strategy, &hash));
    if (rank == 0)
        printf("%d ranks end at step %d: average loss %.4f, parameters %016llx\n", info.size, step,
               average, (unsigned long long)hash);
    dtrain_state_destroy(state);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    return 0;
}

static int launch(uint32_t ranks, const run *r)
{
    const dtrain_launch_desc desc = {.rank_count = ranks, .restarts = 2, .backoff_ms = 100};
    if (dtrain_launch(&desc, train, (void *)(uintptr_t)r, NULL) == DTRAIN_OK) return 0;
    fprintf(stderr, "resume: %s\n", dtrain_last_error());
    return 1;
}

int main(int argc, char **argv)
{
    const char *directory = argc > 1 ? argv[1] : "resume_checkpoints";
    const run undisturbed = {.kind = DTRAIN_STRATEGY_DDP, .steps = 100};
    const run hit = {
        .directory = directory, .kind = DTRAIN_STRATEGY_DDP, .steps = 100, .accident = true};
    const run sharded = {.directory = directory, .kind = DTRAIN_STRATEGY_FULL_SHARD, .steps = 150};
    printf("undisturbed:\n");
    if (launch(2, &undisturbed)) return 1;
    printf("with an accident, checkpoints in %s:\n", directory);
    if (launch(2, &hit)) return 1;
    printf("gone on with other ranks:\n");
    return launch(3, &sharded);
}
