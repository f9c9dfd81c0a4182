/* abi_user.c: a program of a shared library, which test_lib.sh compiles with one dtrain.h and runs with the library of
 * another version. Infos have marks after them that must stay, descs have rubbish after them that must not be read.
 *
 *   abi_user DIRECTORY [FIELD]      trains two ranks and prints what came out; with NEWER, sets the new FIELD to 5
 *   abi_user join [FIELD|null]      joins a world of one member
 *   abi_user abi null|broken        launches without dtrain_header_abi, or with a struct of another size */
#include "dtrain.h"

#include <stdio.h>
#include <string.h>

#define CHECK(call)                                                                      \
    do {                                                                                 \
        if ((call) != DTRAIN_OK) return fprintf(stderr, "%s\n", dtrain_last_error()), 1; \
    } while (0)
#define EXPECT(condition)                                                                   \
    do {                                                                                    \
        if (!(condition)) return fprintf(stderr, "line %d: %s\n", __LINE__, #condition), 1; \
    } while (0)

/* A struct with bytes after it: rubbish after a desc, marks after an info. */
#define MARKED(type, name)      \
    struct {                    \
        type it;                \
        unsigned char mark[64]; \
    } name;                     \
    memset(&name, 0xa5, sizeof name)
#define DESC(type, name) \
    MARKED(type, name);  \
    memset(&name.it, 0, sizeof name.it)
#define UNTOUCHED(name) EXPECT(untouched(name.mark))

static int untouched(const unsigned char *mark)
{
    for (int i = 0; i < 64; i++)
        if (mark[i] != 0xa5) return 0;
    return 1;
}

typedef struct task {
    const char *directory, *field;
} task;

#ifdef NEWER
#define SET(desc) \
    if (!strcmp(t->field, #desc)) desc.it.newest = 5
#else
#define SET(desc) (void)t
#endif

static int train(dtrain_world *world, void *user)
{
    const task *t = (const task *)user;
    const int rank = dtrain_world_rank(world);
    float value[8] = {1, 2, 3, 4, 5, 6, 7, 8}, grad[8] = {0};
    dtrain_param param;
    dtrain_strategy *strategy;
    dtrain_optimizer *optimizer;
    dtrain_state *state;
    dtrain_checkpoint *checkpoint;
    dtrain_mesh *mesh;
    memset(&param, 0, sizeof param);
    param.name = "weight", param.value = value, param.grad = grad, param.count = 8;

    MARKED(dtrain_world_info, place);
    dtrain_world_query(world, &place.it);
    UNTOUCHED(place);
    EXPECT(place.it.rank == rank && place.it.size == 2 && place.it.timeout_ms == 30000);
    dtrain_world_query(NULL, &place.it);
    UNTOUCHED(place);
    EXPECT(place.it.size == 0 && place.it.timeout_ms == 0);

    DESC(dtrain_mesh_desc, meshed);
    MARKED(dtrain_mesh_info, shape);
    meshed.it.data = 2;
    SET(meshed);
    CHECK(dtrain_mesh_create(world, &meshed.it, &mesh));
    dtrain_mesh_query(mesh, &shape.it);
    UNTOUCHED(shape);
    EXPECT(shape.it.data == 2 && shape.it.data_rank == rank && !shape.it.sequence_parallel);

    dtrain_compression_desc plain;
    DESC(dtrain_strategy_desc, how);
    MARKED(dtrain_strategy_info, made);
    memset(&plain, 0, sizeof plain);
    how.it.bucket_bytes = 4096, how.it.mesh = mesh, how.it.compression = &plain;
    SET(how);
    CHECK(dtrain_strategy_create(world, &param, 1, &how.it, &strategy));
    dtrain_strategy_query(strategy, &made.it);
    UNTOUCHED(made);
    EXPECT(!strcmp(made.it.name, "ddp") && made.it.param_count == 1 && made.it.replicas == 2);
    EXPECT(made.it.desc.bucket_bytes == 4096 && made.it.desc.mesh == mesh && !made.it.reason[0]);
    EXPECT(made.it.total_elements == 8 && !strcmp(made.it.traffic.backend, "local"));

    dtrain_optimizer_desc sgd = dtrain_optimizer_defaults(DTRAIN_OPTIMIZER_SGD);
    sgd.momentum = 0.5f; /* like all numbers below: no processor rounds them differently */
    CHECK(dtrain_optimizer_create(world, strategy, &sgd, &optimizer));
    DESC(dtrain_state_desc, all);
    DESC(dtrain_checkpoint_desc, saves);
    DESC(dtrain_load_desc, loads);
    MARKED(dtrain_load_info, loaded);
    all.it.strategy = strategy, all.it.optimizer = optimizer;
    SET(all);
    CHECK(dtrain_state_create(world, &all.it, &state));
    const dtrain_result found = dtrain_checkpoint_load(state, t->directory, &loads.it, &loaded.it);
    UNTOUCHED(loaded);
    EXPECT(found == DTRAIN_OK ? loaded.it.step == 3 && loaded.it.ranks == 2 && !loaded.it.note[0]
                              : found == DTRAIN_ERROR_NOT_FOUND && loaded.it.step == -1);
    saves.it.directory = t->directory, saves.it.state = state, saves.it.keep = 1;
    SET(saves);
    CHECK(dtrain_checkpoint_open(world, &saves.it, &checkpoint));
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 8; i++) grad[i] = (float)(i * step + rank - 3);
        CHECK(dtrain_strategy_ready(strategy, 0));
        CHECK(dtrain_strategy_finish(strategy));
        CHECK(dtrain_optimizer_step(optimizer, 0.125f, 1));
    }
    MARKED(dtrain_optimizer_info, steps);
    MARKED(dtrain_checkpoint_info, saved);
    dtrain_optimizer_query(optimizer, &steps.it);
    UNTOUCHED(steps);
    EXPECT(steps.it.step_count == (found == DTRAIN_OK ? 6 : 3) && steps.it.scratch_bytes == 0);
    if (found != DTRAIN_OK) CHECK(dtrain_checkpoint_save(checkpoint, 3, 0));
    dtrain_checkpoint_query(checkpoint, &saved.it);
    UNTOUCHED(saved);
    EXPECT(saved.it.saved == (found != DTRAIN_OK) && saved.it.snapshot_bytes == 0);
#ifdef NEWER
    /* A library that knows it has 7 and what the desc said; one that does not says nothing. */
    if (rank == 0) printf("newest %d\n", (int)made.it.newest);
    EXPECT(!place.it.newest && !shape.it.newest && !steps.it.newest && !loaded.it.newest);
#endif
    if (rank == 0) {
        for (int i = 0; i < 8; i++) printf("%a ", (double)value[i]);
        printf("\n");
    }
    CHECK(dtrain_checkpoint_close(checkpoint));
    dtrain_state_destroy(state);
    dtrain_optimizer_destroy(optimizer);
    dtrain_strategy_destroy(strategy);
    dtrain_mesh_destroy(mesh);
    return 0;
}

static int gather(void *user, const void *mine, void *all, size_t bytes)
{
    (void)user;
    memcpy(all, mine, bytes);
    return 0;
}

static int join(const task *t)
{
    dtrain_world *world;
    DESC(dtrain_join_desc, guest);
    MARKED(dtrain_world_info, place);
    guest.it.size = 1, guest.it.all_gather = gather, guest.it.threads = 2;
    guest.it.abi = strcmp(t->field, "null") ? &dtrain_header_abi : NULL;
    SET(guest);
    CHECK(dtrain_world_join(&guest.it, &world));
    dtrain_world_query(world, &place.it);
    UNTOUCHED(place);
    EXPECT(place.it.size == 1 && place.it.threads == 2);
    CHECK(dtrain_world_leave(world));
    printf("joined\n");
    return 0;
}

int main(int count, char **args)
{
    task own = {count > 1 ? args[1] : "", count > 2 ? args[2] : ""}, *t = &own;
    const char *const abi = strcmp(own.directory, "abi") ? "" : own.field;
    dtrain_abi broken = dtrain_header_abi;
    if (!strcmp(own.directory, "join")) return join(t);
    for (uint32_t i = 0; i < broken.count; i++)
        if (broken.bytes[i] == sizeof(dtrain_param)) broken.bytes[i] += 8;
    DESC(dtrain_launch_desc, launch);
    MARKED(dtrain_launch_info, end);
    launch.it.rank_count = 2, launch.it.timeout_ms = 30000,
    launch.it.options.log_level = DTRAIN_LOG_ERROR;
    launch.it.abi = !strcmp(abi, "null") ? NULL : *abi ? &broken : &dtrain_header_abi;
    SET(launch);
    const dtrain_result result = dtrain_launch(&launch.it, train, &own, &end.it);
    UNTOUCHED(end);
    EXPECT(end.it.exit_code == (result != DTRAIN_OK) && end.it.restart_count == 0);
    if (result != DTRAIN_OK) fprintf(stderr, "%s\n", dtrain_last_error());
    return end.it.exit_code;
}
